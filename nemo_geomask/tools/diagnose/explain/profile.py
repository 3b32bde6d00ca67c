"""Typical Δ of each bin of probability, from which causes are told that change all log-probs, and where they look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Detector, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.token_table import REPLICATES, TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.measure.token_values import MAX_SCALED_DELTA
from nemo_geomask.tools.diagnose.read.record_reader import Array

TRIMMED_SHARE = 0.05
"""Share of a bin's tokens that is left out at each end of Δ."""
MIN_BIN_TOKENS = 100
"""Number of tokens that a bin needs to take part."""
KNOWN_TO_SAMPLER = {"environment", "replica", "staleness", "step", "group"}
"""Factors of sequences that may have a sampling distribution of their own: known when they are generated."""


@dataclass(frozen=True)
class Profile:
    """Typical Δ of each bin of probability that has enough tokens."""

    bins: Array  # [K], number of the bin, in the order of falling probability
    tokens: Array  # [K], weighted number of tokens
    surprise: Array  # [K], mean surprise
    delta: Array  # [K], trimmed mean of Δ
    weight: Array  # [K], trimmed mean of exp(Δ) − 1
    tilt: Array  # [K], mean of Δ/(1 − p), clipped
    median: Array  # [K], median of Δ
    error: Array  # [K], standard error of ``delta``
    tilt_error: Array  # [K], standard error of ``tilt``
    tilt_square: Array  # [K], mean square of Δ/(1 − p), clipped

    def mean(self, values: Array) -> float:
        """Return the mean of a value over all tokens."""
        return float(np.average(values, weights=self.tokens))


@lru_cache(maxsize=4)
def profile(table: TokenTable) -> Profile | None:
    """Return the profile of some tokens; None if no bin of probability has enough of them."""
    bins, weight = np.digitize(table.surprise, SURPRISE_EDGES), table.weight.astype(float)
    columns = []
    for number in np.flatnonzero(np.bincount(bins, minlength=1) >= MIN_BIN_TOKENS).tolist():
        chosen = np.flatnonzero(bins == number)
        order = chosen[np.argsort(table.delta[chosen], kind="stable")]
        w, delta = weight[order], table.delta[order].astype(float)
        rank = (np.cumsum(w) - w / 2) / w.sum()
        kept = (rank > TRIMMED_SHARE) & (rank < 1 - TRIMMED_SHARE)
        scaled = np.clip(delta / table.one_minus_p[order], -MAX_SCALED_DELTA, MAX_SCALED_DELTA)
        count = w.sum() ** 2 / np.square(w).sum()

        def mean(values: Array, w: Array = w) -> float:
            return float((w * values).sum() / w.sum())

        tilt, square = mean(scaled), mean(np.square(scaled))
        trimmed = mean(delta[kept], w[kept])
        spread = math.sqrt(max(mean(np.square(delta[kept] - trimmed), w[kept]), 1e-24))
        columns.append(
            (
                number,
                w.sum(),
                mean(table.surprise[order]),
                trimmed,
                mean(np.expm1(delta[kept]), w[kept]),
                tilt,
                float(np.interp(0.5, rank, delta)),
                1.2 * spread / math.sqrt(count),
                math.sqrt(max(square - tilt**2, 1e-12) / count),
                square,
            )
        )
    return Profile(*(np.array(column) for column in zip(*columns, strict=True))) if columns else None


def net_mismatch(table: TokenTable, is_used: Array | None = None) -> MismatchSums:
    """Return the part of the mismatch that is a common shift of Δ within each bin of probability.

    Symmetric noise cancels in the sums of Δ and of sign(Δ) min(|Δ|, 1)², a shift does not.

    Args:
        table: the tokens.
        is_used: bool [bins], the bins that take part; None: all.
    """
    bins, size, sign = np.digitize(table.surprise, SURPRISE_EDGES), table.capped_abs, np.sign(table.delta)
    total: list[Array] = []
    for number in range(len(SURPRISE_EDGES) + 1):
        if is_used is not None and not is_used[number]:
            continue
        flags = bins == number
        part = table.select(flags)
        columns = np.stack(
            [part.k3, size[flags], part.delta.astype(float), size[flags] ** 2, (sign * size**2)[flags]], axis=1
        )
        k3, capped, delta, squares, signed = sum_with_replicates(part, columns).T
        share = np.minimum(np.abs(signed) / np.maximum(squares, 1e-30), 1.0)
        total.append(np.stack([k3 * share, np.minimum(np.abs(delta), capped)]))
    summed = sum(total, np.zeros((2, 1 + REPLICATES)))
    return MismatchSums(summed[0], summed[1])


def in_scope(detect: Callable[[TokenTable, Evidence, float], Detection]) -> Detector:
    """Return a detector that looks outside the regions, and else within one that is a part of the sequences."""

    def detector(evidence: Evidence, threshold: float) -> Detection:
        outside = detect(evidence.elsewhere, evidence, threshold)
        regions = evidence.location.regions
        if outside.is_shown or not regions or regions[0].excess < 0.5:
            return outside
        region = regions[0]
        if not {factor.id for factor in region.factors} <= KNOWN_TO_SAMPLER:
            return outside
        inside = detect(evidence.tokens.select(region.is_member), evidence, threshold)
        return replace(inside, place=region.description) if inside.is_shown else outside

    return detector
