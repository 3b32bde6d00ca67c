"""Detectors of a mismatch that is concentrated in one part of the data: a range of a dimension, or a prompt group.

The mismatch of a part is the sum of min(|Δ|, 1) over its tokens. It is compared with the expected mismatch: the sum of
1 − p, since noise on the logits moves a token's log-prob in proportion to 1 − p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.dimensions import DIMENSIONS_BY_NAME, Dimension
from nemo_geomask.tools.diagnose.record_reader import Array
from nemo_geomask.tools.diagnose.run_evidence import BIN_SUM_COLUMN, Detection, Detector, Evidence
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


def find_concentration(dimension: Dimension, evidence: Evidence, *, upper_only: bool) -> Concentration | None:
    """Return the range of bins with the largest excess share of the mismatch.

    If there is a *before* to compare with, the expected mismatch of a bin is proportional to its earlier mismatch.
    Otherwise it is proportional to the sum of 1 − p.

    Args:
        dimension: the dimension to search.
        evidence: the run's statistics.
        upper_only: consider only ranges that extend to the last bin.

    Returns:
        None if all tokens are in one bin.
    """
    sums = evidence.after.bin_sums[dimension.name]
    size, products = sums[:, BIN_SUM_COLUMN["capped_abs"]], evidence.after.bin_products[dimension.name]
    expected = sums[:, BIN_SUM_COLUMN["one_minus_p"]]
    if np.count_nonzero(expected) < 2:
        return None
    earlier = None if evidence.before is None else evidence.before.bin_sums[dimension.name]
    # The comparison needs an earlier mismatch.
    is_compared = earlier is not None and earlier[:, BIN_SUM_COLUMN["capped_abs"]].sum() > 0
    if earlier is not None and is_compared:
        rates = _earlier_rates(earlier)
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


def _earlier_rates(earlier: Array) -> Array:
    """Return [bins], the ratio of earlier to expected mismatch; bins with little data are shrunk to the mean."""
    size, expected = earlier[:, BIN_SUM_COLUMN["capped_abs"]], earlier[:, BIN_SUM_COLUMN["one_minus_p"]]
    mean_rate = size.sum() / max(expected.sum(), 1e-12)
    prior = SHRINKAGE * expected.sum()
    rates: Array = (size + prior * mean_rate) / (expected + prior + 1e-12)
    return rates


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
        part = find_concentration(dimension, evidence, upper_only=upper_only)
        if part is None:
            return Detection(math.nan, f"nothing to compare: only one {name}, or none recorded")
        if not part.excess_share:
            return Detection(0.0, "no range stands out")
        description = (
            f"{name} {dimension.label(part.first, part.last)} ({dimension.unit}): {part.lift:.1f} times the mismatch "
            f"of the other tokens, an excess of {part.excess:.0%} of the total"
        )
        is_shown = part.excess_share > threshold and part.lift > MIN_LIFT and part.score > MIN_SCORE
        return Detection(part.excess_share, description, is_shown)

    return detect


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
    """Return the highest group of each step that has a mismatch and at least three groups."""
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


def detect_group(evidence: Evidence, threshold: float) -> Detection:
    """Look for one prompt whose responses have far more mismatch than those of the other prompts, in most steps."""
    highest = _highest_groups(evidence.statistics.steps[step] for step in evidence.steps_after)
    if not highest:
        return Detection(math.nan, "nothing to compare: no step with a mismatch and three prompts")
    excess_share = float(np.median([group.excess_share for group in highest]))
    lift = float(np.median([group.lift for group in highest]))
    rate = float(np.median([group.rate for group in highest]))
    earlier_rates = [group.rate for group in _highest_groups(evidence.step_sums_before)]
    is_worse = not earlier_rates or rate > MIN_WORSENING * float(np.median(earlier_rates))
    min_lift = MIN_GROUP_LIFT * (FEW_STEPS_FACTOR if len(highest) < FEW_STEPS else 1.0)
    is_same_group = len({group.number for group in highest}) == 1
    name = f"group {highest[0].number}" if is_same_group else "one group in each step"
    description = f"{name}: {lift:.1f} times the mismatch of the other prompts"
    return Detection(excess_share, description, excess_share > threshold and lift > min_lift and is_worse)
