"""Search for the regions that hold the excess mismatch: levels of a factor, or of two, with more than their share.

A token's mismatch is A = min(|Δ|, 1) and its exposure is E = 1 − p times the usual rate of its bin of probability. For
a region with the share x of the mismatch and the share q of the exposure, the information is the Kullback-Leibler
divergence of two Bernoulli distributions, I = x ln(x/q) + (1 − x) ln((1 − x)/(1 − q)), in nats. It is largest for the
region that holds all of the excess and nothing else.

The levels of a region are chosen on one half of the sequences, and the region is measured on the other half. Of several
regions, the one is named that explains the others: once the exposure is scaled by its own rates, they hold little
information, and it holds information if scaled by theirs. Then the search goes on among the remaining tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.locate.factors import FACTORS, FACTORS_BY_ID, Factor, Levels
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
MIN_LEFT_LIFT = 1.35
"""Lift below which a region is explained by another one."""
MAX_LEFT_INFORMATION = 0.15
"""Share of its information below which a region is explained by another one."""
MIN_PREFERENCE = 1.03
"""Factor by which the information of one of two regions that explain each other must exceed the other's."""
FREE_CHOICE = {"prompt": 0.7, "sequence": 0.5}
"""Factor of the information of prompts and sequences, since any of them may be chosen to fit."""
MIN_CROSSING_GAIN = 1.15
"""Factor by which a crossing of two factors must hold more information than either."""
MIN_CROSSING_KEPT = 0.8
"""Share of the better factor's excess that the crossing must keep."""
MIN_TOKENS = 50
"""Number of tokens below which no region is sought."""
MAX_CROSSED = 4
"""Number of regions, the most informative ones, that are crossed with another factor."""
MIN_SEQUENCES = 16
"""Number of sequences below which no region is sought: its error could not be told."""
MAX_REGIONS = 3
"""Number of regions that are sought, one after the other."""
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


@dataclass(frozen=True)
class Location:
    """Location of the excess mismatch of some tokens.

    Attributes:
        regions: the regions that hold it, the most informative first; they have no token in common.
        tested: for each factor that divides the tokens, the smallest share of the mismatch that a typical region of it
            must hold to stand out.
        standing_out: ids of the factors with a region that stands out by itself, named or explained by another one.
    """

    regions: tuple[Region, ...] = ()
    tested: Mapping[str, float] = field(default_factory=dict)
    standing_out: frozenset[str] = frozenset()
    doubtful: tuple[Region, ...] = ()  # regions that are surely worse than the rest, but not by enough to be named

    def outside(self, count: int, *, ignored: str = "") -> Array:
        """Return bool [M], the tokens in none of the regions; those of the ``ignored`` factor do not count."""
        flags = np.ones(count, bool)
        for region in self.regions:
            if region.id != ignored:
                flags &= ~region.is_member
        return flags


@dataclass
class _SearchedTokens:
    """Tokens to search, with their mismatch A and exposure E, both times the sampling weight.

    Attributes:
        mismatch, exposure: [M].
    """

    table: TokenTable  # the tokens
    mismatch: Array
    exposure: Array
    half: Array  # int [S], the half of each sequence: 0 to choose levels, 1 to measure
    before: _SearchedTokens | None = None  # earlier tokens with the same sums, if there are any
    levels: dict[str, Levels | None] = field(default_factory=dict)

    def divide(self, factor: Factor) -> Levels | None:
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

    def select(self, is_kept: Array) -> _SearchedTokens:
        """Return some of the tokens, to be compared among themselves alone."""
        return _SearchedTokens(self.table.select(is_kept), self.mismatch[is_kept], self.exposure[is_kept], self.half)


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
class _Baseline:
    """Usual rates: that of each bin of probability, and factors for the tokens of some regions."""

    rates: Array
    regions: tuple[tuple[Region, float], ...]


def _find_baseline(before: TokenTable) -> _Baseline:
    """Return what is usual in earlier tokens: where these have more mismatch, more is expected later, too."""
    regions: list[tuple[Region, float]] = []
    baseline = _Baseline(usual_rates(before), ())
    for region in locate(before).regions:
        flags = region.contains(before) if region.factors[0].id not in ("step", "prompt") else None
        if flags is not None and flags.any():
            inside, outside = _rates(_prepare(before, baseline), flags)
            regions.append((region, inside / max(outside, 1e-30)))
            baseline = _Baseline(baseline.rates, tuple(regions))
    return baseline


def _prepare(table: TokenTable, baseline: _Baseline, before: _SearchedTokens | None = None) -> _SearchedTokens:
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
    return _SearchedTokens(table, weight * table.capped_abs, exposure, half, before)


def locate(table: TokenTable, before: TokenTable | None = None) -> Location:
    """Return the regions that hold the excess mismatch, the most informative first; at most ``MAX_REGIONS``.

    Args:
        table: the tokens to search.
        before: earlier tokens, or those of another run, whose rates are the expected ones; None if there are none.
    """
    if before is not None and not (len(before) and before.capped_abs.any()):
        before = None
    baseline = _Baseline(usual_rates(table), ()) if before is None else _find_baseline(before)
    earlier = None if before is None else _prepare(before, baseline)
    search = _prepare(table, baseline, earlier)
    regions: list[Region] = []
    tested: dict[str, float] = {}
    standing_out: frozenset[str] = frozenset()
    doubtful: tuple[Region, ...] = ()
    is_left = np.ones(len(table), bool)
    all_mismatch = float(search.mismatch.sum())
    for _ in range(MAX_REGIONS):
        rest = search
        if regions:
            part = table.select(is_left)
            rest = _prepare(part, _Baseline(usual_rates(part), ()) if earlier is None else baseline, earlier)
        if len(rest.table) < MIN_TOKENS or not rest.mismatch.any():
            break
        if np.count_nonzero(np.bincount(rest.table.sequence)) < MIN_SEQUENCES:
            tested = tested or {factor.id: 1.0 for factor in FACTORS if rest.divide(factor) is not None}
            break
        by_factor = {factor.id: _find_region(rest, factor) for factor in FACTORS if rest.divide(factor) is not None}
        candidates = [
            region
            for region in by_factor.values()
            if region is not None and region.stands_out and _is_real(rest, region)
        ]
        if not regions:
            tested = {id_: _detectable_share(rest, FACTORS_BY_ID[id_], region) for id_, region in by_factor.items()}
            standing_out = frozenset(region.id for region in candidates)
            doubtful = tuple(
                region
                for region in by_factor.values()
                if region is not None and region.is_doubtful and not region.stands_out
            )
        if not candidates:
            break
        winner = max(candidates, key=lambda region: _rank(rest, region, candidates))
        best = _cross(rest, winner, candidates)
        is_member = np.zeros(len(table), bool)
        is_member[np.flatnonzero(is_left)] = best.is_member
        share = float(rest.mismatch.sum()) / all_mismatch
        region = replace(best, is_member=is_member, excess=best.excess * share)
        if regions and region.excess < MIN_EXCESS:
            break
        is_left &= ~is_member
        same = next((index for index, other in enumerate(regions) if other.factors == region.factors), None)
        if same is None or len(region.factors) > 1:
            regions.append(region)
        else:
            regions[same] = _unite(search, regions[same], region)
    return Location(tuple(regions), tested, standing_out, doubtful)


def compare(table: TokenTable, is_member: Array, factor: Factor, values: Sequence[Any]) -> Region | None:
    """Return a given part of some tokens as a region, whether it stands out or not; None if it or the rest is empty."""
    search = _prepare(table, _Baseline(usual_rates(table), ()))
    return _measure(search, is_member, (factor,), factor.describe(values, len(values)), values)


def _unite(search: _SearchedTokens, first: Region, second: Region) -> Region:
    """Return two regions of the same factor as one."""
    factor, is_member = first.factors[0], first.is_member | second.is_member
    levels = search.divide(factor)
    assert levels is not None  # both regions are of its levels
    chosen = np.unique(levels.of_token[is_member & (levels.of_token >= 0)]).tolist()
    if factor.edges is not None:
        chosen = list(range(chosen[0], chosen[-1] + 1))
    values = [levels.values[index] for index in chosen]
    united = _measure(search, is_member, (factor,), factor.describe(values, len(levels.values)), values)
    return first if united is None else replace(united, excess=first.excess + second.excess)


def _detectable_share(search: _SearchedTokens, factor: Factor, region: Region | None) -> float:
    """Return the smallest share of the mismatch that a region of a factor must hold to stand out.

    At a lift L, a region with the share q of the exposure holds e = q (L − 1) / (1 + q (L − 1)) in excess. It stands
    out if L > ``MIN_LIFT``, log L > ``MIN_SCORE`` standard errors and e > ``MIN_EXCESS``.
    """
    if region is None:
        return MIN_EXCESS
    error = abs(math.log(max(region.lift, 1e-12)) / region.score) if region.score else 1.0
    growth = region.exposure * math.expm1(min(max(math.log(MIN_LIFT), MIN_SCORE * error), 40.0))
    return max(growth / (1 + growth), MIN_EXCESS)


def _is_real(search: _SearchedTokens, region: Region) -> bool:
    """Return True unless a region of probabilities stands out only in units of 1 − p, and not among all tokens."""
    if all(factor.id != "probability" for factor in region.factors):
        return True
    counted = replace(search, exposure=search.table.weight.astype(float))
    other = _measure(counted, region.is_member, region.factors, region.description, region.values)
    return other is not None and other.stands_out


def _rank(search: _SearchedTokens, region: Region, candidates: Sequence[Region]) -> tuple[int, float]:
    """Return the number of candidates that beat a region, negated, and its information, which breaks ties."""
    order = {factor.id: index for index, factor in enumerate(FACTORS)}
    beaten = 0
    for other in candidates:
        if other is region:
            continue
        explains, is_explained = _explains(search, region, other), _explains(search, other, region)
        if explains and is_explained:
            mine, theirs = (_information_with_penalty(each) for each in (region, other))
            if abs(math.log(mine / theirs)) > math.log(MIN_PREFERENCE):
                beaten += mine < theirs
            else:
                beaten += order[region.id] > order[other.id]
        elif is_explained or (not explains and other.excess > region.excess):
            beaten += 1
    return -beaten, region.information


def _information_with_penalty(region: Region) -> float:
    """Return the information of a region, less for prompts and sequences, of which any may be chosen."""
    return FREE_CHOICE.get(region.id, 1.0) * region.information


def _rates(search: _SearchedTokens, is_member: Array) -> tuple[float, float]:
    inside, inside_exposure = float(search.mismatch[is_member].sum()), float(search.exposure[is_member].sum())
    outside, outside_exposure = float(search.mismatch.sum()) - inside, float(search.exposure.sum()) - inside_exposure
    return inside / max(inside_exposure, 1e-30), outside / max(outside_exposure, 1e-30)


def _explains(search: _SearchedTokens, region: Region, other: Region) -> bool:
    """Return True if little of another region's information is left once the exposure has a region's rates."""
    inside, outside = _rates(search, region.is_member)
    scaled = search.exposure * np.where(region.is_member, inside, max(outside, 1e-30))
    x, q = (float(values[other.is_member].sum() / values.sum()) for values in (search.mismatch, scaled))
    base_q = float(search.exposure[other.is_member].sum() / search.exposure.sum())
    lift = x / max(1 - x, 1e-12) * (1 - q) / max(q, 1e-12)
    remaining, base = _information(np.array([x, x]), np.array([q, base_q])).tolist()
    return x <= q or lift < MIN_LEFT_LIFT or remaining < MAX_LEFT_INFORMATION * base


def _cross(search: _SearchedTokens, winner: Region, candidates: Sequence[Region]) -> Region:
    """Return a crossing of two factors, if that is clearly narrower than the best region and keeps its excess."""
    best, needed, kept = winner, MIN_CROSSING_GAIN * winner.information, MIN_CROSSING_KEPT * winner.excess
    if winner.id == "sequence":  # any sequences fit best; two factors say what they have in common
        needed = winner.information
    for first in sorted(candidates, key=lambda region: -region.information)[:MAX_CROSSED]:
        if not first.factors[0].is_coarse:
            continue
        inside = search.select(first.is_member)
        for factor in FACTORS:
            if factor is first.factors[0] or not factor.is_coarse:
                continue
            part = _find_region(inside, factor)
            if part is None or not part.stands_out:
                continue
            is_member = np.zeros(len(search.table), bool)
            is_member[np.flatnonzero(first.is_member)] = part.is_member
            description = f"{first.description}, there {part.description}"
            crossing = _measure(search, is_member, (first.factors[0], factor), description, first.values)
            if crossing is None or not crossing.stands_out or not _is_real(search, crossing):
                continue
            if crossing.information > max(needed, best.information) and crossing.excess > kept:
                best = crossing
    return best


def _find_region(search: _SearchedTokens, factor: Factor) -> Region | None:
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
    return _measure(scaled, is_member, (factor,), factor.describe(values, count), values)


def _earlier_level_rates(search: _SearchedTokens, factor: Factor, levels: Levels) -> Array | None:
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

    Args:
        size: the mismatch of each level.
        bases: the exposure of each level; of several, the one counts that makes a choice of levels least informative.
        factor: the factor.
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
        [np.where((x > q) & (q < MAX_EXPOSURE), _information(x, q), 0.0) for q in map(shares, bases)], axis=0
    )
    best = int(np.argmax(information))
    if information[best] <= 0:
        return None
    if factor.edges is not None:
        return list(range(int(first[best]), int(last[best]) + 1))
    return sorted(order[: best + 1].tolist())


def _information(x: Array, q: Array) -> Array:
    x, q = np.clip(x, 1e-12, 1 - 1e-12), np.clip(q, 1e-12, 1 - 1e-12)
    information: Array = x * np.log(x / q) + (1 - x) * np.log((1 - x) / (1 - q))
    return information


def _measure(
    search: _SearchedTokens, is_member: Array, factors: tuple[Factor, ...], description: str, values: Sequence[Any]
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
        information=float(_information(np.array(x), np.array(q))),
        values=values,
    )
