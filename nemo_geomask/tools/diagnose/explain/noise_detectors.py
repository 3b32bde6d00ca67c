"""Detectors of numerical noise: on all tokens (precision of the engines), or on a few (expert routing).

The noise of a token is |z| with z = Δ/(1 − p), which is about the size of the noise on its logits. Tokens are weighted
by 1 − p, because the Δ of a nearly sure token is mostly the rounding of its log-probs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.locate.run_evidence import BIN_SUM_COLUMN, Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.run_statistics import NOISE, NOISE_BIN_OF_ONE, NOISE_BINS, Window
from nemo_geomask.tools.diagnose.read.record_reader import Array

__all__ = ["MIN_EXPLAINED_SHARE", "TYPICAL_NOISE", "detect_precision", "detect_routing"]

LARGE_NOISE_FACTORS = (8.0, 16.0, 32.0, 64.0)
"""A token's noise is large if it exceeds the median noise by one of these factors."""
MIN_EXPLAINED_SHARE = 0.1
"""Share of k3, or of |Δ|, that the additional tokens with large noise must account for."""
MIN_SURE_GROWTH = 1.2
"""Growth that the lower end of the interval must exceed for the tokens with large noise to have increased."""
MIN_LARGE_SHARE = 1e-4
"""Lower limit of the earlier share of tokens with large noise, when its growth is computed."""
NO_NOISE = 1e-4
"""Median noise below which two engines agree."""
COMPARISON_NEEDED = "a step at which the mismatch rises, or another run (--against)"


class Noise(NamedTuple):
    """Median noise of the tokens, and the share of tokens with large noise by each of ``LARGE_NOISE_FACTORS``."""

    median: float
    large_shares: tuple[float, ...]


TYPICAL_NOISE = Noise(0.016, (0.015, 0.006, 0.001, 1e-4))
"""Noise of bfloat16 decoding against float32 training, measured in the lab."""


def _median_noise(weights: Array) -> float:
    """Return the median of |z| from a histogram of log2 z² with linear interpolation; NaN if it is empty.

    Args:
        weights: [NOISE_BINS], the sum of 1 − p over the tokens of each bin.
    """
    total = float(weights.sum())
    if not total:
        return math.nan
    cumulated = np.cumsum(weights)
    middle_bin = min(int(np.searchsorted(cumulated, total / 2)), NOISE_BINS - 1)
    before_bin = cumulated[middle_bin] - weights[middle_bin]
    within_bin = (total / 2 - before_bin) / max(float(weights[middle_bin]), 1e-12)
    return float(2.0 ** ((middle_bin + within_bin - NOISE_BIN_OF_ONE) / 2))


def _share_of_bin_above(noise: float) -> Array:
    """Return [NOISE_BINS], the share of each bin's range that is above ``noise``: 0, 1, or between in one bin."""
    limit = 2 * math.log2(max(noise, 1e-9)) + NOISE_BIN_OF_ONE
    shares: Array = np.clip(np.arange(NOISE_BINS) - limit + 1, 0, 1)
    return shares


def _weights(window: Window) -> Array:
    weights: Array = window.bin_sums[NOISE][:, BIN_SUM_COLUMN["one_minus_p"]]
    return weights


def _large_shares(window: Window, factor: float) -> Array:
    """Return [1 + BIN_REPLICATES], the share of tokens with more than ``factor`` times the window's median noise."""
    weights = window.estimates(NOISE, "one_minus_p")
    large = weights @ _share_of_bin_above(factor * _median_noise(weights[0]))
    shares: Array = large / np.maximum(weights.sum(axis=1), 1e-12)
    return shares


def _reference(evidence: Evidence) -> str:
    if evidence.before is None:
        return "of bfloat16 against float32"
    return f"of {evidence.side_names[0]}" if evidence.compares_runs else "before"


def _median_growth(evidence: Evidence) -> float:
    """Return the factor by which the median noise has grown since *before*, or exceeds the typical noise."""
    before = TYPICAL_NOISE.median if evidence.before is None else _median_noise(_weights(evidence.before))
    return _median_noise(_weights(evidence.after)) / max(before, 1e-9)


def _needs(evidence: Evidence, *, is_beyond: bool) -> str:
    """Return what a test of the noise needs: a comparison, and a mismatch that is larger than the compared one."""
    if evidence.before is None:
        return COMPARISON_NEEDED
    return "a larger mismatch over all tokens" if is_beyond and not evidence.is_worse else ""


def detect_routing(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the tokens whose noise is large in comparison with that of a typical token.

    The tail of the noise is judged beyond several multiples of its median; the one whose additional tokens account for
    most of k3 is reported.
    """
    after = evidence.after
    if after.is_empty:
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    total, best = evidence.mismatch_after, None
    for index, factor in enumerate(LARGE_NOISE_FACTORS):
        shares = _large_shares(after, factor)
        if evidence.before is None:
            earlier: Array = np.full_like(shares, TYPICAL_NOISE.large_shares[index])
        else:
            earlier = _large_shares(evidence.before, factor)
        growth = shares / np.maximum(earlier, MIN_LARGE_SHARE)
        additional = np.maximum(1 - 1 / np.maximum(growth, 1e-12), 0)
        above = _share_of_bin_above(factor * _median_noise(_weights(after)))
        explained = MismatchSums(
            *(additional * (after.estimates(NOISE, name) @ above) for name in ("k3", "capped_abs"))
        )
        if best is None or explained.k3[0] > best[1].k3[0]:
            best = growth, explained, factor
    assert best is not None
    growth, explained, factor = best
    share = max(float(part[0]) / max(float(sums[0]), 1e-12) for part, sums in zip(explained, total, strict=True))
    is_beyond = (
        float(growth[0]) > threshold
        and float(np.quantile(growth[1:], 0.025)) > MIN_SURE_GROWTH
        and share > MIN_EXPLAINED_SHARE
    )
    is_shown = evidence.is_worse and is_beyond
    description = (
        f"{growth[0]:.1f} times as many tokens have more than {factor:g} times the median noise; the noise of a "
        f"typical token is {_median_growth(evidence):.1f} times that {_reference(evidence)}"
    )
    return Detection(
        float(growth[0]),
        description,
        is_shown,
        needs=_needs(evidence, is_beyond=is_beyond),
        explained=explained,
        window_value=lambda window: float(max(_large_shares(window, factor)[0], MIN_LARGE_SHARE)),
    )


def _noise_level(window: Window) -> float:
    """Return the median noise, or 0 for the lowest bins of the histogram, which hold engines that agree."""
    median = _median_noise(_weights(window))
    return 0.0 if median < NO_NOISE else median


def detect_precision(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the typical token's noise."""
    after = evidence.after
    growth = _median_growth(evidence)
    if math.isnan(growth):
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    typical = 1 - _share_of_bin_above(LARGE_NOISE_FACTORS[0] * _median_noise(_weights(after)))
    explained = MismatchSums(
        (after.estimates(NOISE, "k3") @ typical) * max(1 - growth**-2, 0.0),
        (after.estimates(NOISE, "capped_abs") @ typical) * max(1 - 1 / growth, 0.0),
    )
    return Detection(
        growth,
        f"the noise of a typical token is {growth:.1f} times that {_reference(evidence)}",
        evidence.is_worse and growth > threshold,
        needs=_needs(evidence, is_beyond=growth > threshold),
        explained=explained,
        window_value=_noise_level,
    )
