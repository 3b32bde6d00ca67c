"""What a rehearsal found, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_geomask.rehearsal.control import Comparison
from nemo_geomask.rehearsal.rehearse import Rehearsal
from nemo_geomask.rehearsal.report import Breakdown, RunResult, Stage

__all__ = ["as_json", "as_text"]

SHOWN = (
    *("loss", "grad_norm", "reward", "gen_kl_error", "token_mult_prob_error", "probs_ratio"),
    *("geomask/mismatch_k3", "geomask/kept_tokens", "geomask/weight_mean"),
)
"""Metrics of the text; the JSON has all."""


def as_text(done: Rehearsal) -> list[str]:
    """The report, a line an item."""
    where = "GPUs" if done.gpus else "CPUs, with stand-ins for CUDA"
    lines = [f"{done.recipe} through the NeMo-RL in {done.nemo_rl}, on {where}", ""]
    counts = ", ".join(
        f"{sum(finding.rule.severity == severity for finding in done.findings)} {severity}s"
        for severity in ("error", "warning", "note")
    )
    lines.append(_row("validation", "ran" if done.plan else "failed", "", counts))
    if done.outcome is None or done.plan is None:
        for finding in done.findings:
            if finding.rule.severity == "error":
                place = f"{finding.origin}: " if finding.origin else ""
                lines += ["", f"{place}{finding.rule.id} {finding.key}", f"  {finding.message}"]
        return [*lines, "", "The recipe has errors; nothing was run."]
    lines += [_stage(stage) for stage in done.outcome.stages]
    if done.outcome.failure is not None:
        lines += ["", *_failure(done.outcome.failure, done)]
    lines += ["", *_proof(done.outcome)]
    lines += ["", *_metrics(done.outcome)]
    lines += _control(done)
    lines += _resumed(done)
    lines += ["", "changed for the rehearsal:"]
    lines.append(f"  {done.plan.layout}, of {done.plan.full_layout}")
    lines.append(f"  a random {done.plan.model.model_type}, by {done.plan.model.source}")
    small = [change for change in done.plan.changes if not change.why]
    lines.append(f"  {len(small)} settings of sizes, folders and prompts: {done.folder / 'command.txt'}")
    lines += ["", "not rehearsed:", *(f"  {what}" for what in done.plan.unrehearsed)]
    verdict = "rehearsed" if done.ok else "failed"
    return [*lines, "", f"{verdict} in {done.seconds:.0f} s; command, log and metrics are in {done.folder}"]


def _row(name: str, state: str, seconds: str, what: str) -> str:
    return f"  {name:<11} {state:<18} {seconds:>9}  {what}".rstrip()


def _stage(stage: Stage) -> str:
    seconds = f"{stage.seconds:.1f} s" if stage.times else ""
    what = ", ".join(stage.what)
    if stage.times > 1 and stage.first is not None:
        what += f" ({stage.times} times, the first {stage.first:.1f} s)"
    return _row(stage.name, stage.state, seconds, what)


def _failure(failure: Breakdown, done: Rehearsal) -> Iterator[str]:
    yield f"failed in {failure.stage}: {failure.error}"
    if failure.setting is not None:
        yield f"  likely: {failure.setting}" + (f": {failure.fix}" if failure.fix else "")
    if failure.text != failure.error:
        yield ""
        yield from (f"  | {line}" for line in failure.text.rstrip().splitlines())
    yield f"  the whole output is in {done.folder / 'log.txt'}"


def _proof(outcome: RunResult) -> Iterator[str]:
    if not outcome.workers:
        yield "no worker said which loss it called"
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
    yield f"  {'':<24}" + "".join(f"{f'step {step}':>14}" for step in steps)
    for name in SHOWN:
        if any(name in outcome.metrics[step] for step in steps):
            cells = (outcome.metrics[step].get(name) for step in steps)
            yield f"  {name:<24}" + "".join(f"{'' if value is None else f'{value:.6g}':>14}" for value in cells)


def _control(done: Rehearsal) -> Iterator[str]:
    if done.ours_only:
        yield ""
        yield f"no control: NeMo-RL's own loss has nothing of {', '.join(done.ours_only)}"
    if done.control is None:
        return
    yield ""
    failure = done.control.failure
    if failure is not None:
        yield f"the control, with NeMo-RL's own loss, failed in {failure.stage}: {failure.error}"
    for name, count in done.control.loss.items():
        yield f"control: {name}, called {count} times"
    yield from _compared(done.comparisons)


def _compared(comparisons: tuple[Comparison, ...]) -> Iterator[str]:
    for each in comparisons:
        verdict = "equal" if each.equal else "DIFFERENT" if each.sampled_alike else "other samples by now"
        values = f"{each.ours:>16.9g}{each.theirs:>16.9g}{each.difference:>10.1e}"
        yield f"  step {each.step} {each.name:<24}{values}  {verdict}"


def _resumed(done: Rehearsal) -> Iterator[str]:
    if done.resumed is None:
        return
    failure = done.resumed.failure
    yield ""
    if failure is not None:
        yield f"resuming from the checkpoint failed in {failure.stage}: {failure.error}"
        if done.resumed.stages:
            yield f"  the whole output is in {done.folder / 'resumed' / 'log.txt'}"
    else:
        yield "the last step, and the same resumed from the checkpoint before it:"
    yield from _compared(done.resumptions)


def as_json(done: Rehearsal) -> dict[str, Any]:
    """All of it, as what JSON can hold: numbers that are not finite are None."""
    found: dict[str, Any] = _finite(_fields(done))
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(done: Rehearsal) -> dict[str, Any]:
    validation = {
        "name": "validation",
        "state": "ran" if done.plan else "failed",
        "findings": [
            {
                "rule": finding.rule.id,
                "severity": finding.rule.severity,
                "key": finding.key,
                "message": finding.message,
                "where": str(finding.origin) if finding.origin else None,
            }
            for finding in done.findings
        ],
    }
    result: dict[str, Any] = {
        "recipe": str(done.recipe),
        "nemo_rl": str(done.nemo_rl),
        "ok": done.ok,
        "gpus": done.gpus,
        "seconds": round(done.seconds, 2),
        "folder": str(done.folder),
        "stages": [validation],
        "failure": None,
        "loss": {},
        "workers": [],
        "metrics": {},
        "control": None,
        "resumed": None,
        "changes": [],
        "not_rehearsed": [],
    }
    if done.outcome is None or done.plan is None:
        return result
    failure = done.outcome.failure
    return {
        **result,
        "stages": [validation, *(vars(stage) for stage in done.outcome.stages)],
        "failure": None if failure is None else vars(failure),
        "loss": dict(done.outcome.loss),
        "workers": list(done.outcome.workers),
        "metrics": {str(step): dict(values) for step, values in done.outcome.metrics.items()},
        "control": _control_as_json(done),
        "resumed": None if done.resumed is None else _run_as_json(done.resumed, done.resumptions),
        "layout": str(done.plan.layout),
        "model_type": done.plan.model.model_type,
        "changes": [
            {"key": change.key, "was": change.was, "value": change.value, "why": change.why or None}
            for change in done.plan.changes
        ],
        "not_rehearsed": list(done.plan.unrehearsed),
    }


def _control_as_json(done: Rehearsal) -> dict[str, Any] | None:
    if done.control is None:
        return {"ran": False, "ours_only": list(done.ours_only)} if done.ours_only else None
    return {"ran": True, **_run_as_json(done.control, done.comparisons)}


def _run_as_json(run: RunResult, comparisons: tuple[Comparison, ...]) -> dict[str, Any]:
    return {
        "failure": None if run.failure is None else vars(run.failure),
        "loss": dict(run.loss),
        "metrics": {str(step): dict(values) for step, values in run.metrics.items()},
        "comparisons": [{**vars(each), "difference": each.difference, "equal": each.equal} for each in comparisons],
    }
