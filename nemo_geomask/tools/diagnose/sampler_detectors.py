"""Detectors of sampler settings that the training engine does not share: top-p or top-k, and temperature."""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.run_evidence import BIN_SUM_COLUMN, Detection, Evidence

__all__ = ["detect_filter", "detect_temperature"]

MIN_TOKENS_FOR_SIGN = 100
"""Smallest number of tokens in a bin for which its share of negative Δ is used."""
MIN_TOKENS_FOR_MEAN = 20
"""Number of tokens in a bin above which its mean Δ/(1 − p) is used."""
MIN_MEAN_ERRORS = 4.0
"""Number of standard errors by which a bin's mean must differ from 0 to count as part of a tilt."""
UNSURE_BIN = int(np.digitize(2.0, SURPRISE_EDGES))
"""First bin of tokens with a probability below e^-2 = 0.14."""


def detect_filter(evidence: Evidence, threshold: float) -> Detection:
    """Look for log-probs that the sampler renormalised over the tokens kept by top-p or top-k.

    Renormalisation raises the probability of every kept token, so Δ < 0 in every bin of probability. The measured value
    is the lowest share of tokens with Δ < 0 in any bin.
    """
    bins = evidence.after.bin_sums["probability"]
    count, negative = bins[:, BIN_SUM_COLUMN["tokens"]], bins[:, BIN_SUM_COLUMN["delta_negative"]]
    has_enough = count >= MIN_TOKENS_FOR_SIGN
    # A different temperature also makes nearly sure tokens less likely; only unsure tokens distinguish the two causes.
    if np.count_nonzero(has_enough) < 3 or not has_enough[UNSURE_BIN:].any():
        edge = SURPRISE_EDGES[UNSURE_BIN - 1]
        return Detection(math.nan, f"too few tokens, or too few with a surprise of at least {edge:g} nats")
    share = float((negative[has_enough] / count[has_enough]).min())
    description = f"at every probability, the training engine finds {share:.0%} or more of the tokens less likely"
    # All steps are pooled in this measurement, so all are reported. That also makes the filter outrank the zero
    # log-probs that it causes where it keeps a single token.
    return Detection(share, description, share > threshold, evidence.steps_after if share > threshold else ())


def detect_temperature(evidence: Evidence, threshold: float) -> Detection:
    """Look for a tilt: likely tokens are likelier and unlikely tokens less likely in one engine than in the other.

    The measured value is the share of the variance of Δ/(1 − p) that the means of the bins of probability explain. A
    tilt has bins with positive and bins with negative means: the smaller of their two shares counts twice.
    """
    bins = evidence.after.bin_sums["probability"]
    count, total, squares = (
        bins[:, BIN_SUM_COLUMN[name]] for name in ("tokens", "scaled_delta", "scaled_delta_squared")
    )
    has_enough = count > MIN_TOKENS_FOR_MEAN
    if not has_enough.any():
        return Detection(math.nan, "too few tokens")
    if not squares.sum():
        return Detection(0.0, "the two engines agree on every token")
    count_used = count[has_enough]
    mean = total[has_enough] / count_used
    variance = np.maximum(squares[has_enough] / count_used - mean**2, 1e-12)
    is_significant = np.abs(mean) > MIN_MEAN_ERRORS * np.sqrt(variance / count_used)
    explained = count_used * np.square(mean) * is_significant
    explained_up, explained_down = np.where(mean > 0, explained, 0), np.where(mean < 0, explained, 0)
    share = 2 * min(float(explained_up.sum()), float(explained_down.sum())) / float(squares.sum())
    description = f"{share:.1%} of the variance of Δ/(1 − p) is a tilt between likely and unlikely tokens"
    if share > threshold:
        # Bins are in the order of falling probability, and the sharper engine has higher log-probs in the first ones.
        bin_numbers = np.arange(len(mean))
        raised, lowered = (np.average(bin_numbers, weights=part + 1e-300) for part in (explained_up, explained_down))
        shape = "sharper" if raised < lowered else "flatter"
        description += f"; the training engine's distribution is the {shape} one"
    return Detection(share, description, share > threshold)
