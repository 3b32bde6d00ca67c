"""Detectors of numerical noise: on all tokens (precision of the engines), or on a few (expert routing).

The noise of a token is |z| with z = Δ/(1 − p), which is about the size of the noise on its logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.run_evidence import Detection, Evidence
from nemo_geomask.tools.diagnose.run_statistics import NOISE_BIN_OF_ONE, Window

__all__ = ["TYPICAL_NOISE", "detect_precision", "detect_routing"]

LARGE_NOISE_FACTOR = 8.0
"""A token's noise is large if it exceeds the usual median noise by this factor."""


class _Noise(NamedTuple):
    """Median of |z| over tokens, and share of tokens with large noise."""

    median: float
    large_share: float


TYPICAL_NOISE = _Noise(0.016, 0.015)
"""Noise of bfloat16 decoding against float32 training, measured in the lab."""
MIN_LARGE_SHARE = 1e-4
"""Lower limit of the earlier share of tokens with large noise, when its growth is computed."""


def _measure_noise(window: Window, usual_median: float | None = None) -> _Noise:
    """Measure the noise of a window's tokens, from a histogram of log2 z² with linear interpolation within its bins.

    Args:
        window: the sums.
        usual_median: noise is large above ``LARGE_NOISE_FACTOR`` times this; None: times the window's median.
    """
    count = window.noise_histogram
    total = float(count.sum())
    if not total:
        return _Noise(math.nan, math.nan)
    cumulated = np.cumsum(count)
    middle_bin = int(np.searchsorted(cumulated, total / 2))
    before_bin = cumulated[middle_bin] - count[middle_bin]
    within_bin = (total / 2 - before_bin) / max(count[middle_bin], 1.0)
    median = float(2.0 ** ((middle_bin + within_bin - NOISE_BIN_OF_ONE) / 2))
    limit = 2 * math.log2(LARGE_NOISE_FACTOR * (median if usual_median is None else usual_median)) + NOISE_BIN_OF_ONE
    share_of_bin_above = np.clip(np.arange(len(count)) - limit + 1, 0, 1)
    return _Noise(median, float((count * share_of_bin_above).sum() / total))


def _noise_growth(evidence: Evidence) -> _Noise:
    """Return the factors by which the median noise and the share of large noise have grown since *before*."""
    before = TYPICAL_NOISE if evidence.before is None else _measure_noise(evidence.before)
    after = _measure_noise(evidence.after, before.median)
    return _Noise(after.median / before.median, after.large_share / max(before.large_share, MIN_LARGE_SHARE))


def _reference(evidence: Evidence) -> str:
    if evidence.before is None:
        return "of bfloat16 against float32"
    return f"of {evidence.side_names[0]}" if evidence.compares_runs else "before"


def detect_routing(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the tokens with large noise while the typical token's noise stays about the same."""
    growth = _noise_growth(evidence)
    description = (
        f"{growth.large_share:.1f} times as many tokens with large noise; the noise of a typical token is "
        f"{growth.median:.1f} times that {_reference(evidence)}"
    )
    is_shown = evidence.is_worse and growth.large_share > threshold and growth.median < threshold
    return Detection(growth.large_share, description, is_shown)


def detect_precision(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the typical token's noise."""
    growth = _noise_growth(evidence)
    description = f"the noise of a typical token is {growth.median:.1f} times that {_reference(evidence)}"
    return Detection(growth.median, description, evidence.is_worse and growth.median > threshold)
