"""Detector of a mismatch that is concentrated in one prompt group of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.locate.location_detectors import EXPECTED_SUMS, MIN_DOUBTFUL_LIFT, MIN_WORSENING
from nemo_geomask.tools.diagnose.locate.run_evidence import SMALL_DIFFERENCE, Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.run_statistics import BIN_REPLICATES
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums

__all__ = ["FEW_STEPS", "FEW_STEPS_FACTOR", "MIN_GROUP_LIFT", "detect_group"]

MIN_GROUP_LIFT = 3.0
"""Lift above which one prompt group is a cause."""
FEW_STEPS, FEW_STEPS_FACTOR = 5, 2.5
"""With fewer steps, ``MIN_GROUP_LIFT`` is multiplied by the factor: the highest of many groups is high by chance."""
MAX_CHANCE = 1e-4
"""Probability with which the same group may by chance be the highest of its step in successive steps."""
MIN_GROUP_TOKENS = 20
"""Lower limit of the effective number of tokens that contribute to a prompt group's mismatch."""


class _HighestGroup(NamedTuple):
    """The prompt group of one step with the largest excess of mismatch.

    ``excess_share`` is its share of the mismatch minus its share of the expected mismatch. ``rate`` is the ratio of its
    mismatch to its expected mismatch, and ``lift`` is that rate divided by the rate of the other groups.
    """

    excess_share: float
    lift: float
    rate: float
    number: int


def _highest_groups(steps: Iterable[StepSums]) -> list[_HighestGroup]:
    """Return the group with the largest excess, for each step that has a mismatch and at least three groups."""
    highest = []
    for sums in steps:
        groups = sums.groups
        size = sum(group.capped_abs for group in groups.values())
        expected = sum(group.one_minus_p for group in groups.values())
        if len(groups) < 3 or size <= 0 or expected <= 0:
            continue
        best = _HighestGroup(0.0, 0.0, 0.0, 0)
        for number, group in groups.items():
            if group.capped_abs**2 < MIN_GROUP_TOKENS * group.capped_abs_squared:
                continue  # its mismatch comes from a few tokens
            rest_rate = (size - group.capped_abs) / max(expected - group.one_minus_p, 1e-12)
            excess_share = group.capped_abs / size - group.one_minus_p / expected
            lift = group.capped_abs / max(group.one_minus_p * rest_rate, 1e-12)
            rate = group.capped_abs / max(group.one_minus_p, 1e-12)
            best = max(best, _HighestGroup(excess_share, lift, rate, number))
        highest.append(best)
    return highest


def _group_mismatch(steps: Iterable[StepSums], highest: Iterable[_HighestGroup]) -> MismatchSums:
    """Return the excess of the highest groups over the rate of the other groups of their steps.

    Its replicates are those of a bootstrap over steps, because a group is of one step.
    """

    def excess(sums: StepSums, number: int, measure: str) -> float:
        groups, expected = sums.groups, EXPECTED_SUMS[measure]
        group = groups[number]
        rest = sum(getattr(other, measure) for other in groups.values()) - getattr(group, measure)
        rest_expected = sum(getattr(other, expected) for other in groups.values()) - getattr(group, expected)
        return float(getattr(group, measure) - getattr(group, expected) * rest / max(rest_expected, 1e-12))

    by_step = np.array(
        [
            [excess(sums, group.number, measure) for measure in ("k3", "capped_abs")]
            for sums, group in zip(steps, highest, strict=True)
        ]
    )
    draws = np.random.default_rng(len(by_step)).multinomial(
        len(by_step), np.full(len(by_step), 1 / len(by_step)), BIN_REPLICATES
    )
    k3, capped_abs = np.maximum(np.concatenate([by_step.sum(axis=0)[None], draws @ by_step]), 0.0).T
    return MismatchSums(k3, capped_abs)


def _last_steps_of_same_group(groups: Sequence[_HighestGroup], group_counts: Sequence[int]) -> int:
    """Return in how many of the last steps the same group is the highest, or 0 if that may be chance."""
    same = next((i for i, group in enumerate(reversed(groups)) if group.number != groups[-1].number), len(groups))
    chance = math.prod(1 / count for count in group_counts[len(groups) - same + 1 :])
    return same if chance < MAX_CHANCE else 0


def detect_group(evidence: Evidence, threshold: float) -> Detection:
    """Look for one prompt whose responses have far more mismatch than those of the other prompts, in most steps."""
    steps = [evidence.statistics.steps[step] for step in evidence.steps_after]
    compared = [(sums, group) for sums in steps for group in _highest_groups([sums])]
    if not compared:
        return Detection(math.nan, "nothing to compare", needs="a step with three prompts")
    highest = [group for _, group in compared]
    same_steps = _last_steps_of_same_group(highest, [len(sums.groups) for sums, _ in compared])
    # A group that stands out since some step is not averaged with the steps before.
    compared, highest = compared[-same_steps:], highest[-same_steps:]
    excess_share = float(np.median([group.excess_share for group in highest]))
    lift = float(np.median([group.lift for group in highest]))
    rate = float(np.median([group.rate for group in highest]))
    earlier_rates = [group.rate for group in _highest_groups(evidence.step_sums_before)]
    is_worse = not earlier_rates or rate > MIN_WORSENING * float(np.median(earlier_rates))
    min_lift = MIN_GROUP_LIFT * (FEW_STEPS_FACTOR if len(highest) < FEW_STEPS else 1.0)
    is_same_group = len({group.number for group in highest}) == 1
    name = f"group {highest[0].number}" if is_same_group else "one group in each step"
    is_large = excess_share > threshold and lift > min_lift
    with_excess = [pair for pair in compared if pair[1].lift > 0]
    is_shown = is_large and (is_worse or not evidence.compares_runs)
    is_open = same_steps > 0 and lift > MIN_DOUBTFUL_LIFT and not is_shown and not evidence.compares_runs
    return Detection(
        excess_share,
        f"{name}: {lift:.1f} times the mismatch of the other prompts" if lift else "no group stands out",
        is_shown,
        needs=f"another run (--against): {SMALL_DIFFERENCE}" if is_open else "",
        is_open=is_open,
        explained=_group_mismatch(*zip(*with_excess, strict=True)) if with_excess else None,
        is_standing=not is_worse,
    )
