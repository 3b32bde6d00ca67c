"""The verdict on a run: healthy, drifting or broken, since which step, and for which cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.cause_selection import select_cause
from nemo_geomask.tools.diagnose.causes import CAUSES, Cause
from nemo_geomask.tools.diagnose.change_points import MIN_RISE
from nemo_geomask.tools.diagnose.mismatch_history import RECENT_STEPS, Alarm, find_alarms, find_rise
from nemo_geomask.tools.diagnose.run_evidence import Detection, Evidence
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics, Window
from nemo_geomask.tools.diagnose.step_sums import BOOTSTRAP_SUMS, StepSums
from nemo_geomask.tools.diagnose.thresholds import HEALTH_LIMITS, HEALTH_ORDER, MIN_SEQUENCES, Health, Reading
from nemo_geomask.tools.shared.intervals import percentile_interval

__all__ = ["MismatchRatio", "RunDiagnosis", "diagnose"]

_NO_COMMON_TOKENS = "no sequence has a trained token with log-probs of both engines"


class MismatchRatio(NamedTuple):
    """Ratio of a run's mismatch, in units of 1 − p, to that of another run, with its confidence interval.

    Attributes:
        name: name of the other run.
        times: the ratio.
        low, high: ends of the interval.
    """

    name: str
    times: float
    low: float
    high: float


@dataclass(frozen=True)
class RunDiagnosis:
    """Diagnosis of a run from its records.

    Attributes:
        health: health of the run; meaningless if there is an ``unjudged_reason``.
        since: first step of the change; None if there is no change, or the first step already has it.
        cause: the likely cause; None if nothing is wrong, or no known cause is shown.
        detections: result of each cause's detector, by the id of the cause.
        readings: value of each health limit over the steps that count, by its name.
        alarms: numbers that have changed during the run.
        evidence: the data that the detectors read.
        counted_steps: number of steps that the readings are computed over.
        unjudged_reason: why no verdict is possible; empty if there is one.
        comparison: mismatch relative to the other run, if the run was compared with one.
    """

    health: Health
    since: int | None
    cause: Cause | None
    detections: dict[str, Detection]
    readings: dict[str, Reading]
    alarms: tuple[Alarm, ...]
    evidence: Evidence
    counted_steps: int
    unjudged_reason: str = ""
    comparison: MismatchRatio | None = None

    @property
    def sentence(self) -> str:
        """The verdict, followed by the causes that are ruled out."""
        return self.headline if self.unjudged_reason else f"{self.headline}; {self._ruled_out()}"

    @property
    def headline(self) -> str:
        """The verdict alone."""
        if self.unjudged_reason:
            return f"not judged: {self.unjudged_reason}"
        compared = ""
        if self.comparison is not None:
            name, times, low, high = self.comparison
            compared = f", {times:.3g} times ({low:.3g} to {high:.3g}) the mismatch of {name}"
        if self.health == "healthy":
            return f"healthy{compared}: {self._readings_text()}"
        since = f" since step {self.since}" if self.since is not None else ""
        return f"{self.health}{since}{compared}: {self._cause_text()}"

    def _readings_text(self) -> str:
        error, kl = (self.readings[name].value for name in ("token_mult_prob_error", "geomask/mismatch_k3"))
        all_steps = len(self.evidence.statistics.steps)
        steps = f"the last {self.counted_steps} of {all_steps}" if self.counted_steps < all_steps else all_steps
        return f"token_mult_prob_error {error:.4g}, KL {kl:.2g} nats a token over {steps} steps"

    def _cause_text(self) -> str:
        if self.cause is None:
            return "no known cause is shown"
        detection, steps = self.detections[self.cause.id], self.evidence.statistics.steps
        steps_since = sum(step >= (self.since or 0) for step in steps)
        in_steps = ""
        if detection.steps and len(detection.steps) < steps_since:
            in_steps = f", in {len(detection.steps)} of {len(steps)} steps"
        return f"{self.cause.name} ({detection.description}{in_steps})"

    def _ruled_out(self) -> str:
        unmeasured, ruled_out = [], []
        for id_, detection in self.detections.items():
            if math.isnan(detection.value):
                unmeasured.append(id_.replace("_", " "))
            elif not detection.is_shown:
                ruled_out.append(id_.replace("_", " "))
        text = f"ruled out: {', '.join(ruled_out)}" if ruled_out else "nothing is ruled out"
        return text + (f"; not in these records: {', '.join(unmeasured)}" if unmeasured else "")


def diagnose(
    statistics: RunStatistics, against: RunStatistics | None = None, name: str = "the other run"
) -> RunDiagnosis:
    """Diagnose a run from its statistics.

    Args:
        statistics: statistics of the run.
        against: statistics of another run that is assumed to be healthy. Causes are then sought in the difference
            between the two runs, and not in a change within the run.
        name: name of the other run.

    Raises: DataError: there is no step, or the other run has no trained token with log-probs of both engines.
    """
    steps = sorted(statistics.steps)
    if not steps:
        raise DataError("the records hold no sequence")
    judged_steps = [step for step in steps if statistics.steps[step]["tokens"] > 0]
    reference = None if against is None else against.total()
    if reference is not None and not reference["one_minus_p"]:
        raise DataError(f"{name}: {_NO_COMMON_TOKENS}")
    onset, first_step = find_rise(statistics, judged_steps) if reference is None else (None, None)
    first_step = steps[0] if first_step is None else first_step
    steps_after = tuple(step for step in judged_steps if step >= first_step)
    # The verdict is about the present: if the mismatch has not risen, the last third of the steps counts.
    is_split = onset is not None or reference is not None
    recent = steps_after if is_split else steps_after[-max(RECENT_STEPS, len(judged_steps) // 3) :]
    total = statistics.total(recent)
    readings = {limit.name: limit.read(total) for limit in HEALTH_LIMITS}
    health: Health = max((reading.health for reading in readings.values()), key=HEALTH_ORDER.index)
    comparison = None if reference is None or not judged_steps else _compare(total, reference, name)
    sequences = total["sequences"] if reference is None else min(total["sequences"], reference["sequences"])
    is_above_reference = comparison is not None and comparison.low > math.exp(MIN_RISE)
    has_risen = onset is not None or (is_above_reference and sequences >= MIN_SEQUENCES)
    evidence = _gather_evidence(
        statistics,
        against,
        name,
        onset=onset,
        first_step=first_step,
        steps_after=steps_after,
        is_worse=has_risen or health != "healthy",
    )
    detections = {cause.id: cause.detect(evidence, cause.threshold) for cause in CAUSES}
    # Bugs are reported however few sequences there are.
    has_enough = (evidence.sums_after["sequences"] if reference is None else sequences) >= MIN_SEQUENCES
    cause = select_cause({cause.id: detections[cause.id] for cause in CAUSES if has_enough or cause.is_bug}, evidence)
    unjudged_reason = "" if judged_steps else _explain_missing_tokens(statistics.total())
    if has_risen and health == "healthy":
        health = "drifting"
    since = onset
    if cause is not None:
        health = "broken" if cause.is_bug or health == "broken" else "drifting"
        if detections[cause.id].steps:
            first_shown = detections[cause.id].steps[0]
            since = first_shown if first_shown > (first_step if onset is None else steps[0]) else None
            unjudged_reason = ""
    if judged_steps and health == "healthy":
        unjudged_reason = _explain_few_sequences(sequences, readings, detections, comparison)
    return RunDiagnosis(
        health=health,
        since=since,
        cause=cause,
        detections=detections,
        readings=readings,
        alarms=find_alarms(statistics, judged_steps),
        evidence=evidence,
        counted_steps=len(recent),
        unjudged_reason=unjudged_reason,
        comparison=comparison,
    )


def _gather_evidence(
    statistics: RunStatistics,
    against: RunStatistics | None,
    name: str,
    *,
    onset: int | None,
    first_step: int,
    steps_after: tuple[int, ...],
    is_worse: bool,
) -> Evidence:
    """Divide the statistics into *before* and *after*; see :class:`Evidence`."""
    start = statistics.window_start(first_step)
    before = Window()
    sums_before: StepSums | None = None
    step_sums_before: tuple[StepSums, ...] = ()
    side_names = "", "all steps" if first_step == min(statistics.steps) else f"from {first_step}"
    if against is not None:
        before, sums_before = against.merge_windows(), against.total()
        step_sums_before = tuple(against.steps.values())
        side_names = name, "this run"
    elif onset is not None:
        steps_before = [step for step in sorted(statistics.steps) if step < onset]
        before, sums_before = statistics.merge_windows(end=start), statistics.total(steps_before)
        step_sums_before = tuple(statistics.steps[step] for step in steps_before)
        side_names = f"before {onset}", f"from {onset}"
    return Evidence(
        statistics=statistics,
        onset=onset,
        first_step=first_step,
        is_worse=is_worse,
        before=None if before.is_empty else before,  # empty if the change is within the first window
        after=statistics.merge_windows(start),
        sums_before=sums_before,
        steps_after=steps_after,
        side_names=side_names,
        step_sums_before=step_sums_before,
    )


def _compare(sums: StepSums, reference: StepSums, name: str) -> MismatchRatio:
    def bootstrap_rates(sums: StepSums) -> Any:
        columns = (sums.bootstrap[:, BOOTSTRAP_SUMS.index(column)] for column in ("capped_abs", "one_minus_p"))
        size, expected = columns
        return size / np.maximum(expected, 1e-12)

    ratios = bootstrap_rates(sums) / np.maximum(bootstrap_rates(reference), 1e-12)
    rate, reference_rate = (side.mean("capped_abs", "one_minus_p") for side in (sums, reference))
    return MismatchRatio(name, rate / max(reference_rate, 1e-12), *percentile_interval(ratios))


def _explain_missing_tokens(total: StepSums) -> str:
    if total["sequences_without_prev"]:
        return (
            "prev_logprobs are 0 throughout, as NeMo-RL leaves them where it skips π_old (force_on_policy_ratio, "
            "ratio_anchor: gen); set loss_fn.audit_fraction, or seq_logprob_error_threshold, to have them computed"
        )
    return _NO_COMMON_TOKENS


def _explain_few_sequences(
    sequences: float,
    readings: Mapping[str, Reading],
    detections: Mapping[str, Detection],
    comparison: MismatchRatio | None,
) -> str:
    """Return why the run can't be called healthy; empty if it can.

    It can't if a number is beyond its limit and there are too few sequences to be sure.
    """
    beyond = [
        f"{limit.name} {readings[limit.name].value:.4g}"
        for limit in HEALTH_LIMITS
        if limit.is_beyond(readings[limit.name].value)
    ]
    beyond += [f"{id_} {detection.value:.3g}" for id_, detection in detections.items() if detection.is_shown]
    if comparison is not None and comparison.low > math.exp(MIN_RISE):
        beyond.append(f"{comparison.times:.3g} times the mismatch of {comparison.name}")
    if not beyond or sequences >= MIN_SEQUENCES:
        return ""
    return (
        f"only {sequences:.0f} sequences in the steps that count, at least {MIN_SEQUENCES} are needed; "
        f"beyond the limits: {', '.join(beyond)}"
    )
