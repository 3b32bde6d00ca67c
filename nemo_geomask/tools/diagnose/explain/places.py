"""Detectors of places: a part of the data that holds the excess mismatch, whatever made it so."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Detector, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.explain.noise import median_noise
from nemo_geomask.tools.diagnose.locate.factors import FACTORS_BY_ID
from nemo_geomask.tools.diagnose.locate.location import compare
from nemo_geomask.tools.diagnose.locate.region import MIN_LIFT, Region
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.read.record_reader import Array

MAX_DETECTABLE_SHARE = 0.5
"""A place is testable if it would show when it holds this share of the mismatch, or less."""
MIN_COMPARED_TOKENS = 100
"""Smallest number of fresh, and of stale, tokens that are compared, those that the sample stands for included."""
MIN_CYCLE_LEVELS = 3
"""Number of phases of a cycle from which a sawtooth can be told from two kinds of steps."""
MIN_SAWTOOTH = 0.8
"""Correlation of the mismatch with the time since the lowest phase above which a cycle is a sawtooth."""
MIN_TYPICAL_LIFT = 1.3
"""Ratio of the median noise in a region to that elsewhere below which only few of its tokens are worse."""
MIN_NAMED_EXCESS = 0.6
"""Excess from which a region is named although only few of its tokens are worse."""
MIN_NAMED_K3 = 0.9
"""Share of k3 from which it is named all the same: it holds nearly all of the tokens that differ most."""


def detect_place(*ids: str, is_early: bool = False) -> Detector:
    """Return the detector of a region of some factors; a crossing of two belongs to the first.

    Args:
        ids: ids of the factors.
        is_early: for positions, whether the region begins with the first token.
    """

    def detect(evidence: Evidence, threshold: float) -> Detection:
        location = evidence.location
        region = next((region for region in location.regions if _is_of(region, ids, is_early=is_early)), None)
        tested = [location.tested[id_] for id_ in ids if id_ in location.tested]
        if region is None:
            return _describe_absence(evidence, ids, tested)
        if evidence.is_growth(region):
            description = f"the mismatch is largest in {region.description}, the last ones"
            return Detection(region.excess, description, is_explained=True)
        few = _has_few_bad_tokens(evidence, region)
        explained, all_k3 = evidence.mismatch_in(region), evidence.mismatch_after.k3[0]
        description = (
            f"{region.lift:.1f} times the mismatch of the other tokens, in {region.sequences:.0%} of the sequences"
        )
        if few:
            description += "; few of these tokens are worse, most are as the others"
        return Detection(
            region.excess,
            description,
            region.excess > threshold
            and not (few and region.excess < MIN_NAMED_EXCESS and not explained.k3[0] > MIN_NAMED_K3 * all_k3),
            explained=explained,
            steps=_steps_of(region),
            part_value=_rate_in(region),
            detectable_share=min(tested, default=math.nan),
            place=region.description,
        )

    return detect


def _is_of(region: Region, ids: tuple[str, ...], *, is_early: bool) -> bool:
    factor = region.factors[0].id
    return factor in ids and (factor != "position" or is_early == (region.values[0][0] == 0))


def _has_few_bad_tokens(evidence: Evidence, region: Region) -> bool:
    """Return True if the typical token of a region has no more noise than the typical token elsewhere."""
    table = evidence.tokens
    inside, outside = (median_noise(table.select(flags)) for flags in (region.is_member, ~region.is_member))
    return not inside > MIN_TYPICAL_LIFT * outside


def _steps_of(region: Region) -> tuple[int, ...]:
    return tuple(int(value) for value in region.values) if region.factors[0].id == "step" else ()


def _describe_absence(evidence: Evidence, ids: tuple[str, ...], tested: list[float]) -> Detection:
    if not len(evidence.tokens):
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    if not tested:
        needs = FACTORS_BY_ID[ids[0]].needs or "tokens of several kinds"
        return Detection(math.nan, "nothing to compare", needs=needs)
    if evidence.location.regions and not evidence.location.standing_out.isdisjoint(ids):
        description = f"stands out, which {evidence.location.regions[0].description} explains"
        return Detection(0.0, description, is_explained=True, detectable_share=min(tested))
    doubtful = next((region for region in evidence.location.doubtful if region.id in ids), None)
    if doubtful is not None:
        description = f"{doubtful.description}: {doubtful.lift:.1f} times the mismatch of the other tokens"
        part_value = _rate_in(doubtful)
        return Detection(doubtful.excess, description, part_value=part_value, detectable_share=min(tested))
    share = min(tested)
    if share > MAX_DETECTABLE_SHARE:
        needs = f"more sequences: it would show from {share:.0%} of the mismatch"
        is_open = all(FACTORS_BY_ID[id_].is_of_token for id_ in ids)
        return Detection(0.0, "no part stands out", needs=needs, detectable_share=share, is_open=is_open)
    return Detection(0.0, "no part stands out", detectable_share=share)


def _rate_in(region: Region) -> Callable[[TokenTable], float] | None:
    """Return the function of some tokens that measures a region's rate relative to the others; None if it can't."""
    if region.factors[0].id in ("step", "sequence", "prompt") or len(region.factors) > 1:
        return None

    def rate(table: TokenTable) -> float:
        flags = region.contains(table)
        if flags is None or not flags.any() or flags.all():
            return math.nan
        return _rate(table, flags) / max(_rate(table, ~flags), 1e-12)

    return rate


_detect_ages = detect_place("staleness")


def detect_staleness(evidence: Evidence, threshold: float) -> Detection:
    """Look for a larger mismatch of older samples, or, without recorded ages, for the sawtooth that they make.

    An asynchronous loop has fresh samples only in its first steps. If all samples of *after* are stale, they are
    compared with the fresh ones before.
    """
    by_age = _detect_ages(evidence, threshold)
    if by_age.is_shown or evidence.against is not None:
        return by_age
    if not by_age.is_shown and (fresh := _compare_with_fresh(evidence, threshold)) is not None:
        return fresh
    if by_age.needs and evidence.period is not None and (cycle := _detect_sawtooth(evidence)) is not None:
        return cycle
    return by_age


def _compare_with_fresh(evidence: Evidence, threshold: float) -> Detection | None:
    """Compare the stale samples of *after* with the fresh ones of the whole run; None if they are not the cause."""
    table = evidence.statistics.tokens
    age = table.numbers["staleness"]
    is_fresh, is_stale = (age == 0)[table.sequence], ((age > 0) & (table.step >= evidence.first_step))[table.sequence]
    if min(float(table.weight[flags].sum()) for flags in (is_fresh, is_stale)) < MIN_COMPARED_TOKENS:
        return None
    if evidence.tokens_before is not None:
        before = evidence.tokens_before
        was_stale = (before.numbers["staleness"] > 0)[before.sequence]
        if was_stale.any() and _rate(before, was_stale) < MIN_LIFT * _rate(table, is_fresh):
            return None  # there were stale samples before the rise, without this mismatch
    chosen = is_fresh | is_stale
    region = compare(table.select(chosen), is_stale[chosen], FACTORS_BY_ID["staleness"], [(1, None)])
    if region is None or not region.stands_out:
        return None
    excess = 1 - _rate(table, is_fresh) / _rate(table, is_stale)
    columns = np.stack([table.k3 * is_stale * excess, table.capped_abs * is_stale * excess], axis=1)
    return Detection(
        region.excess,
        f"stale samples have {region.lift:.1f} times the mismatch of fresh ones",
        region.excess > threshold,
        explained=MismatchSums(*sum_with_replicates(table, columns).T),
    )


def _rate(table: TokenTable, flags: Array) -> float:
    """Return the mismatch of some tokens relative to the expected one."""
    return float((table.weight * table.capped_abs)[flags].sum() / (table.weight * table.one_minus_p)[flags].sum())


def _detect_sawtooth(evidence: Evidence) -> Detection | None:
    """Return the cycle of the mismatch if it grows within each cycle, as the age of samples does; else None."""
    period = evidence.period
    assert period is not None
    steps = [step for step in evidence.steps_after if step in period.phases]
    rates = {step: evidence.statistics.steps[step].mean("capped_abs", "one_minus_p") for step in steps}
    age = {step: (period.phases[step] - period.lowest) % period.steps for step in steps}
    if period.steps < MIN_CYCLE_LEVELS:
        return None
    by_age = np.array(
        [
            np.mean([rates[step] for step in steps if age[step] == number] or [math.nan])
            for number in range(period.steps)
        ]
    )
    if not np.isfinite(by_age).all() or np.corrcoef(np.arange(period.steps), by_age)[0, 1] < MIN_SAWTOOTH:
        return None
    lowest = [step for step in steps if age[step] == 0]
    explained = evidence.mismatch_beyond(evidence.statistics.total(lowest))
    share = float(explained.capped_abs[0]) / max(float(evidence.mismatch_after.capped_abs[0]), 1e-12)
    description = (
        f"the mismatch repeats every {period.steps} steps and grows within them {period.times:.1f} times, as the "
        "age of samples between two refits does; the records hold no weight versions"
    )
    return Detection(share, description, True, explained=explained)
