"""Regions of one factor, or of given tokens: the choice of levels, and the measurement of what they hold.

A token's mismatch is A = min(|Δ|, 1) and its exposure is E = 1 − p times the usual rate of its bin of probability. For
a region with the share x of the mismatch and the share q of the exposure, the information is the Kullback-Leibler
divergence of two Bernoulli distributions, I = x ln(x/q) + (1 − x) ln((1 − x)/(1 − q)), in nats. It is largest for the
region that holds all of the excess and nothing else. The levels of a region are chosen on one half of the sequences,
and the region is measured on the other half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.locate.factors import Factor, Levels
from nemo_geomask.tools.diagnose.measure.bootstrap_draws import mix_bits
from nemo_geomask.tools.diagnose.measure.dimensions import SURPRISE_EDGES
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable
from nemo_geomask.tools.diagnose.read.record_reader import Array

MIN_LIFT = 1.8
"""Lower limit of a region's rate, relative to the rate elsewhere."""
MIN_LIFT_OF_UNITS = 2.5
"""The same for prompts, sequences and token ids, of which some are worse than others in healthy runs, too."""
MIN_EXCESS = 0.1
"""Lower limit of a region's excess, as a share of the whole mismatch."""
MIN_SCORE = 6.0
"""Number of standard errors, over sequences, that the logarithm of the lift must exceed."""
MIN_DOUBTFUL_LIFT = 1.35
"""Lift that healthy runs don't exceed: in clean runs of the lab, tokens after tool calls have up to 1.32."""
MAX_EXPOSURE = 0.85
"""Largest share of the exposure in a region; a larger one is the rule, not a region."""
SHRINKAGE = 0.02
"""Weight of the mean rate, as a share of all exposure, in the rate of a level."""
SMALL_LEVEL = 0.002
"""Exposure, as a share of all, below which a level's rate is shrunk to the mean before levels are chosen."""
MAX_PROBABILITY_FACTOR = 2.0
"""Largest factor by which the usual rate of a bin of probability differs from the median rate of the bins."""


@dataclass(frozen=True)
class Region:
    """A part of the data that holds more mismatch than its exposure."""

    factors: tuple[Factor, ...]  # the factor, or the two that are crossed
    description: str  # phrase for its tokens
    is_member: Array  # bool [M], its tokens in the searched table
    sequences: float  # share of the sequences that have such tokens
    exposure: float  # share of the exposure, q
    lift: float  # rate inside relative to the rate outside
    excess: float  # share of the mismatch beyond the rate outside
    score: float  # standard errors by which the logarithm of the lift exceeds 0
    information: float  # I, in nats
    values: Sequence[Any] = ()  # values of the levels of the first factor

    @property
    def id(self) -> str:
        """Identifier of its factors."""
        return " x ".join(factor.id for factor in self.factors)

    @property
    def stands_out(self) -> bool:
        """True if the region is surely worse than the rest, by enough."""
        lift = MIN_LIFT_OF_UNITS if self.id in ("group", "prompt", "sequence", "token_id") else MIN_LIFT
        return self.lift > lift and self.excess > MIN_EXCESS and self.score > MIN_SCORE

    @property
    def is_doubtful(self) -> bool:
        """True if the region is surely worse than the rest, by more than healthy runs show."""
        return self.lift > MIN_DOUBTFUL_LIFT and self.score > MIN_SCORE and self.id != "sequence"

    def contains(self, table: TokenTable) -> Array | None:
        """Return bool [M], the region's tokens in any table of the run; None for sequences, which can't be told."""
        factor = self.factors[0]
        return None if factor.id == "sequence" or len(self.factors) > 1 else factor.contains(table, self.values)


@dataclass
class SearchedTokens:
    """Tokens to search, with their mismatch A and exposure E, both times the sampling weight.

    Attributes:
        mismatch, exposure: [M].
    """

    table: TokenTable  # the tokens
    mismatch: Array
    exposure: Array
    half: Array  # int [S], the half of each sequence: 0 to choose levels, 1 to measure
    before: SearchedTokens | None = None  # earlier tokens with the same sums, if there are any
    levels: dict[str, Levels | None] = field(default_factory=dict)

    def divide(self, factor: Factor) -> Levels | None:
        """Divide the tokens by a factor, once."""
        if factor.id not in self.levels:
            self.levels[factor.id] = factor.divide(self.table)
        return self.levels[factor.id]

    def halves(self, factor: Factor) -> Array:
        """Return [M], the half of each token: that of its sequence, or for the factor of sequences one of its own."""
        if factor.id != "sequence":
            half: Array = self.half[self.table.sequence]
            return half
        with np.errstate(over="ignore"):
            bits = mix_bits(
                self.table.position.astype(np.uint64) + self.table.sequence.astype(np.uint64) * np.uint64(2**32)
            )
        return (bits & np.uint64(1)).astype(int)

    def select(self, is_kept: Array) -> SearchedTokens:
        """Return some of the tokens, to be compared among themselves alone."""
        return SearchedTokens(self.table.select(is_kept), self.mismatch[is_kept], self.exposure[is_kept], self.half)


def usual_rates(table: TokenTable) -> Array:
    """Return the usual rate A/(1 − p) of each bin of probability, within a factor of the median rate of the bins."""
    bins = np.digitize(table.surprise, SURPRISE_EDGES)
    count = len(SURPRISE_EDGES) + 1
    size = np.bincount(bins, table.weight * table.capped_abs, minlength=count)
    base = np.bincount(bins, table.weight * table.one_minus_p, minlength=count)
    tokens = np.bincount(bins, minlength=count)
    rates = size / np.maximum(base, 1e-12)
    is_used = (tokens >= 100) & (rates > 0)
    if not is_used.any():
        return np.ones(count)
    middle = float(np.median(rates[is_used]))
    bounded: Array = np.clip(
        np.where(is_used, rates, middle), middle / MAX_PROBABILITY_FACTOR, middle * MAX_PROBABILITY_FACTOR
    )
    return bounded


@dataclass(frozen=True)
class Baseline:
    """Usual rates: that of each bin of probability, and factors for the tokens of some regions."""

    rates: Array
    regions: tuple[tuple[Region, float], ...]


def expose(table: TokenTable, baseline: Baseline, before: SearchedTokens | None = None) -> SearchedTokens:
    """Return the tokens with their exposure, and the half of each sequence."""
    bins = np.digitize(table.surprise, SURPRISE_EDGES)
    weight = table.weight.astype(float)
    exposure = weight * table.one_minus_p * baseline.rates[bins]
    for region, rate in baseline.regions:
        flags = region.contains(table)
        assert flags is not None  # only such regions are kept
        exposure = np.where(flags, exposure * rate, exposure)
    with np.errstate(over="ignore"):  # integer overflow is part of the hash
        owner = table.sequences.row.astype(np.uint64) * np.uint64(2**20) + table.step.astype(np.uint64)
    half = (mix_bits(owner) & np.uint64(1)).astype(int)
    return SearchedTokens(table, weight * table.capped_abs, exposure, half, before)


def find_region(search: SearchedTokens, factor: Factor) -> Region | None:
    """Return the levels of a factor with the most information; None if no choice of levels holds any."""
    levels = search.divide(factor)
    if levels is None:
        return None
    count = len(levels.values)
    is_known = levels.of_token >= 0
    is_used = is_known & (search.halves(factor) == 0)

    def sum_levels(values: Array) -> Array:
        sums: Array = np.bincount(levels.of_token[is_used], values[is_used], minlength=count)
        return sums

    scale = _earlier_level_rates(search, factor, levels)
    bases = [sum_levels(search.exposure) * (1.0 if scale is None else scale)]
    if factor.id == "probability":  # it must stand out among all tokens, too
        bases.append(sum_levels(search.table.weight))
    chosen = _choose_levels(sum_levels(search.mismatch), bases, factor)
    if chosen is None:
        return None
    is_chosen = np.zeros(count + 1, bool)
    is_chosen[chosen] = True
    is_member = is_chosen[levels.of_token] & is_known
    scaled = search
    if scale is not None:
        per_token = np.where(is_known, scale[levels.of_token], 1.0)
        scaled = replace(search, exposure=search.exposure * per_token)
    values = [levels.values[index] for index in chosen]
    return measure_region(scaled, is_member, (factor,), factor.describe(values, count), values)


def _earlier_level_rates(search: SearchedTokens, factor: Factor, levels: Levels) -> Array | None:
    """Return the earlier rate of each level, relative to the mean, shrunk to 1; None if the levels are new."""
    before = search.before
    if before is None or factor.id in ("step", "sequence"):
        return None
    earlier = before.divide(factor)
    if earlier is None:
        return None
    is_known, count = earlier.of_token >= 0, len(earlier.values)
    size, base = (
        np.bincount(earlier.of_token[is_known], values[is_known], minlength=count)
        for values in (before.mismatch, before.exposure)
    )
    mean = float(size.sum()) / max(float(base.sum()), 1e-30)
    prior = SHRINKAGE * float(base.sum())
    relative = (size + prior * mean) / (base + prior) / max(mean, 1e-30)
    by_value = {repr(value): rate for value, rate in zip(earlier.values, relative.tolist(), strict=True)}
    return np.array([by_value.get(repr(value), 1.0) for value in levels.values])


def _choose_levels(size: Array, bases: Sequence[Array], factor: Factor) -> list[int] | None:
    """Return the levels that hold the most information: a range of bins, else those with the highest rates.

    ``size`` is the mismatch of each level; of several exposures, that counts which makes a choice least informative.
    """
    total, exposure = float(size.sum()), bases[0]
    if total <= 0 or exposure.sum() <= 0:
        return None
    if factor.edges is not None:
        first, last = np.triu_indices(len(size))

        def shares(values: Array) -> Array:
            cumulated = np.concatenate([[0.0], np.cumsum(values)]) / values.sum()
            part: Array = cumulated[last + 1] - cumulated[first]
            return part
    else:
        prior = 0.0 if factor.id == "sequence" else SMALL_LEVEL * float(exposure.sum())
        rates = (size + prior * total / exposure.sum()) / np.maximum(exposure + prior, 1e-30)
        order = np.argsort(-rates, kind="stable")

        def shares(values: Array) -> Array:
            part: Array = np.cumsum(values[order]) / values.sum()
            return part

    x = shares(size)
    information = np.min(
        [np.where((x > q) & (q < MAX_EXPOSURE), divergence(x, q), 0.0) for q in map(shares, bases)], axis=0
    )
    best = int(np.argmax(information))
    if information[best] <= 0:
        return None
    if factor.edges is not None:
        return list(range(int(first[best]), int(last[best]) + 1))
    return sorted(order[: best + 1].tolist())


def divergence(x: Array, q: Array) -> Array:
    """Return the information I of regions, in nats, from their shares of the mismatch and of the exposure."""
    x, q = np.clip(x, 1e-12, 1 - 1e-12), np.clip(q, 1e-12, 1 - 1e-12)
    information: Array = x * np.log(x / q) + (1 - x) * np.log((1 - x) / (1 - q))
    return information


def measure_region(
    search: SearchedTokens, is_member: Array, factors: tuple[Factor, ...], description: str, values: Sequence[Any]
) -> Region | None:
    """Measure a region on the half of the sequences that did not choose it; None if it or the rest is empty."""
    table = search.table
    used = search.halves(factors[0]) == 1
    owner, inside = table.sequence[used], is_member[used]
    count = len(table.step)
    size, exposure = search.mismatch[used], search.exposure[used]
    total, total_exposure = float(size.sum()), float(exposure.sum())
    part, part_exposure = float(size[inside].sum()), float(exposure[inside].sum())
    if total <= 0 or part <= 0 or part_exposure <= 0 or part_exposure >= total_exposure:
        return None
    rate = part / part_exposure
    rest_rate = max((total - part) / (total_exposure - part_exposure), 1e-12 * rate)
    error = 0.0
    for chosen, level_rate, level_sum in ((inside, rate, part), (~inside, rest_rate, total - part)):
        residual = np.bincount(owner[chosen], size[chosen] - level_rate * exposure[chosen], minlength=count)
        error += float(np.square(residual).sum()) / max(level_sum, 1e-12 * total) ** 2
    x, q = part / total, part_exposure / total_exposure
    has_tokens, has_members = (
        int(np.count_nonzero(np.bincount(owners, minlength=count)))
        for owners in (table.sequence, table.sequence[is_member])
    )
    return Region(
        factors=factors,
        description=description,
        is_member=is_member,
        sequences=has_members / max(has_tokens, 1),
        exposure=q,
        lift=rate / rest_rate,
        excess=(part - part_exposure * rest_rate) / total,
        score=math.log(rate / rest_rate) / math.sqrt(error + 1e-12),
        information=float(divergence(np.array(x), np.array(q))),
        values=values,
    )
