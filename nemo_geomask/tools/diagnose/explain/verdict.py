"""The verdict on a run: healthy, drifting or broken, since which step, and for which causes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.explain.cause_selection import ShownCause, rank_causes
from nemo_geomask.tools.diagnose.explain.causes import CAUSES, NOISE_CAUSES, PLACES
from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence
from nemo_geomask.tools.diagnose.explain.run_diagnosis import MismatchRatio, RunDiagnosis
from nemo_geomask.tools.diagnose.locate.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, find_change
from nemo_geomask.tools.diagnose.locate.mismatch_history import (
    MAX_ONSET_DISTANCE,
    RECENT_STEPS,
    find_cycle,
    find_rise,
    find_short_rise,
    floored_logarithms,
)
from nemo_geomask.tools.diagnose.locate.region import MIN_LIFT
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import BOOTSTRAP_SUMS, StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import (
    HEALTH_LIMITS,
    HEALTH_ORDER,
    IMMATERIAL_K3,
    MIN_SEQUENCES,
    Health,
    Reading,
)
from nemo_geomask.tools.shared.intervals import percentile_interval

MIN_K3_RATIO = 2.0
"""Factor by which the interval of a run's k3 must exceed the other run's for it to be worse."""
_RELATIVE_CAUSES = (*PLACES, *NOISE_CAUSES, "temperature", "penalty", "smoothed")
"""Causes that are measured in proportion to the whole mismatch, and thus show however small it is."""
_NO_COMMON_TOKENS = "no sequence has a trained token with log-probs of both engines"


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
    rise, first_step = find_rise(statistics, judged_steps) if reference is None else (None, None)
    first_step = steps[0] if first_step is None else first_step
    steps_after = [step for step in judged_steps if step >= first_step]
    # The verdict is about the present: if the mismatch has not risen, the last third of the steps counts.
    is_split = rise is not None or reference is not None
    recent = steps_after if is_split else steps_after[-max(RECENT_STEPS, len(judged_steps) // 3) :]
    total = statistics.total(recent)
    readings = {limit.name: limit.read(total) for limit in HEALTH_LIMITS}
    health: Health = max((reading.health for reading in readings.values()), key=HEALTH_ORDER.index)
    comparison = None if reference is None or not judged_steps else _compare(statistics.total(recent), reference, name)
    sequences = total["sequences"] if reference is None else min(total["sequences"], reference["sequences"])
    is_immaterial = readings["geomask/mismatch_k3"].high < IMMATERIAL_K3
    has_risen = rise is not None or (
        comparison is not None and _is_above(comparison) and sequences >= MIN_SEQUENCES and not is_immaterial
    )
    period = find_cycle(statistics, steps_after) if reference is None and not is_immaterial else None
    undivided = Evidence(
        statistics=statistics,
        onset=rise,
        first_step=first_step,
        is_worse=has_risen or health != "healthy",
        is_immaterial=is_immaterial,
        against=against,
        against_name=name,
        period=period,
    )
    evidence, detections, shown = _find_causes(undivided, sequences)
    unjudged_reason = "" if judged_steps else _explain_missing_tokens(statistics.total())
    if health == "healthy" and (has_risen or period is not None):
        health = "drifting"
    if shown:
        health = "broken" if health == "broken" or any(cause.cause.is_bug for cause in shown) else "drifting"
        if shown[0].detection.steps:
            unjudged_reason = ""
    since = shown[0].since if shown else rise
    if judged_steps and health == "healthy":
        unjudged_reason = _explain_few_sequences(sequences, readings, detections, comparison)
        if not unjudged_reason and reference is None and not is_immaterial:
            unjudged_reason = _explain_short_rise(statistics, steps_after)
        unjudged_reason = unjudged_reason or _explain_open_causes(detections)
    return RunDiagnosis(
        health=health,
        since=since,
        shown=tuple(shown),
        detections=detections,
        readings=readings,
        evidence=evidence,
        counted_steps=len(recent),
        surprise=total.mean("surprise"),
        unjudged_reason=unjudged_reason,
        comparison=comparison,
    )


def _find_causes(evidence: Evidence, sequences: float) -> tuple[Evidence, dict[str, Detection], list[ShownCause]]:
    """Look for all causes; return the evidence, what the detectors found, and the causes that are shown.

    The run is divided into *before* and *after* at the rise of the mismatch. If the named cause began at another step,
    the run is divided at that step instead, so that the report's tables and the verdict compare the same steps.

    ``sequences`` is the number that the verdict on two compared runs rests on.
    """
    rise = evidence.onset
    detections, shown = _detect(evidence, sequences)
    if evidence.against is not None or (shown and shown[0].since == rise):
        return evidence, detections, shown
    if not shown:
        part = None if rise is not None else _find_part_that_rose(evidence, detections, sequences)
        return part or (evidence, detections, shown)
    since = shown[0].since
    begin = min(evidence.statistics.steps) if since is None else since
    divided = replace(evidence, onset=since, first_step=begin)
    divided_detections, divided_shown = _detect(divided, sequences)
    # Divided there, the run may show another cause most, which explains only its last steps; then the first holds.
    if [cause.cause.id for cause in divided_shown][:1] == [shown[0].cause.id]:
        return divided, divided_detections, [divided_shown[0]._replace(since=since), *divided_shown[1:]]
    return evidence, detections, [shown[0]._replace(since=rise), *shown[1:]] if rise is not None else shown


def _find_part_that_rose(
    evidence: Evidence, detections: Mapping[str, Detection], sequences: float
) -> tuple[Evidence, dict[str, Detection], list[ShownCause]] | None:
    """Judge a run from the step on at which a part of the data has become worse; None if that shows no cause.

    Such a part may be too small for the whole mismatch to rise. Over the whole run, the steps before hide it.
    """
    for detection in detections.values():
        if detection.is_shown or detection.part_value is None:
            continue
        onset = _rise_of_part(detection, evidence.statistics)
        if onset is not None:
            divided = replace(evidence, onset=onset, first_step=onset)
            divided_detections, shown = _detect(divided, sequences)
            if shown:
                return divided, divided_detections, shown
    return None


def _detect(evidence: Evidence, sequences: float) -> tuple[dict[str, Detection], list[ShownCause]]:
    detections = {cause.id: cause.detect(evidence, cause.threshold) for cause in CAUSES}
    for cause in CAUSES:
        is_possible = not detections[cause.id].is_shown and detections[cause.id].value > cause.threshold
        detections[cause.id] = replace(detections[cause.id], is_possible=is_possible)
    if evidence.is_immaterial:
        detections |= {id_: _rule_out_if_shown(detections[id_]) for id_ in _RELATIVE_CAUSES}
    # Bugs are reported however few sequences there are; other causes need MIN_SEQUENCES.
    sequences = sequences if evidence.against is not None else evidence.sums_after["sequences"]
    judged = {cause.id: detections[cause.id] for cause in CAUSES if sequences >= MIN_SEQUENCES or cause.is_bug}
    ranked = rank_causes(judged, evidence)
    return detections, [shown._replace(since=_onset(shown.detection, evidence)) for shown in ranked]


def _rule_out_if_shown(detection: Detection) -> Detection:
    """Return the detection of a cause in a mismatch that is too small to matter: neither shown nor left open."""
    if not (detection.is_shown or detection.is_open):
        return detection
    description = f"{detection.description}; the mismatch is too small to matter: k3 is below {IMMATERIAL_K3:g}"
    return replace(detection, description=description, is_shown=False, is_open=False, needs="", steps=())


def _onset(detection: Detection, evidence: Evidence) -> int | None:
    """Return the first step that shows a cause; None if the first step that counts does, or two runs are compared."""
    if evidence.against is not None:
        return None
    if detection.steps:
        first = next(step for step in detection.steps if step >= evidence.first_step)
        begin = evidence.first_step if evidence.onset is None else min(evidence.statistics.steps)
        return first if first > begin else None
    onset = None if detection.part_value is None else _rise_of_part(detection, evidence.statistics)
    if onset is None:
        return None if detection.is_standing else evidence.onset
    is_same = evidence.onset is not None and abs(onset - evidence.onset) <= MAX_ONSET_DISTANCE
    return evidence.onset if is_same else onset


def _rise_of_part(detection: Detection, statistics: RunStatistics) -> int | None:
    """Return the first step since which the values of ``part_value`` are higher; None if they have not risen."""
    assert detection.part_value is not None
    table, values = statistics.tokens, {}
    width = math.ceil(len(statistics.steps) / 128)  # groups of steps are enough of a long run
    starts = table.step // width * width
    for start in np.unique(starts[table.sequence]).tolist():
        value = detection.part_value(table.select_sequences(starts == start))
        if math.isfinite(value):
            values[start] = value
    change = find_change(floored_logarithms(list(values.values())), MIN_NOISE)
    if change is None or change.rise < MIN_RISE or change.score < MIN_SCORE:
        return None
    if detection.place and float(np.median(list(values.values())[: change.first])) > MIN_LIFT:
        return None  # it stood out before, and only more since
    return max(int(list(values)[change.first]), min(statistics.steps))


def _compare(sums: StepSums, reference: StepSums, name: str) -> MismatchRatio:
    def interval(measure: str, expectation: str) -> tuple[float, float, float]:
        # The expected mismatch of a replicate varies with its number of tokens, as its mismatch does.
        def replicates(side: StepSums) -> Any:
            columns = [side.bootstrap[:, BOOTSTRAP_SUMS.index(column)] for column in (measure, "one_minus_p")]
            return columns[0] / np.maximum(columns[1], 1e-12) * side["one_minus_p"] / max(side[expectation], 1e-12)

        ratio = sums.mean(measure, expectation) / max(reference.mean(measure, expectation), 1e-12)
        return ratio, *percentile_interval(replicates(sums) / np.maximum(replicates(reference), 1e-12))

    return MismatchRatio(name, *interval("capped_abs", "one_minus_p"), *interval("k3", "one_minus_p_squared"))


def _is_above(comparison: MismatchRatio) -> bool:
    """Return True if a run is worse than the other: most tokens are, or a few are so much that k3 has doubled."""
    return comparison.low > math.exp(MIN_RISE) or comparison.k3_low > MIN_K3_RATIO


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
    if comparison is not None and _is_above(comparison):
        beyond.append(f"{comparison.times:.3g} times the mismatch of {comparison.name}")
    if not beyond or sequences >= MIN_SEQUENCES:
        return ""
    return (
        f"only {sequences:.0f} sequences in the steps that count, at least {MIN_SEQUENCES} are needed; "
        f"beyond the limits: {', '.join(beyond)}"
    )


def _explain_open_causes(detections: Mapping[str, Detection]) -> str:
    """Return the causes that keep a run from being called healthy, and why; empty if there is none."""
    reasons = [
        f"{cause.id.replace('_', ' ')} ({detection.description}; needs {detection.needs})"
        for cause in CAUSES
        if (detection := detections[cause.id]).is_open
    ]
    return f"within the limits, but not testable for {'; '.join(reasons)}" if reasons else ""


def _explain_short_rise(statistics: RunStatistics, steps: list[int]) -> str:
    """Return why a run is too short to be called healthy; empty if it is not."""
    rise = find_short_rise(statistics, steps)
    if rise is None:
        return ""
    step, times = rise
    return (
        f"too short to judge: the mismatch from step {step} on is {times:.2g} times that before, and {len(steps)} "
        f"steps, {sum(other >= step for other in steps)} of them since, do not tell whether it lasts; record more steps"
    )
