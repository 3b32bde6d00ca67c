"""Detector of a mismatch that is concentrated in one part of the data, a range of a dimension.

The mismatch of a part is the sum of min(|Δ|, 1) over its tokens. It is compared with the expected mismatch: the sum of
1 − p, since noise on the logits moves a token's log-prob in proportion to 1 − p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from nemo_geomask.tools.diagnose.locate.run_evidence import (
    BIN_SUM_COLUMN,
    SMALL_DIFFERENCE,
    Detection,
    Detector,
    Evidence,
    MismatchSums,
)
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS_BY_NAME, Dimension
from nemo_geomask.tools.diagnose.measure.run_statistics import Window
from nemo_geomask.tools.diagnose.read.record_reader import Array

__all__ = [
    "EXPECTED_SUMS",
    "MIN_DOUBTFUL_LIFT",
    "MIN_LIFT",
    "MIN_SCORE",
    "MIN_WORSENING",
    "Concentration",
    "detect_range",
    "find_concentration",
    "smallest_detectable_share",
    "squared_relative_error",
]

MIN_LIFT = 1.8
"""Lower limit of the ratio of a part's mismatch to the mismatch of the rest (its lift), for the part to be a cause."""
MIN_DOUBTFUL_LIFT = 1.35
"""Lift above which a difference that is sure, but too small for a cause, leaves the cause open.

Smaller lifts come from numerics alone: in clean runs of the lab, tokens after tool calls have up to 1.32.
"""
MIN_SCORE = 6.0
"""Number of standard errors that the logarithm of the lift must exceed."""
MAX_DETECTABLE_SHARE = 0.5
"""A cause is testable if it would show when it accounts for this share of the mismatch, or for less."""
MIN_WORSENING = 1.5
"""Factor by which a part's mismatch must exceed its earlier mismatch, or that of the other run, to be a cause."""
MIN_EXPECTED_SHARE, MAX_EXPECTED_SHARE = 0.002, 0.9
"""Limits of a part's share of the expected mismatch; other parts are not judged."""
SHRINKAGE = 0.02
"""Weight of the overall mean, as a share of all earlier data, when a part's earlier mismatch is estimated."""
EXPECTED_SUMS = {"capped_abs": "one_minus_p", "k3": "one_minus_p_squared"}
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
        detectable_share: share of the mismatch that a typical range must account for to be shown, see
            :func:`smallest_detectable_share`.
    """

    first: int
    last: int
    lift: float
    excess: float
    excess_share: float
    score: float
    detectable_share: float


_NO_CONCENTRATION = Concentration(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


def find_concentration(
    dimension: Dimension, after: Window, before: Window | None, *, upper_only: bool, threshold: float = 0.0
) -> Concentration | None:
    """Return the range of bins with the largest excess share of the mismatch.

    With a *before* to compare with, the expected mismatch of a bin is proportional to its earlier mismatch. Otherwise
    it is proportional to the sum of 1 − p.

    Args:
        dimension: the dimension to search.
        after: the tokens to judge.
        before: the tokens to compare with.
        upper_only: consider only ranges that extend to the last bin.
        threshold: excess share above which a range is a cause.

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
    best, detectable_shares = _NO_CONCENTRATION, []
    if not total:
        return best
    for first, last in _ranges(dimension.bin_count, upper_only=upper_only):
        part = slice(first, last + 1)
        inside, inside_expected = float(size[part].sum()), float(expected[part].sum())
        if not MIN_EXPECTED_SHARE * total_expected < inside_expected < MAX_EXPECTED_SHARE * total_expected:
            continue
        rate, rest_rate = inside / inside_expected, (total - inside) / (total_expected - inside_expected)
        inside_products = products[part].sum(axis=0)
        error = squared_relative_error(inside_products, rate, inside)
        error += squared_relative_error(total_products - inside_products, rest_rate, total - inside)
        detectable_shares.append(
            smallest_detectable_share(inside_expected / total_expected, math.sqrt(error), threshold)
        )
        if is_compared and rate < MIN_WORSENING:
            continue  # the range may stand out, but no more than it did before
        # This difference of shares is largest for the range that holds all of the excess mismatch and nothing else.
        excess_share = inside / total - inside_expected / total_expected
        if rate <= rest_rate or excess_share <= best.excess_share:
            continue
        lift = rate / max(rest_rate, 1e-12)
        score = math.log(lift) / math.sqrt(error + 1e-12)
        excess = (inside - inside_expected * rest_rate) / total
        best = Concentration(first, last, lift, excess, excess_share, score, 0.0)
    return replace(best, detectable_share=float(np.median(detectable_shares)) if detectable_shares else 1.0)


def smallest_detectable_share(expected_share: float, error: float, threshold: float) -> float:
    """Return the smallest share of the mismatch that a range must account for to be shown.

    At a lift L, a range with the share e of the expected mismatch accounts for s = e (L − 1) / (1 + e (L − 1)) of the
    mismatch, and its excess share is (1 − e) s. It is shown if L > ``MIN_LIFT``, log L > ``MIN_SCORE`` · error and
    (1 − e) s > threshold.

    Args:
        expected_share: e.
        error: standard error of log L, over sequences.
        threshold: smallest excess share of a cause.
    """
    excess = expected_share * math.expm1(min(max(math.log(MIN_LIFT), MIN_SCORE * error), 40.0))
    return max(excess / (1 + excess), threshold / (1 - expected_share))


def _earlier_rates(before: Window, dimension: Dimension, measure: str) -> Array:
    """Return [1 + BIN_REPLICATES, bins], the ratio of earlier to expected mismatch in each bin.

    The ratios are shrunk to their mean over all bins, the more so the less data a bin has.
    """
    size = before.estimates(dimension.name, measure)
    expected = before.estimates(dimension.name, EXPECTED_SUMS[measure])
    total = expected.sum(axis=1, keepdims=True)
    mean_rate = size.sum(axis=1, keepdims=True) / np.maximum(total, 1e-12)
    prior = SHRINKAGE * total
    rates: Array = (size + prior * mean_rate) / (expected + prior + 1e-12)
    return rates


def _explained_mismatch(dimension: Dimension, part: slice, after: Window, before: Window | None) -> MismatchSums:
    """Return the mismatch of a range of bins in excess of what it would be at the rate of the other tokens."""

    def excess(measure: str) -> Array:
        size, expected = (after.estimates(dimension.name, name) for name in (measure, EXPECTED_SUMS[measure]))
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
    part = find_concentration(dimension, evidence.after, before, upper_only=upper_only, threshold=threshold)
    if part is None:
        needed = dimension.requirement or f"tokens in more than one range of {name}"
        return Detection(math.nan, f"nothing to compare: only one {name}, or none recorded", needs=needed)
    detectable = part.detectable_share
    too_few = (
        "" if detectable <= MAX_DETECTABLE_SHARE else f"more sequences: below {detectable:.0%} of |Δ| it can't show"
    )
    if not part.excess_share:
        return Detection(
            0.0, "no range stands out", needs=too_few, is_open=bool(too_few), detectable_share=part.detectable_share
        )
    bins = slice(part.first, part.last + 1)
    description = f"{dimension.describe(part.first, part.last)}: {part.lift:.1f} times the mismatch of the other tokens"
    is_large, is_sure = part.excess_share > threshold and part.lift > MIN_LIFT, part.score > MIN_SCORE
    needs = too_few
    if is_large and not is_sure:
        needs = "more sequences: the difference may be chance"
    elif not is_large and is_sure and part.lift > MIN_DOUBTFUL_LIFT:
        needs = f"another run (--against): {SMALL_DIFFERENCE}"
    return Detection(
        part.excess_share,
        description,
        is_large and is_sure,
        needs=needs,
        explained=_explained_mismatch(dimension, bins, evidence.after, before),
        window_value=lambda window: _lift(window, name, bins),
        is_open=bool(needs),
        detectable_share=part.detectable_share,
    )
