"""Detectors of log-probs that are not of the sampler's distribution: top-p, another temperature, a factor, others.

Each looks at the typical Δ of each bin of probability, a trimmed mean: a fault of all log-probs moves the typical
token, and a few large errors don't. If ``gen`` are the log-probs of the sampler, the mean of exp(Δ) is 1 whatever the
training engine computes. They are sought among the tokens outside the regions that hold the excess
(``Evidence.elsewhere``), and within a region if it is a part of the sequences that holds more than half of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence, MismatchSums, fault_mismatch
from nemo_geomask.tools.diagnose.explain.profile import Profile, in_scope, net_mismatch, profile
from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.step_sums import ratio_or_nan
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.read.record_reader import Array

MIN_ERRORS = 6.0
"""Number of standard errors by which a shift must differ from 0."""
MIN_BIN_ERRORS = 4.0
"""Number of standard errors by which a bin's shift must differ from 0 to have a sign."""
MIN_TYPICAL_PART = 0.25
"""Part of the shift of the trimmed mean that the median must show, for the shift to be that of the typical token."""
MIN_ESS = {False: 0.7, True: 0.3}
"""Effective sample sizes below which a mean of exp(Δ) below 1, or above 1, is not trusted.

A sample may lack the few large weights without which the mean is below 1, or hold one of them by chance.
"""
MIN_DOUBTFUL_TILT = 0.005
"""Tilt above which the temperatures are left open; clean runs of the lab have up to 0.001."""
MAX_SPREAD_OF_FACTOR = 0.3
"""Largest relative deviation of a bin's Δ/surprise from that of all bins, for log-probs scaled by a factor."""
MIN_RANGE_OF_FACTOR = 8.0
"""Smallest ratio of the largest to the smallest surprise over which Δ is in proportion to it."""
MIN_FLOOR_RATIO = 0.4
"""Smallest ratio of the shifts of two bins of nearly sure tokens for them to be the same shift."""
UNSURE_BIN = int(np.digitize(2.0, SURPRISE_EDGES))
"""First bin of tokens with a probability below e^-2 = 0.14."""


def _typical(shape: Profile, values: Array, unsure: Array) -> bool:
    """Return True if the medians show enough of the shift of the trimmed means, among tokens that are not sure."""
    if not unsure.any():
        return False
    part = Profile(*(column[unsure] for column in vars(shape).values()))
    return part.mean(np.abs(part.median) * (np.sign(part.median) == np.sign(values[unsure]))) > MIN_TYPICAL_PART * abs(
        part.mean(values[unsure])
    )


def _mean_excess_weight(table: TokenTable) -> tuple[float, float]:
    """Return the mean of exp(Δ) minus 1 over all tokens, and its standard error over sequences."""
    sums = sum_with_replicates(table, np.stack([table.k3 + table.delta.astype(float), np.ones(len(table))], axis=1))
    means = sums[:, 0] / np.maximum(sums[:, 1], 1e-12)
    return float(means[0]), float(means[1:].std())


def _detect_filter(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    shape = profile(table)
    edge = SURPRISE_EDGES[UNSURE_BIN - 1]
    # A different temperature also makes nearly sure tokens less likely; only unsure tokens distinguish the two causes.
    if shape is None or len(shape.bins) < 3 or not (shape.bins >= UNSURE_BIN).any():
        description = f"too few tokens, or too few with a surprise of at least {edge:g} nats"
        return Detection(math.nan, description, needs=f"more tokens with a surprise of at least {edge:g} nats")
    cut = -shape.mean(shape.weight)
    mean, error = _mean_excess_weight(table)
    # In the bins of nearly sure tokens the shift may be smaller than the rounding of the log-probs.
    is_lower = bool((shape.delta < 2 * shape.error).all())
    is_typical = _typical(shape, shape.delta, shape.surprise > 0.35)
    # Large noise lowers the log-prob of the typical token, too, but not the mean of exp(Δ).
    is_shown = min(cut, -mean) > threshold and -mean > MIN_ERRORS * error and is_lower and is_typical
    if is_shown and (_find_factor(shape) is not None or _find_penalty(table) is not None):
        is_shown = False
    where = f"{'less' if cut > 0 else 'more'} probability, {'' if is_lower else 'not '}at every probability"
    explained = net_mismatch(table).plus(fault_mismatch(evidence.sums_after, "zero"))
    # All steps are pooled in this measurement, so all are reported.
    return Detection(
        max(min(cut, -mean), 0.0),
        f"the training engine gives the typical sampled token {abs(cut):.1%} {where}",
        is_shown,
        evidence.steps_after if is_shown else (),
        explained=explained,
    )


def _find_factor(shape: Profile) -> float | None:
    """Return the factor, minus 1, by which the log-probs are scaled; None if Δ is not in proportion to the surprise."""
    is_sure = np.abs(shape.delta) > MIN_BIN_ERRORS * shape.error
    used = is_sure & (shape.surprise > 0.02)
    if np.count_nonzero(used) < 3 or np.ptp(np.log(shape.surprise[used])) < math.log(MIN_RANGE_OF_FACTOR):
        return None
    rates = shape.delta[used] / -shape.surprise[used]
    factor = float(np.average(rates, weights=shape.tokens[used] * shape.surprise[used]))
    # Bins whose shift is not sure must not contradict the factor.
    unsure = ~is_sure & (shape.surprise > 0.02)
    contradicts = np.abs(shape.delta + factor * shape.surprise)[unsure] > MIN_BIN_ERRORS * shape.error[unsure]
    spread = np.abs(rates / factor - 1) if factor else np.full(1, np.inf)
    slack = MAX_SPREAD_OF_FACTOR + 2 * shape.error[used] / np.abs(factor * shape.surprise[used])
    return None if (spread > slack).any() or contradicts.any() else factor


def _detect_scaled(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    shape = profile(table)
    if shape is None or len(shape.bins) < 3:
        return Detection(math.nan, "too few tokens", needs="more tokens with log-probs of both engines")
    factor = _find_factor(shape)
    is_typical = factor is not None and _typical(shape, shape.delta, shape.surprise > 0.35)
    if factor is None or not is_typical:
        return Detection(0.0, "Δ is not in proportion to the surprise")
    description = (
        f"Δ is in proportion to the surprise: the training engine's log-probs are {1 + factor:.3f} times the others"
    )
    is_shown = abs(factor) > threshold
    return Detection(
        abs(factor), description, is_shown, evidence.steps_after if is_shown else (), explained=net_mismatch(table)
    )


def _find_floor(shape: Profile) -> float | None:
    """Return the shift of nearly sure tokens if it is the same however sure they are; None if it fades with 1 − p.

    A temperature, a filter or a factor leaves sure tokens as they are. A mixture with another distribution does not.
    """
    sure = np.flatnonzero((shape.surprise < 0.01) & (np.abs(shape.delta) > MIN_BIN_ERRORS * shape.error))
    if len(sure) < 2:
        return None
    first, second = shape.delta[sure[:2]].tolist()
    is_constant = first * second > 0 and MIN_FLOOR_RATIO < first / second < 1 / MIN_FLOOR_RATIO
    return float(first) if is_constant and abs(first) > shape.surprise[sure[0]] else None


@lru_cache(maxsize=4)
def _find_penalty(table: TokenTable) -> tuple[float, float] | None:
    """Return the typical Δ of tokens that occurred before and of new ones if it is above and below 0; else None.

    A penalty lowers the sampler's log-probs of the former and with that raises those of the latter. Other causes do not
    know which tokens occurred before.
    """
    means = []
    for flags, sign in ((table.is_repeated, 1), (~table.is_repeated, -1)):
        shape = profile(table.select(flags))
        if shape is None:
            return None
        error = math.sqrt(float(np.square(shape.tokens * shape.error).sum())) / float(shape.tokens.sum())
        means.append(shape.mean(shape.delta))
        if sign * means[-1] < MIN_ERRORS * error:
            return None
    return means[0], means[1]


def _detect_penalty(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    if not table.is_repeated.any() or profile(table) is None:
        return Detection(math.nan, "no token occurs again", needs="token ids that recur in a sequence")
    typical_deltas = _find_penalty(table)
    if typical_deltas is None:
        return Detection(0.0, "tokens that occurred before have no Δ of another sign than new ones")
    repeated, new = typical_deltas
    parts = (net_mismatch(table.select(flags)) for flags in (table.is_repeated, ~table.is_repeated))
    return Detection(
        repeated - new,
        f"the typical Δ is {repeated:.2g} for tokens that occurred before in their sequence and {new:.2g} for new ones",
        repeated - new > threshold,
        explained=MismatchSums.plus(*parts),
    )


def _detect_smoothed(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    shape = profile(table)
    if shape is None:
        return Detection(math.nan, "too few tokens", needs="more tokens with log-probs of both engines")
    floor, raised = _find_floor(shape), shape.delta[shape.surprise > 2.0]
    if floor is None or not len(raised) or raised[-1] * floor > 0:
        return Detection(0.0, "log-probs of nearly sure tokens are not shifted")
    description = (
        f"Δ of nearly sure tokens is {floor:.2g} however sure they are, and unlikely tokens move the other way"
    )
    return Detection(abs(floor), description, abs(floor) > threshold, explained=net_mismatch(table))


def _tilt(shape: Profile) -> tuple[Array, Array, float]:
    """Return the squares that each bin's mean Δ/(1 − p) explains above and below 0, and twice the smaller share."""
    is_significant = np.abs(shape.tilt) > MIN_BIN_ERRORS * shape.tilt_error
    explained = shape.tokens * np.square(shape.tilt) * is_significant
    up, down = np.where(shape.tilt > 0, explained, 0), np.where(shape.tilt < 0, explained, 0)
    squares = max(float((shape.tokens * shape.tilt_square).sum()), 1e-30)
    return up, down, 2 * min(float(up.sum()), float(down.sum())) / squares


def _detect_temperature(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    shape = profile(table)
    if shape is None:
        return Detection(math.nan, "too few tokens", needs="more tokens with log-probs of both engines")
    if not shape.tilt_square.any():
        return Detection(0.0, "the two engines agree on every token")
    up, down, share = _tilt(shape)
    if _find_penalty(table) is not None:
        return Detection(0.0, "the tilt is one between tokens that occurred before and new ones")
    if _find_floor(shape) is not None:
        return Detection(0.0, "nearly sure tokens are shifted, which another temperature leaves as they are")
    if share:  # noise tilts by the bins of one engine alone
        swapped = profile(replace(table, gen=table.gen + table.delta, delta=-table.delta))
        share = 0.0 if swapped is None else min(share, _tilt(swapped)[2])
    description = f"{share:.1%} of the variance of Δ/(1 − p) is a tilt between likely and unlikely tokens"
    if share > threshold:
        # Bins are in the order of falling probability, and the sharper engine has higher log-probs in the first ones.
        raised, lowered = (np.average(shape.bins, weights=part + 1e-300) for part in (up, down))
        name = "sharper" if raised < lowered else "flatter"
        description += f"; the training engine's distribution is the {name} one"
    is_used = np.zeros(len(SURPRISE_EDGES) + 1, bool)
    is_used[shape.bins[up + down > 0]] = True
    is_open = MIN_DOUBTFUL_TILT < share <= threshold and evidence.against is None
    needs = "another run (--against): the difference is sure, but smaller than that of a named cause" if is_open else ""
    return Detection(
        share, description, share > threshold, needs=needs, explained=net_mismatch(table, is_used), is_open=is_open
    )


def _detect_biased_weight(table: TokenTable, evidence: Evidence, threshold: float) -> Detection:
    shape = profile(table)
    if shape is None:
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    excess, error = _mean_excess_weight(table)
    total = evidence.sums_after
    ess = ratio_or_nan(total["weight"] ** 2, total["weight_squared"] * total["tokens"])
    is_beyond = abs(excess) - 2 * error > threshold and ess > MIN_ESS[excess > 0]
    typical = shape.mean(shape.weight)
    is_beyond &= abs(typical) > MIN_TYPICAL_PART * abs(excess) and (typical > 0) == (excess > 0)
    if evidence.against is not None and evidence.tokens_before is not None:
        before = profile(evidence.tokens_before)
        is_beyond &= before is None or abs(before.mean(before.weight)) < abs(typical) / 2
    low, high = 1 + excess - 2 * error, 1 + excess + 2 * error
    return Detection(
        abs(excess),
        f"the mean of exp(Δ) is {1 + excess:.3g} ({low:.3g} to {high:.3g}) where 1 is expected",
        is_beyond,
        explained=net_mismatch(table),
    )


detect_filter = in_scope(_detect_filter)
"""Look for log-probs that the sampler renormalised over the tokens kept by top-p or top-k.

Renormalisation raises the probability of every kept token. So Δ is below 0 in every bin of probability, for the typical
token, too; the measured value is the share of the probability that is cut off.
"""
detect_scaled = in_scope(_detect_scaled)
"""Look for log-probs that one engine multiplied by a factor: Δ is in proportion to the surprise in every bin."""
detect_temperature = in_scope(_detect_temperature)
"""Look for a tilt: likely tokens are likelier and unlikely tokens less likely in one engine than in the other.

The means of the bins of probability explain a share of the variance of Δ/(1 − p). The bins with positive means and
those with negative means are taken separately, since a tilt has both; the measured value is twice the smaller share.
"""
detect_penalty = in_scope(_detect_penalty)
"""Look for a sampler that makes tokens less likely which occurred before."""
detect_smoothed = in_scope(_detect_smoothed)
"""Look for probabilities that one engine mixed with a flat distribution: Δ = log(1 − ε + ε / (V p))."""
detect_biased_weight = in_scope(_detect_biased_weight)
"""Look for a mean of exp(Δ) that differs from 1, for the typical token, too.

It is 1 if the sampler reports the log-probs of the distribution that it samples from. The mean counts only if the
effective sample size is large enough, so that a few tokens do not decide it.
"""
