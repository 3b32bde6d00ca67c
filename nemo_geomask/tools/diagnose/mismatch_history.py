"""History of a run's mismatch: when it rose, whether the rise has ended, and changes of other numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, ChangePoint, find_change
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics

__all__ = ["RECENT_STEPS", "Alarm", "Rise", "find_alarms", "find_rise"]

RECENT_STEPS = 3
"""Minimum number of steps from which the present state of a run is judged."""
MASKED_OUT = "share of sequences masked out"
MIN_MASKED_OUT = 1e-3
"""The share of sequences masked out raises no alarm unless it reaches this value."""


class Rise(NamedTuple):
    """The rise of the mismatch that the run has not recovered from.

    Attributes:
        onset: first step of the rise; None if there was none, or it has ended.
        first_step: first step that counts for the verdict: the onset, or the first step after an earlier rise ended;
            None if all steps count.
    """

    onset: int | None
    first_step: int | None


def find_rise(statistics: RunStatistics, steps: list[int]) -> Rise:
    """Return the rise of the mismatch that has lasted to the end of the run.

    Args:
        statistics: the run's statistics.
        steps: the steps that hold tokens with log-probs of both engines, in order.
    """
    rise = _find_mismatch_change(statistics, steps)
    before, after = ([], steps) if rise is None else (steps[: rise.first], steps[rise.first :])
    fall = _find_mismatch_change(statistics, after, falling=True)
    if fall is not None:
        # The rise has ended if the mismatch since the fall is no larger than before the rise.
        is_back = rise is None or _find_mismatch_change(statistics, before + after[fall.first :]) is None
        # Leave out the window in which the rise ends.
        first_clean = math.ceil(after[fall.first] / statistics.width) * statistics.width
        remaining = [step for step in after if step >= first_clean]
        if is_back and len(remaining) >= RECENT_STEPS:
            return Rise(None, remaining[0])
    return Rise(None, None) if rise is None else Rise(after[0], after[0])


def _find_mismatch_change(statistics: RunStatistics, steps: list[int], *, falling: bool = False) -> ChangePoint | None:
    """Return the significant rise of the mismatch, or its fall.

    The change must show both in the mismatch per token and in the mismatch relative to the expected mismatch. A policy
    that becomes less sure raises only the former, a policy that becomes surer only the latter.
    """
    sums = [statistics.steps[step] for step in steps]
    sign = -1 if falling else 1
    change = find_change(_logarithms([step.mean("capped_abs", "one_minus_p") for step in sums]), MIN_NOISE)
    if change is None or sign * change.rise < MIN_RISE or sign * change.score < MIN_SCORE:
        return None
    per_token = _logarithms([step.mean("capped_abs") for step in sums])
    # The end of a single bad step is not a fall: by the median, most of the steps before must have been worse.
    average = np.median if falling else np.mean
    rise_per_token = float(average(per_token[change.first :]) - average(per_token[: change.first]))
    return change if sign * rise_per_token > MIN_RISE else None


def _logarithms(values: list[float]) -> list[float]:
    """Return the logarithm of each step's mismatch.

    A step without mismatch gets a value near the smallest of the other steps, so that it does not look like a change.
    """
    positive = [value for value in values if value > 0]
    floor = min(*positive, float(np.median(positive)) / 2) if positive else 1.0
    return [math.log(max(value, floor)) for value in values]


@dataclass(frozen=True)
class Alarm:
    """A number that has changed during the run.

    Attributes:
        metric: name of the number.
        since: first step of the change.
        before, after: means of the number over the steps before the change, and from the change on.
        score: the change in standard errors.
        is_gradual: True if a slope begins at that step, False if the number jumps.
    """

    metric: str
    since: int
    before: float
    after: float
    score: float
    is_gradual: bool


def find_alarms(statistics: RunStatistics, steps: list[int]) -> tuple[Alarm, ...]:
    """Return the changes of the mismatch KL, the response length, and the shares that are masked out or removed."""
    sums = [statistics.steps[step] for step in steps]
    series = {
        "geomask/mismatch_k3": [step.mean("k3") for step in sums],
        "mean response length": [step.mean("response_tokens", "sequences") for step in sums],
        MASKED_OUT: [step["masked_out_sequences"] / max(step["all_sequences"], 1.0) for step in sums],
    }
    for label in sorted({label for step in sums for label in step.removed}):
        shares = [step.removed_share(label) for step in sums]
        series[f"geomask/mask/{label}/removed"] = [0.0 if math.isnan(share) else share for share in shares]
    alarms = []
    for metric, values in series.items():
        # The offset allows for shares of 0, and hides changes that are far below a thousandth.
        change = find_change([math.log(max(value, 0.0) + 1e-6) for value in values], MIN_NOISE)
        if change is None or abs(change.rise) < MIN_RISE or abs(change.score) < MIN_SCORE:
            continue
        if metric == MASKED_OUT and max(values) < MIN_MASKED_OUT:
            continue
        before, after = float(np.mean(values[: change.first])), float(np.mean(values[change.first :]))
        alarms.append(
            Alarm(
                metric=metric,
                since=steps[change.first],
                before=before,
                after=after,
                score=change.score,
                is_gradual=change.is_gradual,
            )
        )
    return tuple(alarms)
