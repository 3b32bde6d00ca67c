"""The ``sweep`` command: choose steps, replay them under each candidate, recommend one, and print."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import build_loss
from nemo_geomask.recipe import read_recipe
from nemo_geomask.records.record_checks import read_metadata
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_survey import read_facts, read_step, survey_run
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import MAX_PULL, MIN_SEQUENCES
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, find_run
from nemo_geomask.tools.diagnose.report import correction_sweep
from nemo_geomask.tools.diagnose.report.correction_sweep import DEFINITIONS, CandidateOutcome
from nemo_geomask.tools.diagnose.report.json_formats import CandidateJson, MeasureJson, SweepJson
from nemo_geomask.tools.diagnose.report.report_tables import print_tables
from nemo_geomask.tools.diagnose.report.sweep_candidates import (
    CANDIDATES,
    GRID,
    RECIPE_SOURCE,
    RUN_SOURCE,
    recorded_loss,
    split_loss,
)
from nemo_geomask.tools.diagnose.report.sweep_tables import explain_harm, sweep_table
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.progress_bar import track
from nemo_geomask.tools.shared.terminal_text import escape_line
from nemo_geomask.yaml_text import inline_yaml

NEGLIGIBLE_BIAS = 0.01
"""Bias of the gradient, as a share of it, that no correction is worth: engines that only round are below it."""
_WRONG_LOGPROBS = (
    *("positive_logprobs", "shifted", "zero_logprobs", "nonfinite", "scaled", "biased_weight", "current_policy"),
)
"""Causes whose log-probs are not those of the tokens, or of no distribution."""
MAX_NONFINITE = 1e-3
"""Share of non-finite log-probs up to which a replay leaves them out."""
MAX_VARIANCE, MAX_VARIANCE_OF_HARM = 1.1, 2.0
"""Largest variance of a recommended candidate, relative to none: if the pull is small, and if it is not known to be.

A bias that persists does harm that no smaller step mends; a larger variance costs time.
"""
SMALL_GAIN = 0.8
"""Share of the bias, or pull, without correction above which a recommended candidate is said to help little."""


def run_sweep(
    directory: Path,
    *,
    step_count: int = 8,
    last_steps_only: bool = False,
    include_grid: bool = False,
    at: Literal["prev", "curr"] = "prev",
    recipe: str | None = None,
    output: Literal["tables", "block", "json"] = "tables",
    cache: Path | None = None,
    skip_damaged: bool = False,
) -> str:
    """Replay a run's batches under every candidate, and print the effect of each.

    The arguments are those of ``nemo-geomask sweep``: its steps are spread evenly over the run, or the last ones. The
    ``loss_fn`` of ``recipe``, or else the recorded one, has the settings that all candidates share, and its corrections
    are a candidate.

    Returns:
        Why no candidate is recommended; empty if one is.

    Raises:
        ConfigError: an option or the recipe is invalid, or the folder holds several runs.
        DataError: the folder holds no run, its records lack columns that a replay needs, their log-probs are wrong, or
            no token has a gradient.
    """
    if step_count < 1:
        raise ConfigError(f"--steps {step_count} must be at least 1")
    run = find_run(directory, skip_damaged=skip_damaged)
    candidates = [*CANDIDATES, *(GRID if include_grid else ())]
    batches = _StepBatches(run, _choose_steps(run.steps, step_count, last_steps_only), cache)
    if recipe is None:
        recorded = _recorded_loss(run, batches.steps)
        base, corrections = split_loss(recorded, RUN_SOURCE)
        origin = "as recorded" if recorded else "NeMo-RL's default, as the records name none; --recipe names another"
    else:
        settings = read_recipe(recipe, leave=("data", "env", "logger")).data.get("loss_fn") or {}
        base, corrections = split_loss(settings, RECIPE_SOURCE)
        other_names = _recorded_names(run, batches.steps) - {base.get("name", "clipped_pg")}
        origin = "of the recipe" + (f"; the records are of {', '.join(sorted(other_names))}" if other_names else "")
    if corrections is not None:
        candidates.insert(1, corrections)
    candidates, incompatible = correction_sweep.select_compatible(candidates, base)
    objective = f"{base.get('name', 'clipped_pg')} ({origin})"
    sums = _check_logprobs(run, batches.steps, cache)
    steps = track(batches, len(batches.steps), "replaying steps")
    outcomes = correction_sweep.replay(steps, candidates, base, at=at)
    reason = explain_no_recommendation(outcomes)
    best, block = (None, "") if reason else recommend(outcomes, base, objective)
    decisive = deciding_measure(outcomes)
    front = {id(outcome) for outcome in pareto_front(outcomes, decisive)}
    with_gradient = outcomes[0].tokens
    values: SweepJson = {
        "version": JSON_VERSION,
        "run": str(run.directory),
        "objective": objective,
        "steps": batches.steps,
        "left_out": {str(step): count for step, count in batches.left_out.items()},
        "damaged_files": {str(path): message for path, message in batches.damaged.items()},
        "at": at,
        "does_not_fit": incompatible,
        "recommended": None if best is None else best.candidate.name,
        "loss_fn": block or None,
        "no_recommendation": reason,
        "decided_by": decisive,
        "wrong_tokens": sums.mean("wrong_tokens", "sequences_with_advantages"),
        "advantage_explained": sums.advantage_explained().value,
        "definitions": DEFINITIONS,
        "tokens": {"with_gradient": with_gradient, "trained": with_gradient + outcomes[0].silent_tokens},
        "candidates": [_outcome_json(outcome, on_front=id(outcome) in front) for outcome in outcomes],
    }
    if output == "json":
        print(to_json(values))
    elif output == "tables":
        print_tables([sweep_table(values)])
        print(f"\n{explain_harm(sums, outcomes[0].pull())}")
        if incompatible:
            print(f"\nincompatible with this loss_fn: {', '.join(incompatible)}")
        print()
    if block and output != "json":
        print(block)
    return reason


def _facts(run: RunFiles, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    return (read_facts(read_metadata(path)) for path in run.paths(steps))


def _recorded_names(run: RunFiles, steps: Sequence[int]) -> set[str]:
    settings = (facts.get("settings") for facts in _facts(run, steps))
    return {escape_line(str(values.get("name"))) for values in settings if isinstance(values, dict)}


def _recorded_loss(run: RunFiles, steps: Sequence[int]) -> dict[str, Any]:
    """Return the ``loss_fn`` that the steps were trained with; empty if the records name none.

    Raises: ConfigError: it is not the same in all steps, not valid, or not of this package.
    """
    different: list[dict[str, Any]] = []
    for facts in _facts(run, steps):
        if (settings := recorded_loss(facts)) not in different:
            different.append(settings)
    if len(different) > 1:
        raise ConfigError(
            f"{run.directory}: the steps are of different loss_fn; give --recipe, or fewer --steps with --last"
        )
    return different[0] if different else {}


def _check_logprobs(run: RunFiles, steps: Sequence[int], cache: Path | None) -> StepSums:
    """Return the sums over the steps.

    Raises: DataError: their log-probs are wrong; what a correction does is computed from them.
    """
    statistics = survey_run(run, steps, cache)
    for shown in diagnose(statistics).shown:
        detection = shown.detection
        is_trace = shown.cause.id == "nonfinite" and detection.value <= MAX_NONFINITE
        if shown.cause.id in _WRONG_LOGPROBS and not is_trace:
            raise DataError(
                f"{run.directory}: {shown.cause.name} ({detection.description}): bias and variance would be computed "
                f"from wrong log-probs; {shown.cause.action}"
            )
    return statistics.total()


def _choose_steps(steps: Sequence[int], count: int, last_steps_only: bool) -> list[int]:
    if last_steps_only or len(steps) <= count:
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
            batch, left_out = correction_sweep.padded_batch(blocks)
            if left_out:
                self.left_out[step] = left_out
            yield step, batch


def deciding_measure(outcomes: Sequence[CandidateOutcome]) -> Literal["pull", "bias"]:
    """Return what a correction is chosen by: the pull if it is surely too large without correction, else the bias.

    Where the recorded contexts predict no advantage, the pull is not known to be 0: other parts of a prefix may.
    """
    return "pull" if outcomes[0].interval("pull")[0] > MAX_PULL else "bias"


def _max_variance(outcomes: Sequence[CandidateOutcome]) -> float:
    return MAX_VARIANCE if outcomes[0].interval("pull")[1] <= MAX_PULL else MAX_VARIANCE_OF_HARM


def pareto_front(
    outcomes: Sequence[CandidateOutcome], decisive: Literal["pull", "bias"] = "bias"
) -> list[CandidateOutcome]:
    """Return the outcomes that no other beats: in pull or bias, or in variance, without being worse in either."""
    points = [(outcome.value(decisive), outcome.value("variance")) for outcome in outcomes]
    return [
        outcome
        for outcome, (bias, variance) in zip(outcomes, points, strict=True)
        if not math.isnan(bias)
        and not any(b <= bias and v <= variance and (b, v) != (bias, variance) for b, v in points)
    ]


def explain_no_recommendation(outcomes: Sequence[CandidateOutcome]) -> str:
    """Return why the replayed steps do not tell which candidate is best; empty if they do.

    The first outcome is that of ``NO_CORRECTION``. Raises: DataError: no token has a gradient.
    """
    uncorrected = outcomes[0]
    if not uncorrected.tokens:
        if uncorrected.silent_tokens:
            raise DataError(
                f"all {uncorrected.silent_tokens:,} trained tokens of the replayed steps have an advantage of 0, so no "
                "loss has a gradient; replay other steps (--steps N, or the last ones with --last)"
            )
        raise DataError(
            "no token of the replayed steps is trained with finite log-probs of both engines: the masks leave out all "
            "of them, or prev or gen is missing; replay other steps (--steps N), or see `nemo-geomask diagnose`"
        )
    if uncorrected.sequences < MIN_SEQUENCES:
        return (
            f"only {uncorrected.sequences} sequences have a token with a gradient, and the intervals need at least "
            f"{MIN_SEQUENCES}; replay more steps (--steps N), or record more"
        )
    return ""


def recommend(
    outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any] | None = None, objective: str = "clipped_pg"
) -> tuple[CandidateOutcome, str]:
    """Return the best outcome and the ``loss_fn`` block that sets its candidate.

    The best candidate has the least pull or bias of those that skip no step and whose variance is at most the allowed
    one, all judged by the upper ends of their intervals. If its bias is within the interval of the bias without
    correction, which is the first outcome, or that is below :data:`NEGLIGIBLE_BIAS`, the first is returned.
    ``base`` has the settings that all share, and ``objective`` says what they train.
    """
    uncorrected, decisive = outcomes[0], deciding_measure(outcomes)
    allowed = [
        outcome
        for outcome in outcomes
        if outcome.interval("variance")[1] <= _max_variance(outcomes)
        and not outcome.skipped
        and outcome.candidate.settings
    ]
    best = min(allowed, key=lambda each: (each.interval(decisive)[1], each.value("variance")), default=uncorrected)
    is_negligible = decisive == "bias" and uncorrected.interval("bias")[1] < NEGLIGIBLE_BIAS
    if is_negligible or best.value(decisive) >= uncorrected.interval(decisive)[0]:
        best = uncorrected
    return best, format_loss_block(best, outcomes, base or {}, objective)


def format_loss_block(
    best: CandidateOutcome, outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any], objective: str = "clipped_pg"
) -> str:
    """Return the YAML of a ``loss_fn`` with the base's and a candidate's settings, and its measures as comments."""

    def percent(outcome: CandidateOutcome, measure: str) -> str:
        low, high = (100 * end for end in outcome.interval(measure))
        return f"{100 * outcome.value(measure):.3g} % ({low:.3g} to {high:.3g})"

    low, high = best.interval("variance")
    decisive = deciding_measure(outcomes)
    is_small = best is not outcomes[0] and best.value(decisive) > SMALL_GAIN * outcomes[0].value(decisive)
    small = ": a correction hardly helps this objective" if is_small else ""
    pulls = [f"{outcome.value('pull'):.3g}" for outcome in (best, outcomes[0])]
    lines = [
        f"# {best.candidate.name} ({best.candidate.source}), of {len(outcomes)} candidates, for {objective}:",
        f"# bias of the gradient {percent(best, 'bias')}; without correction {percent(outcomes[0], 'bias')}{small}",
        f"# variance {best.value('variance'):.3g} ({low:.3g} to {high:.3g}) times that without correction; "
        f"{_max_variance(outcomes):g} times is allowed",
        *([f"# pull, the bias that persists: {pulls[0]}; without correction {pulls[1]}"] if decisive == "pull" else []),
        f"# removes {percent(best, 'removed')} of the tokens; shifts the mean advantage by "
        f"{best.value('advantage'):.2g}",
    ]
    settings = {**base, **best.candidate.settings}
    if not settings:
        return "\n".join([*lines, "# so nothing is to be set:", "loss_fn: {}"])
    settings = {"name": "clipped_pg", **settings}
    try:
        build_loss(settings)
    except ConfigError:
        # audit_fraction computes π_old for some sequences only, and the candidate needs it for all of them.
        settings.pop("audit_fraction", None)
    return "\n".join([*lines, "loss_fn:", *(f"  {key}: {inline_yaml(value)}" for key, value in settings.items())])


def _outcome_json(outcome: CandidateOutcome, *, on_front: bool) -> CandidateJson:
    def measure(name: str) -> MeasureJson:
        return {"value": outcome.value(name), "interval": outcome.interval(name)}

    return {
        "name": outcome.candidate.name,
        "settings": dict(outcome.candidate.settings),
        "source": outcome.candidate.source,
        "removed": measure("removed"),
        "pull": measure("pull"),
        "bias": measure("bias"),
        "variance": measure("variance"),
        "ess": measure("ess"),
        "advantage": measure("advantage"),
        "skipped": outcome.skipped,
        "metrics": outcome.metrics,
        "on_front": on_front,
    }
