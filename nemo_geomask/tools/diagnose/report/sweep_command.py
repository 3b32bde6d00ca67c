"""The ``sweep`` command from its options to the output: choose steps, replay them under each candidate, and print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_survey import read_step, survey_run
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run
from nemo_geomask.tools.diagnose.report import correction_sweep
from nemo_geomask.tools.diagnose.report.candidate_outcome import DEFINITIONS, PARTS, WITHOUT_GRADIENT, CandidateOutcome
from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch
from nemo_geomask.tools.diagnose.report.json_formats import CandidateJson, MeasureJson, SweepJson, TokensJson
from nemo_geomask.tools.diagnose.report.report_tables import Table, print_tables
from nemo_geomask.tools.diagnose.report.sweep_candidates import CANDIDATES, GRID, split_recipe_loss
from nemo_geomask.tools.diagnose.report.sweep_recommendation import explain_no_recommendation, pareto_front, recommend
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.progress_bar import track
from nemo_geomask.tools.shared.terminal_text import escape_line

_WRONG_LOGPROBS = ("positive_logprobs", "shifted", "zero_logprobs", "nonfinite")
"""Causes whose log-probs are not those of the tokens."""
MAX_NONFINITE = 1e-3
"""Share of non-finite log-probs up to which a replay leaves them out."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of ``nemo-geomask sweep``.

    Attributes:
        directory: folder of one run's records or logs.
        step_count: number of steps to replay.
        last_steps_only: replay the last steps; False: evenly spaced steps of the whole run.
        include_grid: also compare the candidates of ``GRID``, whose bounds are narrower and wider.
        at: log-probs of the current policy, as for :func:`~nemo_geomask.tools.diagnose.report.correction_sweep.replay`.
        recipe: recipe whose ``loss_fn`` gives the settings that all candidates share, and a candidate with its
            corrections; None: NeMo-RL's defaults.
        output: print tables and the recommended block, only the block, or JSON.
        cache: folder for records converted from logs; None: next to the logs.
        skip_damaged: leave damaged files out, with their steps if they have no other; else they are an error.
    """

    directory: Path
    step_count: int = 8
    last_steps_only: bool = False
    include_grid: bool = False
    at: Literal["prev", "curr"] = "prev"
    recipe: str | None = None
    output: Literal["tables", "block", "json"] = "tables"
    cache: Path | None = None
    skip_damaged: bool = False


def run_sweep(options: SweepOptions) -> str:
    """Replay a run's batches under every candidate, and print the effect of each.

    Returns:
        Why no candidate is recommended; empty if one is.

    Raises:
        ConfigError: an option or the recipe is invalid, or the folder holds several runs.
        DataError: the folder holds no run, its records lack columns that a replay needs, their log-probs are wrong, or
            no token has a gradient.
    """
    if options.step_count < 1:
        raise ConfigError(f"--steps {options.step_count} must be at least 1")
    run = find_run(options.directory, skip_damaged=options.skip_damaged)
    base: dict[str, Any] = {}
    candidates = [*CANDIDATES, *(GRID if options.include_grid else ())]
    if options.recipe is not None:
        recipe = read_recipe(options.recipe, leave=("data", "env", "logger"))
        base, recipe_candidate = split_recipe_loss(recipe.data.get("loss_fn") or {})
        if recipe_candidate is not None:
            candidates.insert(1, recipe_candidate)
    candidates, incompatible = correction_sweep.select_compatible(candidates, base)
    batches = _StepBatches(run, _choose_steps(run.steps, options), options.cache)
    _check_logprobs(run, batches.steps, options.cache)
    steps = track(batches, len(batches.steps), "replaying steps")
    outcomes = correction_sweep.replay(steps, candidates, base, at=options.at)
    reason = explain_no_recommendation(outcomes)
    best, block = (None, "") if reason else recommend(outcomes, base)

    if options.output == "json":
        front = {id(outcome) for outcome in pareto_front(outcomes)}
        values: SweepJson = {
            "version": JSON_VERSION,
            "run": str(run.directory),
            "steps": batches.steps,
            "left_out": {str(step): count for step, count in batches.left_out.items()},
            "damaged_files": {str(path): message for path, message in batches.damaged.items()},
            "at": options.at,
            "does_not_fit": incompatible,
            "recommended": None if best is None else best.candidate.name,
            "loss_fn": block or None,
            "no_recommendation": reason,
            "definitions": DEFINITIONS,
            "tokens": _token_counts(outcomes[0]),
            "candidates": [_outcome_json(outcome, on_front=id(outcome) in front) for outcome in outcomes],
        }
        print(to_json(values))
        return reason
    if options.output == "tables":
        print_tables(_tables(outcomes, best, batches))
        if incompatible:
            print(f"\nincompatible with this loss_fn: {', '.join(incompatible)}")
        print()
    if block:
        print(block)
    return reason


def _check_logprobs(run: RunFiles, steps: Sequence[int], cache: Path | None) -> None:
    """Raise DataError if the log-probs of the steps are wrong: what a correction does is computed from them."""
    diagnosis = diagnose(survey_run(run, steps, cache))
    for shown in diagnosis.shown:
        detection = shown.ranked.detection
        is_trace = shown.cause.id == "nonfinite" and detection.value <= MAX_NONFINITE
        if shown.cause.id in _WRONG_LOGPROBS and not is_trace:
            raise DataError(
                f"{run.directory}: {shown.cause.name} ({detection.description}): bias and variance would be computed "
                f"from wrong log-probs; {shown.cause.action}"
            )


def _choose_steps(steps: Sequence[int], options: SweepOptions) -> list[int]:
    count = options.step_count
    if options.last_steps_only or len(steps) <= count:
        return list(steps[-count:])
    return [steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)]


@dataclass
class _StepBatches:
    """Iterable of each step's number and batch.

    ``left_out`` counts the sequences that the batch had no room for; ``damaged`` has the files that were left out, and
    the error of each.
    """

    run: RunFiles
    steps: list[int]
    cache: Path | None
    left_out: dict[int, int] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        for step in list(self.steps):
            blocks = list(read_step(self.run, step, self.cache, self.damaged))
            if not blocks and self.damaged:
                self.steps.remove(step)
                continue
            batch, left_out = padded_batch(blocks)
            if left_out:
                self.left_out[step] = left_out
            yield step, batch


def _tables(outcomes: Sequence[CandidateOutcome], best: CandidateOutcome | None, batches: _StepBatches) -> list[Table]:
    front = {id(outcome) for outcome in pareto_front(outcomes)}
    counts = _token_counts(outcomes[0])
    has_silent = counts["with_gradient"] < counts["trained"]
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        mark = "→" if outcome is best else "*" if id(outcome) in front else ""
        skipped = ", ".join(map(str, outcome.skipped))
        measures = [outcome.value(name) for name in DEFINITIONS]
        if has_silent:
            measures += [outcome.value_of_all(name) for name in WITHOUT_GRADIENT]
        rows.append((mark, outcome.candidate.name, *measures, skipped, outcome.candidate.source))
    title = f"Steps {', '.join(map(str, batches.steps))}"
    if batches.left_out:
        title += f"; {sum(batches.left_out.values())} sequences left out"
    if batches.damaged:
        first, *_ = batches.damaged.values()
        title += f"; {len(batches.damaged)} files left out as damaged, the first: {escape_line(first)}"
    title += f"; *: no other has less bias and less variance, →: recommended; over {_describe_tokens(counts)}"
    removed = [
        (outcome.candidate.name, *(outcome.removed_share(part) for part in PARTS[1:]))
        for outcome in outcomes
        if outcome.value("removed") > 0
    ]
    of_all = tuple(f"{name}, of all" for name in WITHOUT_GRADIENT) if has_silent else ()
    return [
        Table("candidates", title, ("", "", *DEFINITIONS, *of_all, "steps skipped", "source"), rows),
        Table("removed", "Share removed, of tokens that are", ("", *PARTS[1:]), removed),
    ]


def _token_counts(outcome: CandidateOutcome) -> TokensJson:
    """Return the number of tokens that the measures are over, and of all trained tokens."""
    with_gradient = round(float(outcome.tokens[0]))
    return {"with_gradient": with_gradient, "trained": with_gradient + outcome.silent_tokens}


def _describe_tokens(counts: TokensJson) -> str:
    if counts["with_gradient"] == counts["trained"]:
        return f"{counts['trained']:,} trained tokens"
    return (
        f"{counts['with_gradient']:,} of {counts['trained']:,} trained tokens, without those whose advantage is 0 and "
        "which have no gradient; 'of all' includes them"
    )


def _outcome_json(outcome: CandidateOutcome, *, on_front: bool) -> CandidateJson:
    def measure(name: str) -> MeasureJson:
        return {"value": outcome.value(name), "interval": outcome.interval(name)}

    return {
        "name": outcome.candidate.name,
        "settings": dict(outcome.candidate.settings),
        "source": outcome.candidate.source,
        "removed": measure("removed"),
        "bias": measure("bias"),
        "variance": measure("variance"),
        "ess": measure("ess"),
        "advantage": measure("advantage"),
        "of_all_trained_tokens": {name: outcome.value_of_all(name) for name in WITHOUT_GRADIENT},
        "removed_of": {part: outcome.removed_share(part) for part in PARTS},
        "skipped": outcome.skipped,
        "metrics": outcome.metrics,
        "on_front": on_front,
    }
