"""Report of one run, of a rehearsal or of a preflight: its stages, failures, metrics, weights and verdicts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_geomask.tools.rehearse.run_outcome import RunFailure, RunResult, Stage
from nemo_geomask.tools.rehearse.weight_conditions import precision_notes
from nemo_geomask.tools.shared.terminal_tables import format_table

SHOWN = (
    *("loss", "grad_norm", "reward", "gen_kl_error", "token_mult_prob_error", "probs_ratio"),
    *("geomask/mismatch_k3", "geomask/kept_tokens", "geomask/weight_mean"),
)
"""Metrics in the text report; the JSON report has all metrics."""


_REQUIREMENTS = ("ray", "vllm", "transformers")
"""Packages without which no rehearsal runs."""


def run_lines(outcome: RunResult, log: Path | None = None) -> Iterator[str]:
    """Yield the lines on one run: its stages, its failure with the file of its output, its loss and its metrics."""
    yield from (_stage(stage) for stage in outcome.stages)
    if outcome.failure is not None:
        yield from ("", *_failure(outcome.failure, log))
    for unmet in outcome.unmet:
        if unmet is not outcome.failure:
            yield from ("", *sentence("also", unmet))
    yield from ("", *_loss_calls(outcome))
    yield from ("", *_metrics(outcome))


def row(name: str, state: str, seconds: str, details: str) -> str:
    """Return the line of a stage."""
    return f"  {name:<11} {state:<18} {seconds:>9}  {details}".rstrip()


def _stage(stage: Stage) -> str:
    seconds = f"{stage.seconds:.1f} s" if stage.times else ""
    details = ", ".join(stage.labels)
    if stage.times > 1 and stage.first is not None:
        details += f" ({stage.times} times, the first {stage.first:.1f} s)"
    return row(stage.name, stage.state, seconds, details)


def absent_requirements() -> Iterator[str]:
    """Yield a line on packages that no run works without, if one is not installed."""
    if absent := [name for name in _REQUIREMENTS if importlib.util.find_spec(name) is None]:
        yield f"missing in this Python ({sys.executable}): {', '.join(absent)}; use the Python of NeMo-RL's environment"


def _failure(failure: RunFailure, log: Path | None) -> Iterator[str]:
    yield from sentence(f"failed in {failure.stage}", failure)
    yield from absent_requirements()
    if failure.traceback:
        yield ""
        yield from (f"  | {line}" for line in failure.traceback.rstrip().splitlines())
    if log is not None:
        yield f"  the whole output is in {log}"


def sentence(heading: str, failure: RunFailure) -> Iterator[str]:
    """Yield the lines of a failure: the error, the likely setting and what to change."""
    yield f"{heading}: {failure.error}"
    if failure.setting is not None:
        yield f"  likely: {failure.setting}" + (f": {failure.fix}" if failure.fix else "")


def verdict_lines(outcome: RunResult) -> Iterator[str]:
    """Yield the comparison of weights after refits, and the diagnosis of the records."""
    compared = [event for event in outcome.weights if "differences" in event]
    if compared:
        equal = sum(not event["differences"] for event in compared)
        engines = max(int(event["engines"]) for event in compared)
        yield (
            f"weights: trainer and {'engine' if engines == 1 else f'{engines} engines'} agree after {equal} of "
            f"{len(compared)} refits, by the sums of {max(int(event['groups']) for event in compared)} groups"
        )
        yield from (f"  {note}" for note in precision_notes(compared[-1].get("precision", {})))
    else:
        reason = next((str(event["error"]) for event in outcome.weights if "error" in event), "no refit was observed")
        yield f"weights: not compared between trainer and engine: {reason}"
    if outcome.mismatch is None:
        yield "diagnosis: none, since no log-probs were recorded or logged"
    else:
        yield f"diagnosis: {outcome.mismatch.sentence}"
    if outcome.update is not None:
        yield f"curr at first updates, against prev: {outcome.update.sentence}"
        yield f"loss: recomputed from the record for {len(outcome.replayed)} of {len(outcome.metrics)} steps"


def _loss_calls(outcome: RunResult) -> Iterator[str]:
    if not outcome.workers:
        yield "no worker reported which loss it called"
    elif not outcome.loss:
        yield "no loss was called in the workers"
    for name, count in outcome.loss.items():
        yield f"the loss that trained, by the workers: {name}, called {count} times"
    for worker in outcome.workers:
        yield f"  process {worker['pid']} on {worker['host']}, {worker['python']}, nemo_geomask of {worker['file']}"


def _metrics(outcome: RunResult) -> Iterator[str]:
    if not outcome.metrics:
        yield "no step was logged"
        return
    steps = sorted(outcome.metrics)
    shown = [name for name in SHOWN if any(name in outcome.metrics[step] for step in steps)]
    values = {name: [outcome.metrics[step].get(name) for step in steps] for name in shown}
    rows = [[name, *(None if value is None else f"{value:.6g}" for value in row)] for name, row in values.items()]
    yield format_table(("", *(f"step {step}" for step in steps)), rows, indent=2)
