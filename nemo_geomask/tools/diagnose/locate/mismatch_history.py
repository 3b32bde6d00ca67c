"""History of a run's mismatch: when it rose, and whether the rise has ended."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.locate.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, ChangePoint, find_change
from nemo_geomask.tools.diagnose.locate.step_patterns import Period, find_edge_rise, find_period
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import IMMATERIAL_K3

RECENT_STEPS = 3
"""Minimum number of steps from which the present state of a run is judged."""
MIN_LIKELY_SCORE = 4.0
"""Number of standard errors beyond which a rise is likely, so that the run can't be called healthy."""


class _Measure(NamedTuple):
    """A mismatch whose changes are sought."""

    name: str  # the sum of the mismatch
    expected: str  # the sum that it is proportional to if it is noise on the logits
    min_rise: float  # smallest change of its logarithm that counts


_TYPICAL, _TAIL = _Measure("capped_abs", "one_minus_p", MIN_RISE), _Measure("k3", "one_minus_p_squared", math.log(1.8))
MAX_ONSET_DISTANCE = 2
"""Number of steps within which two changes are taken for the same."""


def find_rise(statistics: RunStatistics, steps: list[int]) -> tuple[int | None, int | None]:
    """Return the first step of the rise of the mismatch that the run has not recovered from, and that which counts.

    Args:
        statistics: the run's statistics.
        steps: the steps that hold tokens with log-probs of both engines, in order.

    Returns:
        The onset; None if there was no rise, or it has ended. Then the first step that counts for the verdict: the
        onset, or the first step after an earlier rise ended; None if all steps count.
    """
    steps = _without_agreeing_first_step(statistics, steps)
    immaterial = _last_immaterial_steps(statistics, steps)
    if len(immaterial) >= RECENT_STEPS:
        return None, (immaterial[0] if len(immaterial) < len(steps) else None)
    measure = _TYPICAL
    rise = _find_mismatch_change(statistics, steps, _TYPICAL)
    if rise is None and (rise := _find_mismatch_change(statistics, steps, _TAIL)) is not None:
        measure = _TAIL  # the typical token is as before, and a few tokens have become worse
    before, after = ([], steps) if rise is None else (steps[: rise.first], steps[rise.first :])
    fall = _find_mismatch_change(statistics, after, measure, falling=True)
    if fall is not None:
        # The rise has ended if the mismatch since the fall is no larger than before the rise.
        is_back = rise is None or _find_mismatch_change(statistics, before + after[fall.first :], measure) is None
        remaining = after[fall.first :]
        if is_back and len(remaining) >= RECENT_STEPS:
            return None, remaining[0]
    return (None, None) if rise is None else (after[0], after[0])


def _last_immaterial_steps(statistics: RunStatistics, steps: list[int]) -> list[int]:
    """Return the last steps in all of which the mismatch is too small to matter."""
    material = [index for index, step in enumerate(steps) if not statistics.steps[step].mean("k3") < IMMATERIAL_K3]
    return steps[material[-1] + 1 :] if material else steps


def _find_mismatch_change(
    statistics: RunStatistics, steps: list[int], measure: _Measure, *, falling: bool = False
) -> ChangePoint | None:
    """Return the significant rise of the mismatch, or its fall.

    The change must show both in the mismatch per token and in the mismatch relative to the expected mismatch. A policy
    that becomes less sure raises only the former, a policy that becomes surer only the latter.
    """
    sums = [statistics.steps[step] for step in steps]
    sign = -1 if falling else 1
    relative = floored_logarithms([step.mean(measure.name, measure.expected) for step in sums])
    noise = _sampling_noise(sums, measure)
    change = find_change(relative, noise) if falling else _find_rise_in(relative, noise)
    if change is None or sign * change.rise < measure.min_rise or sign * change.score < MIN_SCORE:
        return None
    per_token = floored_logarithms([step.mean(measure.name) for step in sums])
    # The end of a single bad step is not a fall: by the median, most of the steps before must have been worse.
    average = np.median if falling else np.mean
    rise_per_token = float(average(per_token[change.first :]) - average(per_token[: change.first]))
    return change if sign * rise_per_token > measure.min_rise else None


def _without_agreeing_first_step(statistics: RunStatistics, steps: list[int]) -> list[int]:
    """Return the steps without the first if the engines agree on every token of the first, but not of the second."""
    agrees = [statistics.steps[step]["abs_delta"] == 0 for step in steps[:2]]
    return steps[1:] if agrees == [True, False] else steps


def _find_rise_in(logarithms: list[float], noise: float) -> ChangePoint | None:
    """Return the best change of a series; it may begin with the second value, but not with the last."""
    change = find_change(logarithms, noise, min_before=1, min_after=1)
    if change is None or change.first < len(logarithms) - 1:
        return change
    return find_change(logarithms[:-1], noise, min_before=1)


def _sampling_noise(sums: list[StepSums], measure: _Measure) -> float:
    """Return the standard error, over sequences, of the logarithm of a typical step's mismatch; at least MIN_NOISE."""
    errors = []
    for step in sums:
        replicates = step.replicates()
        size, expected = replicates[measure.name], replicates["one_minus_p"]
        drawn = size[(expected > 0) & (size > 0)] / expected[(expected > 0) & (size > 0)]
        if len(drawn):
            errors.append(float(np.log(drawn).std()))
    return max(MIN_NOISE, float(np.median(errors)) if errors else 0.0)


def find_short_rise(statistics: RunStatistics, steps: list[int]) -> tuple[int, float] | None:
    """Return the step and the factor of a rise that is likely, but not sure; None if there is none.

    Either too few steps precede or follow it, or its size is only a few standard errors.
    """
    steps = _without_agreeing_first_step(statistics, steps)
    sums = [statistics.steps[step] for step in steps]
    best: tuple[int, float] | None = None
    for measure in (_TYPICAL, _TAIL):
        noise = _sampling_noise(sums, measure)
        relative, per_token = (
            floored_logarithms([step.mean(measure.name, expected) for step in sums])
            for expected in (measure.expected, "tokens")
        )
        edge, edge_per_token = find_edge_rise(relative, noise), find_edge_rise(per_token, noise)
        if edge is not None and edge_per_token is not None and edge.rise > measure.min_rise:
            best = best or (steps[edge.first], math.exp(edge.rise))
        change = _find_rise_in(relative, noise)
        # The first step's k3 may be low by chance: it has a long tail, and a step's own error can't tell what it lacks.
        is_first = change is not None and change.first <= 1
        min_score = MIN_SCORE if measure is _TAIL and is_first else MIN_LIKELY_SCORE
        if change is not None and change.rise > measure.min_rise and change.score > min_score:
            rise_per_token = float(np.mean(per_token[change.first :]) - np.mean(per_token[: change.first]))
            if rise_per_token > measure.min_rise:
                best = best or (steps[change.first], math.exp(change.rise))
    return best


def find_cycle(statistics: RunStatistics, steps: list[int]) -> Period | None:
    """Return the cycle in which the mismatch repeats from step to step; None if it does not."""
    if not steps:
        return None
    sums = [statistics.steps[step] for step in steps]
    logarithms = floored_logarithms([step.mean(_TYPICAL.name, _TYPICAL.expected) for step in sums])
    return find_period(logarithms, steps, _sampling_noise(sums, _TYPICAL))


def floored_logarithms(values: list[float]) -> list[float]:
    """Return the logarithm of each step's mismatch, or of another value that is 0 without a mismatch.

    A step without mismatch gets a value near the smallest of the other steps, so that it does not look like a change.
    """
    positive = [value for value in values if value > 0]
    floor = min(*positive, float(np.median(positive)) / 2) if positive else 1.0
    return [math.log(max(value, floor)) for value in values]
