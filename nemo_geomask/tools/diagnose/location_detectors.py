"""Detectors of a mismatch that is concentrated in one part of the data: a range of a dimension, or a prompt group.

The mismatch of a part is the sum of min(|Δ|, 1) over its tokens. It is compared with the expected mismatch: the sum of
1 − p, since noise on the logits moves a token's log-prob in proportion to 1 − p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.dimensions import DIMENSIONS_BY_NAME, Dimension
from nemo_geomask.tools.diagnose.record_reader import Array
from nemo_geomask.tools.diagnose.run_evidence import BIN_SUM_COLUMN, Detection, Detector, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.run_statistics import BIN_REPLICATES, Window
from nemo_geomask.tools.diagnose.step_sums import StepSums

__all__ = [
    "FEW_STEPS",
    "FEW_STEPS_FACTOR",
    "MIN_GROUP_LIFT",
    "MIN_LIFT",
    "MIN_SCORE",
    "Concentration",
    "detect_group",
    "detect_range",
    "find_concentration",
    "squared_relative_error",
]

MIN_LIFT = 1.8
"""Lower limit of the ratio of a part's mismatch to the mismatch of the rest (its lift), for the part to be a cause."""
MIN_SCORE = 6.0
"""Number of standard errors that the logarithm of the lift must exceed."""
MIN_WORSENING = 1.5
"""Factor by which a part's mismatch must exceed its earlier mismatch, or that of the other run, to be a cause."""
MIN_EXPECTED_SHARE, MAX_EXPECTED_SHARE = 0.002, 0.9
"""Limits of a part's share of the expected mismatch; other parts are not judged."""
SHRINKAGE = 0.02
"""Weight of the overall mean, as a share of all earlier data, when a part's earlier mismatch is estimated."""
MIN_GROUP_LIFT = 3.0
"""Lift above which one prompt group is a cause."""
FEW_STEPS, FEW_STEPS_FACTOR = 5, 2.5
"""With fewer steps, ``MIN_GROUP_LIFT`` is multiplied by the factor: the highest of many groups is high by chance."""
MIN_GROUP_TOKENS = 20
"""Lower limit of the effective number of tokens that contribute to a prompt group's mismatch."""
_EXPECTED = {"capped_abs": "one_minus_p", "k3": "one_minus_p_squared"}
"""For each measure of the mismatch, the sum that it is proportional to if it is noise on the logits."""


@dataclass(frozen=True)
class Concentration:
    """The range of a dimension where the mismatch is highest, compared with the other tokens.

    Attributes:
        first, last: the bins of the range.
        lift: mismatch of the range relative to the expected one, divided by the same of the other tokens.
        excess: share of the total mismatch that the range has beyond the rate of the other tokens.
        excess_share: share of the total mismatch minus share of the expected mismatch; 0 if no range stands out.
        score: standard errors by which log(lift) exceeds 0.
    """

    first: int
    last: int
    lift: float
    excess: float
    excess_share: float
    score: float


_NO_CONCENTRATION = Concentration(0, 0, 0.0, 0.0, 0.0, 0.0)


def find_concentration(
    dimension: Dimension, after: Window, before: Window | None, *, upper_only: bool
) -> Concentration | None:
    """Return the range of bins with the largest excess share of the mismatch.

    With a *before* to compare with, the expected mismatch of a bin is proportional to its earlier mismatch. Otherwise
    it is proportional to the sum of 1 − p.

    Args:
        dimension: the dimension to search.
        after: the tokens to judge.
        before: the tokens to compare with.
        upper_only: consider only ranges that extend to the last bin.

    Returns:
        None if all tokens are in one bin.
    """
    sums = after.bin_sums[dimension.name]
    size, products = sums[:, BIN_SUM_COLUMN["capped_abs"]], after.bin_products[dimension.name]
    expected = sums[:, BIN_SUM_COLUMN["one_minus_p"]]
    if np.count_nonzero(expected) < 2:
        return None
    # The comparison needs an earlier mismatch.
    is_compared = before is not None and before.bin_sums[dimension.name][:, BIN_SUM_COLUMN["capped_abs"]].sum() > 0
    if before is not None and is_compared:
        rates = _earlier_rates(before, dimension, "capped_abs")[0]
        expected = expected * rates
        products = products * np.stack([np.ones_like(rates), rates, np.square(rates)], axis=1)
    total, total_expected, total_products = float(size.sum()), float(expected.sum()), products.sum(axis=0)
    best = _NO_CONCENTRATION
    if not total:
        return best
    for first, last in _ranges(dimension.bin_count, upper_only=upper_only):
        part = slice(first, last + 1)
        inside, inside_expected = float(size[part].sum()), float(expected[part].sum())
        if not MIN_EXPECTED_SHARE * total_expected < inside_expected < MAX_EXPECTED_SHARE * total_expected:
            continue
        rate, rest_rate = inside / inside_expected, (total - inside) / (total_expected - inside_expected)
        if is_compared and rate < MIN_WORSENING:
            continue  # the range may stand out, but no more than it did before
        # This difference of shares is largest for the range that holds all of the excess mismatch and nothing else.
        excess_share = inside / total - inside_expected / total_expected
        if rate <= rest_rate or excess_share <= best.excess_share:
            continue
        inside_products = products[part].sum(axis=0)
        error = squared_relative_error(inside_products, rate, inside)
        error += squared_relative_error(total_products - inside_products, rest_rate, total - inside)
        lift = rate / max(rest_rate, 1e-12)
        score = math.log(lift) / math.sqrt(error + 1e-12)
        excess = (inside - inside_expected * rest_rate) / total
        best = Concentration(first, last, lift, excess, excess_share, score)
    return best


def _earlier_rates(before: Window, dimension: Dimension, measure: str) -> Array:
    """Return [1 + BIN_REPLICATES, bins], the ratio of earlier to expected mismatch in each bin.

    The ratios are shrunk to their mean over all bins, the more so the less data a bin has.
    """
    size = before.estimates(dimension.name, measure)
    expected = before.estimates(dimension.name, _EXPECTED[measure])
    total = expected.sum(axis=1, keepdims=True)
    mean_rate = size.sum(axis=1, keepdims=True) / np.maximum(total, 1e-12)
    prior = SHRINKAGE * total
    rates: Array = (size + prior * mean_rate) / (expected + prior + 1e-12)
    return rates


def _explained_mismatch(dimension: Dimension, part: slice, after: Window, before: Window | None) -> MismatchSums:
    """Return the mismatch of a range of bins in excess of what it would be at the rate of the other tokens."""

    def excess(measure: str) -> Array:
        size, expected = (after.estimates(dimension.name, name) for name in (measure, _EXPECTED[measure]))
        if before is not None and before.bin_sums[dimension.name][:, BIN_SUM_COLUMN["capped_abs"]].sum() > 0:
            expected = expected * _earlier_rates(before, dimension, measure)
        inside, inside_expected = size[:, part].sum(axis=1), expected[:, part].sum(axis=1)
        rest, rest_expected = size.sum(axis=1) - inside, expected.sum(axis=1) - inside_expected
        result: Array = np.maximum(inside - inside_expected * rest / np.maximum(rest_expected, 1e-12), 0.0)
        return result

    return MismatchSums(excess("k3"), excess("capped_abs"))


def _lift(window: Window, name: str, part: slice) -> float:
    """Return the ratio of a range's rate of mismatch to that of the other tokens.

    A rate is the mismatch over the expected mismatch. The ratio is NaN if one of these four sums is 0.
    """
    size, expected = (window.bin_sums[name][:, BIN_SUM_COLUMN[column]] for column in ("capped_abs", "one_minus_p"))
    inside, inside_expected = float(size[part].sum()), float(expected[part].sum())
    rest, rest_expected = float(size.sum()) - inside, float(expected.sum()) - inside_expected
    if min(inside, inside_expected, rest, rest_expected) <= 0:
        return math.nan
    return inside / inside_expected * rest_expected / rest


def _ranges(bin_count: int, *, upper_only: bool) -> Iterable[tuple[int, int]]:
    if upper_only:
        return ((first, bin_count - 1) for first in range(1, bin_count))
    return ((first, last) for first in range(bin_count) for last in range(first, bin_count))


def squared_relative_error(products: Array, rate: float, total: float) -> float:
    """Return the squared relative standard error, over sequences, of rate = Σ size / Σ expected.

    By the delta method it is Σ (size − rate · expected)² / (Σ size)², summed over sequences.

    Args:
        products: [3], the sums over sequences of size², size · expected and expected²; see ``BIN_PRODUCTS``.
        rate: the ratio.
        total: Σ size.
    """
    squares = products[0] - 2 * rate * products[1] + rate * rate * products[2]
    return max(float(squares), 0.0) / max(total, 1e-12) ** 2


def detect_range(name: str, *, upper_only: bool) -> Detector:
    """Return a detector of a mismatch that is concentrated in one range of a dimension.

    Args:
        name: name of the dimension.
        upper_only: consider only ranges that extend to the last bin, such as the tokens from some position on.
    """
    dimension = DIMENSIONS_BY_NAME[name]

    def detect(evidence: Evidence, threshold: float) -> Detection:
        worsened = _detect_part(dimension, evidence, evidence.before, threshold, upper_only=upper_only)
        if worsened.is_shown or evidence.before is None or evidence.compares_runs:
            return worsened
        # A part that is no worse than before the rise may hold most of the mismatch all along.
        standing = _detect_part(dimension, evidence, None, threshold, upper_only=upper_only)
        return replace(standing, is_standing=True) if standing.is_shown else worsened

    return detect


def _detect_part(
    dimension: Dimension, evidence: Evidence, before: Window | None, threshold: float, *, upper_only: bool
) -> Detection:
    name = dimension.name
    part = find_concentration(dimension, evidence.after, before, upper_only=upper_only)
    if part is None:
        needed = dimension.requirement or f"tokens in more than one range of {name}"
        return Detection(math.nan, f"nothing to compare: only one {name}, or none recorded", needs=needed)
    if not part.excess_share:
        return Detection(0.0, "no range stands out")
    bins = slice(part.first, part.last + 1)
    description = (
        f"{name} {dimension.label(part.first, part.last)} ({dimension.unit}): {part.lift:.1f} times the mismatch "
        f"of the other tokens"
    )
    is_large = part.excess_share > threshold and part.lift > MIN_LIFT
    return Detection(
        part.excess_share,
        description,
        is_large and part.score > MIN_SCORE,
        needs="more sequences: the difference may be chance" if is_large and part.score <= MIN_SCORE else "",
        explained=_explained_mismatch(dimension, bins, evidence.after, before),
        window_value=lambda window: _lift(window, name, bins),
    )


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
        groups, expected = sums.groups, _EXPECTED[measure]
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


def detect_group(evidence: Evidence, threshold: float) -> Detection:
    """Look for one prompt whose responses have far more mismatch than those of the other prompts, in most steps."""
    steps = [evidence.statistics.steps[step] for step in evidence.steps_after]
    compared = [(sums, group) for sums in steps for group in _highest_groups([sums])]
    if not compared:
        return Detection(math.nan, "nothing to compare", needs="a step with three prompts")
    highest = [group for _, group in compared]
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
    return Detection(
        excess_share,
        f"{name}: {lift:.1f} times the mismatch of the other prompts",
        is_large and (is_worse or not evidence.compares_runs),
        explained=_group_mismatch(*zip(*with_excess, strict=True)) if with_excess else None,
        is_standing=not is_worse,
    )
