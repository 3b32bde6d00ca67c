"""Detectors of log-probs that are not of the distribution sampled from: by top-p, top-k, temperature and others.

If ``gen`` are the log-probs of the sampler, the mean of exp(Δ) is 1 whatever the training engine computes.
"""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.locate.run_evidence import (
    BIN_SUM_COLUMN,
    SMALL_DIFFERENCE,
    Detection,
    Evidence,
    MismatchSums,
    fault_mismatch,
)
from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.run_statistics import Window
from nemo_geomask.tools.diagnose.measure.step_sums import ratio_or_nan
from nemo_geomask.tools.diagnose.read.record_reader import Array

__all__ = ["detect_biased_weight", "detect_filter", "detect_temperature"]

MIN_TOKENS_FOR_SIGN = 100
"""Smallest number of tokens in a bin for which the sign of its mean is used."""
MIN_TOKENS_FOR_MEAN = 20
"""Number of tokens in a bin above which its mean Δ/(1 − p) is used."""
MIN_MEAN_ERRORS = 4.0
"""Number of standard errors by which a bin's mean must differ from 0 to count as part of a tilt."""
MIN_WEIGHT_ERRORS = 6.0
"""Number of standard errors by which the mean of exp(Δ) must be below 1 to show a filter."""
MIN_ESS = {False: 0.7, True: 0.3}
"""Effective sample sizes below which a mean of exp(Δ) below 1, or above 1, is not trusted.

A sample may lack the few large weights without which the mean is below 1, or hold one of them by chance.
"""
MIN_DOUBTFUL_TILT = 0.005
"""Tilt above which the temperatures are left open; clean runs of the lab have up to 0.001."""
UNSURE_BIN = int(np.digitize(2.0, SURPRISE_EDGES))
"""First bin of tokens with a probability below e^-2 = 0.14."""
PROBABILITY = "probability"


def _net_mismatch(window: Window, is_used: Array | None = None) -> MismatchSums:
    """Return the part of the mismatch that is a common shift of Δ within each bin of probability.

    Symmetric noise cancels in the sums of Δ and of sign(Δ) Δ², a shift does not.

    Args:
        window: the tokens.
        is_used: bool [bins], the bins that take part; None: all.
    """
    chosen = slice(None) if is_used is None else is_used

    def values(name: str) -> Array:
        selected: Array = window.estimates(PROBABILITY, name)[:, chosen]
        return selected

    shift = np.minimum(np.abs(values("delta")), values("capped_abs")).sum(axis=1)
    squares = values("capped_abs_squared")
    share = np.abs(values("signed_square")) / np.maximum(squares, 1e-30)
    return MismatchSums((values("k3") * np.minimum(share, 1.0)).sum(axis=1), shift)


def _excess_weights(window: Window) -> Array:
    """Return [1 + BIN_REPLICATES, bins], the sum of exp(Δ) − 1 = k3 + Δ in each bin of probability."""
    excess: Array = window.estimates(PROBABILITY, "k3") + window.estimates(PROBABILITY, "delta")
    return excess


def _mean_excess_weight(window: Window) -> tuple[float, float]:
    """Return the mean of exp(Δ) minus 1 over all tokens, and its standard error."""
    tokens = window.estimates(PROBABILITY, "tokens").sum(axis=1)
    if not tokens[0]:
        return math.nan, math.nan
    means = _excess_weights(window).sum(axis=1) / np.maximum(tokens, 1)
    return float(means[0]), float(means[1:].std())


def detect_filter(evidence: Evidence, threshold: float) -> Detection:
    """Look for log-probs that the sampler renormalised over the tokens kept by top-p or top-k.

    Renormalisation raises the probability of every kept token. So the mean of exp(Δ) is below 1 in every bin of
    probability, by the share of the probability that is cut off, which is the measured value.
    """
    bins = evidence.after.bin_sums[PROBABILITY]
    count = bins[:, BIN_SUM_COLUMN["tokens"]]
    has_enough = count >= MIN_TOKENS_FOR_SIGN
    # A different temperature also makes nearly sure tokens less likely; only unsure tokens distinguish the two causes.
    if np.count_nonzero(has_enough) < 3 or not has_enough[UNSURE_BIN:].any():
        edge = SURPRISE_EDGES[UNSURE_BIN - 1]
        description = f"too few tokens, or too few with a surprise of at least {edge:g} nats"
        return Detection(math.nan, description, needs=f"more tokens with a surprise of at least {edge:g} nats")
    excess, error = _mean_excess_weight(evidence.after)
    by_bin = _excess_weights(evidence.after)[:, has_enough]
    # In the bins of nearly sure tokens the shift may be smaller than the rounding of the log-probs.
    is_lower_everywhere = bool((by_bin[0] < 2 * by_bin[1:].std(axis=0)).all())
    is_shown = -excess > threshold and -excess > MIN_WEIGHT_ERRORS * error and is_lower_everywhere
    where = "at every probability" if is_lower_everywhere else "not at every probability"
    sums = evidence.sums_after
    explained = _net_mismatch(evidence.after).plus(fault_mismatch(sums, "zero"))
    # All steps are pooled in this measurement, so all are reported.
    return Detection(
        -excess,
        f"the training engine gives the sampled tokens {-excess:.1%} less probability, {where}",
        is_shown,
        evidence.steps_after if is_shown else (),
        explained=explained,
    )


def detect_temperature(evidence: Evidence, threshold: float) -> Detection:
    """Look for a tilt: likely tokens are likelier and unlikely tokens less likely in one engine than in the other.

    The means of the bins of probability explain a share of the variance of Δ/(1 − p). The bins with positive means and
    those with negative means are taken separately, since a tilt has both; the measured value is twice the smaller of
    the two shares.
    """
    bins = evidence.after.bin_sums[PROBABILITY]
    count, total, squares = (
        bins[:, BIN_SUM_COLUMN[name]] for name in ("tokens", "scaled_delta", "scaled_delta_squared")
    )
    has_enough = count > MIN_TOKENS_FOR_MEAN
    if not has_enough.any():
        return Detection(math.nan, "too few tokens", needs="more tokens with log-probs of both engines")
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
    is_used = has_enough.copy()
    is_used[has_enough] = is_significant
    is_open = MIN_DOUBTFUL_TILT < share <= threshold and not evidence.compares_runs
    return Detection(
        share,
        description,
        share > threshold,
        needs=f"another run (--against): {SMALL_DIFFERENCE}" if is_open else "",
        explained=_net_mismatch(evidence.after, is_used),
        is_open=is_open,
    )


def detect_biased_weight(evidence: Evidence, threshold: float) -> Detection:
    """Look for a mean of exp(Δ) that differs from 1.

    It is 1 if the sampler reports the log-probs of the distribution that it samples from. The mean counts only if the
    effective sample size is large enough, so that a few tokens do not decide it.
    """
    excess, error = _mean_excess_weight(evidence.after)
    if math.isnan(excess):
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    sums = evidence.sums_after
    ess = ratio_or_nan(sums["weight"] ** 2, sums["weight_squared"] * sums["tokens"])
    is_beyond = abs(excess) - 2 * error > threshold and ess > MIN_ESS[excess > 0]
    if evidence.before is not None and evidence.compares_runs:
        is_beyond &= abs(_mean_excess_weight(evidence.before)[0]) < abs(excess) / 2
    low, high = 1 + excess - 2 * error, 1 + excess + 2 * error
    return Detection(
        abs(excess),
        f"the mean of exp(Δ) is {1 + excess:.3g} ({low:.3g} to {high:.3g}) where 1 is expected",
        is_beyond,
        explained=_net_mismatch(evidence.after),
    )
