"""Search for the regions that hold the excess mismatch: parts of the data with more than their share.

Of several regions, the one is named that explains the others: once the exposure is scaled by its own rates, they hold
little information, and it holds information if scaled by theirs. Then the search goes on among the remaining tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.locate.factors import FACTORS, FACTORS_BY_ID, Factor
from nemo_geomask.tools.diagnose.locate.region import (
    MIN_EXCESS,
    MIN_LIFT,
    MIN_SCORE,
    Baseline,
    Region,
    SearchedTokens,
    divergence,
    expose,
    find_region,
    measure_region,
    usual_rates,
)
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable
from nemo_geomask.tools.diagnose.read.record_reader import Array

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

    def outside(self, count: int, is_ignored: Callable[[Region], bool] = lambda region: False) -> Array:
        """Return bool [M], the tokens in none of the regions, but for those that are ignored."""
        flags = np.ones(count, bool)
        for region in self.regions:
            if not is_ignored(region):
                flags &= ~region.is_member
        return flags


def _find_baseline(before: TokenTable) -> Baseline:
    """Return what is usual in earlier tokens: where these have more mismatch, more is expected later, too."""
    regions: list[tuple[Region, float]] = []
    baseline = Baseline(usual_rates(before), ())
    for region in locate(before).regions:
        flags = region.contains(before) if region.factors[0].id not in ("step", "prompt") else None
        if flags is not None and flags.any():
            inside, outside = _rates(expose(before, baseline), flags)
            regions.append((region, inside / max(outside, 1e-30)))
            baseline = Baseline(baseline.rates, tuple(regions))
    return baseline


def locate(table: TokenTable, before: TokenTable | None = None, factors: Sequence[Factor] = FACTORS) -> Location:
    """Return the regions that hold the excess mismatch, the most informative first; at most ``MAX_REGIONS``.

    Some prompts or sequences, which may be chosen at will, also fit two faults at once. If regions of other factors
    hold as much together, these are returned.

    Args:
        table: the tokens to search.
        before: earlier tokens, or those of another run, whose rates are the expected ones; None if there are none.
        factors: the factors whose regions are sought.
    """
    if before is not None and not (len(before) and before.capped_abs.any()):
        before = None
    baseline = Baseline(usual_rates(table), ()) if before is None else _find_baseline(before)
    earlier = None if before is None else expose(before, baseline)
    search = expose(table, baseline, earlier)
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
            rest = expose(part, Baseline(usual_rates(part), ()) if earlier is None else baseline, earlier)
        if len(rest.table) < MIN_TOKENS or not rest.mismatch.any():
            break
        if np.count_nonzero(np.bincount(rest.table.sequence)) < MIN_SEQUENCES:
            tested = tested or {factor.id: 1.0 for factor in factors if rest.divide(factor) is not None}
            break
        by_factor = {factor.id: find_region(rest, factor) for factor in factors if rest.divide(factor) is not None}
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
        if not regions and winner.id in FREE_CHOICE:
            others = locate(table, before, [factor for factor in factors if factor.id not in FREE_CHOICE])
            if sum(region.excess for region in others.regions) > MIN_CROSSING_KEPT * winner.excess:
                return replace(others, tested=tested, standing_out=standing_out, doubtful=doubtful)
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
    search = expose(table, Baseline(usual_rates(table), ()))
    return measure_region(search, is_member, (factor,), factor.describe(values, len(values)), values)


def _unite(search: SearchedTokens, first: Region, second: Region) -> Region:
    """Return two regions of the same factor as one."""
    factor, is_member = first.factors[0], first.is_member | second.is_member
    levels = search.divide(factor)
    assert levels is not None  # both regions are of its levels
    chosen = np.unique(levels.of_token[is_member & (levels.of_token >= 0)]).tolist()
    if factor.edges is not None:
        chosen = list(range(chosen[0], chosen[-1] + 1))
    values = [levels.values[index] for index in chosen]
    united = measure_region(search, is_member, (factor,), factor.describe(values, len(levels.values)), values)
    return first if united is None else replace(united, excess=first.excess + second.excess)


def _detectable_share(search: SearchedTokens, factor: Factor, region: Region | None) -> float:
    """Return the smallest share of the mismatch that a region of a factor must hold to stand out.

    At a lift L, a region with the share q of the exposure holds e = q (L − 1) / (1 + q (L − 1)) in excess. It stands
    out if L > ``MIN_LIFT``, log L > ``MIN_SCORE`` standard errors and e > ``MIN_EXCESS``.
    """
    if region is None:
        return MIN_EXCESS
    error = abs(math.log(max(region.lift, 1e-12)) / region.score) if region.score else 1.0
    growth = region.exposure * math.expm1(min(max(math.log(MIN_LIFT), MIN_SCORE * error), 40.0))
    return max(growth / (1 + growth), MIN_EXCESS)


def _is_real(search: SearchedTokens, region: Region) -> bool:
    """Return True unless a region of probabilities stands out only in units of 1 − p, and not among all tokens."""
    if all(factor.id != "probability" for factor in region.factors):
        return True
    counted = replace(search, exposure=search.table.weight.astype(float))
    other = measure_region(counted, region.is_member, region.factors, region.description, region.values)
    return other is not None and other.stands_out


def _rank(search: SearchedTokens, region: Region, candidates: Sequence[Region]) -> tuple[int, float]:
    """Return the number of candidates that beat a region, negated, and its information, which breaks ties."""
    order = {factor.id: index for index, factor in enumerate(FACTORS)}
    beaten = 0
    for other in candidates:
        if other is region:
            continue
        explains, is_explained = _explains(search, region, other), _explains(search, other, region)
        if explains and is_explained:
            mine, theirs = (FREE_CHOICE.get(each.id, 1.0) * each.information for each in (region, other))
            if abs(math.log(mine / theirs)) > math.log(MIN_PREFERENCE):
                beaten += mine < theirs
            else:
                beaten += order[region.id] > order[other.id]
        elif is_explained or (not explains and other.excess > region.excess):
            beaten += 1
    return -beaten, region.information


def _rates(search: SearchedTokens, is_member: Array) -> tuple[float, float]:
    inside, inside_exposure = float(search.mismatch[is_member].sum()), float(search.exposure[is_member].sum())
    outside, outside_exposure = float(search.mismatch.sum()) - inside, float(search.exposure.sum()) - inside_exposure
    return inside / max(inside_exposure, 1e-30), outside / max(outside_exposure, 1e-30)


def _explains(search: SearchedTokens, region: Region, other: Region) -> bool:
    """Return True if little of another region's information is left once the exposure has a region's rates."""
    inside, outside = _rates(search, region.is_member)
    scaled = search.exposure * np.where(region.is_member, inside, max(outside, 1e-30))
    x, q = (float(values[other.is_member].sum() / values.sum()) for values in (search.mismatch, scaled))
    base_q = float(search.exposure[other.is_member].sum() / search.exposure.sum())
    lift = x / max(1 - x, 1e-12) * (1 - q) / max(q, 1e-12)
    remaining, base = divergence(np.array([x, x]), np.array([q, base_q])).tolist()
    return x <= q or lift < MIN_LEFT_LIFT or remaining < MAX_LEFT_INFORMATION * base


def _cross(search: SearchedTokens, winner: Region, candidates: Sequence[Region]) -> Region:
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
            part = find_region(inside, factor)
            if part is None or not part.stands_out:
                continue
            is_member = np.zeros(len(search.table), bool)
            is_member[np.flatnonzero(first.is_member)] = part.is_member
            description = f"{first.description}, there {part.description}"
            crossing = measure_region(search, is_member, (first.factors[0], factor), description, first.values)
            if crossing is None or not crossing.stands_out or not _is_real(search, crossing):
                continue
            if crossing.information > max(needed, best.information) and crossing.excess > kept:
                best = crossing
    return best
