"""Detectors of log-probs that are not of the sampler's distribution: top-p, another temperature, a factor, others.

Each looks at the typical Δ of each bin of probability, a trimmed mean: a fault of all log-probs moves the typical
token, and a few large errors don't. If ``gen`` are the log-probs of the sampler, the mean of exp(Δ) is 1 whatever the
training engine computes. They are sought among the tokens outside the regions that hold the excess
(``Evidence.elsewhere``), and within a region if it is a part of the sequences that holds more than half of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import (
    Detection,
    Detector,
    Evidence,
    MismatchSums,
    fault_mismatch,
)
from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.step_sums import ratio_or_nan
from nemo_geomask.tools.diagnose.measure.token_table import REPLICATES, TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.read.record_reader import Array

TRIMMED_SHARE = 0.05
"""Share of a bin's tokens that is left out at each end of Δ."""
MIN_BIN_TOKENS = 100
"""Number of tokens that a bin needs to take part."""
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
MAX_SCALED_DELTA = 0.1
"""Value at which Δ/(1 − p) is clipped, so that of large noise only the sign counts."""
MAX_SPREAD_OF_FACTOR = 0.3
"""Largest relative deviation of a bin's Δ/surprise from that of all bins, for log-probs scaled by a factor."""
KNOWN_TO_SAMPLER = {"environment", "replica", "staleness", "step", "group"}
"""Factors of sequences that may have a sampling distribution of their own: known when they are generated."""
MIN_RANGE_OF_FACTOR = 8.0
"""Smallest ratio of the largest to the smallest surprise over which Δ is in proportion to it."""
UNSURE_BIN = int(np.digitize(2.0, SURPRISE_EDGES))
"""First bin of tokens with a probability below e^-2 = 0.14."""


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


def _net_mismatch(table: TokenTable, is_used: Array | None = None) -> MismatchSums:
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


def _in_scope(detect: Callable[[TokenTable, Evidence, float], Detection]) -> Detector:
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
    if is_shown and _find_factor(shape) is not None:
        is_shown = False
    where = "at every probability" if is_lower else "not at every probability"
    explained = _net_mismatch(table).plus(fault_mismatch(evidence.sums_after, "zero"))
    # All steps are pooled in this measurement, so all are reported.
    return Detection(
        cut,
        f"the training engine gives the typical sampled token {describe_change(-cut)} probability, {where}",
        is_shown,
        evidence.steps_after if is_shown else (),
        explained=explained,
    )


def describe_change(share: float) -> str:
    """Return a relative change as text, such as "3.0% more" or "1.2% less"."""
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


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
        abs(factor), description, is_shown, evidence.steps_after if is_shown else (), explained=_net_mismatch(table)
    )


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
    is_open = MIN_DOUBTFUL_TILT < share <= threshold and not evidence.compares_runs
    needs = "another run (--against): the difference is sure, but smaller than that of a named cause" if is_open else ""
    return Detection(
        share, description, share > threshold, needs=needs, explained=_net_mismatch(table, is_used), is_open=is_open
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
    if evidence.compares_runs and evidence.tokens_before is not None:
        before = profile(evidence.tokens_before)
        is_beyond &= before is None or abs(before.mean(before.weight)) < abs(typical) / 2
    low, high = 1 + excess - 2 * error, 1 + excess + 2 * error
    return Detection(
        abs(excess),
        f"the mean of exp(Δ) is {1 + excess:.3g} ({low:.3g} to {high:.3g}) where 1 is expected",
        is_beyond,
        explained=_net_mismatch(table),
    )


detect_filter = _in_scope(_detect_filter)
"""Look for log-probs that the sampler renormalised over the tokens kept by top-p or top-k.

Renormalisation raises the probability of every kept token. So Δ is below 0 in every bin of probability, for the typical
token, too; the measured value is the share of the probability that is cut off.
"""
detect_scaled = _in_scope(_detect_scaled)
"""Look for log-probs that one engine multiplied by a factor: Δ is in proportion to the surprise in every bin."""
detect_temperature = _in_scope(_detect_temperature)
"""Look for a tilt: likely tokens are likelier and unlikely tokens less likely in one engine than in the other.

The means of the bins of probability explain a share of the variance of Δ/(1 − p). The bins with positive means and
those with negative means are taken separately, since a tilt has both; the measured value is twice the smaller share.
"""
detect_biased_weight = _in_scope(_detect_biased_weight)
"""Look for a mean of exp(Δ) that differs from 1, for the typical token, too.

It is 1 if the sampler reports the log-probs of the distribution that it samples from. The mean counts only if the
effective sample size is large enough, so that a few tokens do not decide it.
"""
