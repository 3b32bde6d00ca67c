"""Detectors of numerical noise: on all tokens (precision of the engines), or on a few (expert routing, or not known).

The noise of a token is |z| with z = Δ/(1 − p), which is about the size of the noise on its logits. Tokens are weighted
by 1 − p, because the Δ of a nearly sure token is mostly the rounding of its log-probs. Noise is looked at outside the
regions that hold the excess (``Evidence.elsewhere``): within one, the region says more.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence, MismatchSums
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable, sum_with_replicates
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.shared.terminal_text import escape_line

LARGE_NOISE_FACTORS = {8.0: 0.015, 16.0: 0.006, 32.0: 0.001, 64.0: 1e-4}
"""A token's noise is large if it exceeds the median noise by one of these factors; with the share of such tokens.

The shares, and :data:`TYPICAL_NOISE`, are those of bfloat16 decoding against float32 training, measured in the lab.
"""
TYPICAL_NOISE = 0.016
"""Typical median noise."""
_LARGE_FACTOR = min(LARGE_NOISE_FACTORS)
MIN_EXPLAINED_SHARE = 0.1
"""Share of k3, or of |Δ|, that the additional tokens with large noise must account for."""
MAX_FEW = 0.25
"""Share of the tokens with large noise above which they are not few."""
MIN_SURE_GROWTH = 1.2
"""Growth that the lower end of the interval must exceed for the tokens with large noise to have increased."""
MIN_LARGE_SHARE = 1e-4
"""Lower limit of the earlier share of tokens with large noise, when its growth is computed."""
MAX_ASYMMETRY = 0.5
"""Largest |Σ (exp(Δ) − 1)| / Σ |exp(Δ) − 1| of the tokens with large noise, for expert routing.

The mean of exp(Δ) is 1 for other experts, as for any normalised log-probs; wrong single log-probs have one sign.
"""
MAX_CONCENTRATION = 0.25
"""Excess of a region above which the tokens with large noise are not spread, as those of expert routing are."""
NO_NOISE = 1e-4
"""Median noise below which two engines agree."""
COMPARISON_NEEDED = "a step at which the mismatch rises, or another run (--against)"


def noise_of(table: TokenTable) -> Array:
    """Return [M], |Δ|/(1 − p) of each token."""
    values: Array = np.abs(table.delta.astype(float)) / table.one_minus_p
    return values


def median_noise(table: TokenTable) -> float:
    """Return the median of the noise, with tokens weighted by 1 − p; NaN without a token."""
    if not len(table):
        return math.nan
    noise, weight = noise_of(table), table.weight * table.one_minus_p
    order = np.argsort(noise, kind="stable")
    cumulated = np.cumsum(weight[order])
    return float(noise[order][min(int(np.searchsorted(cumulated, cumulated[-1] / 2)), len(noise) - 1)])


def _large_shares(table: TokenTable, limit: float) -> Array:
    """Return [1 + REPLICATES], the share of tokens whose noise exceeds a limit."""
    weight = table.one_minus_p
    large, total = sum_with_replicates(table, np.stack([weight * (noise_of(table) > limit), weight], axis=1)).T
    shares: Array = large / np.maximum(total, 1e-12)
    return shares


def _reference(evidence: Evidence) -> str:
    if evidence.tokens_before is None:
        return "of bfloat16 against float32"
    return f"of {evidence.side_names[0]}" if evidence.against is not None else "before"


def _recorded_engines(evidence: Evidence) -> str:
    """Return what the records say of the engines, to follow a description."""
    runs = {"": evidence.statistics, f"{evidence.against_name}: ": evidence.against}
    texts = [
        f"{run}{role} {' or '.join(sorted(map(escape_line, descriptions)))}"
        for run, statistics in runs.items()
        if statistics is not None
        for role, descriptions in statistics.engines.items()
    ]
    return f"; recorded: {', '.join(texts)}" if texts else ""


def _median_growth(evidence: Evidence) -> float:
    """Return the factor by which the median noise has grown since *before*, or exceeds the typical noise."""
    before = TYPICAL_NOISE if evidence.tokens_before is None else median_noise(evidence.tokens_before)
    return median_noise(evidence.elsewhere) / max(before, 1e-9)


def _needs(evidence: Evidence, *, is_beyond: bool) -> str:
    """Return what a test of the noise needs: a comparison, and a mismatch that is larger than the compared one."""
    if evidence.tokens_before is None:
        return COMPARISON_NEEDED
    return "a larger mismatch over all tokens" if is_beyond and not evidence.is_worse else ""


class _Tail(NamedTuple):
    """The tokens with more than ``factor`` times the median noise."""

    factor: float
    growth: Array  # [1 + REPLICATES], their share relative to the earlier one
    explained: MismatchSums  # mismatch of the additional ones
    flags: Array  # bool [M]


@lru_cache(maxsize=2)
def _find_tail(table: TokenTable, before: TokenTable | None) -> _Tail:
    """Return the tail of the noise beyond that multiple of its median whose additional tokens hold most of k3."""
    median, earlier_median = median_noise(table), TYPICAL_NOISE if before is None else median_noise(before)
    noise, mismatch = noise_of(table), np.stack([table.k3, table.capped_abs], axis=1)
    tails = []
    for factor, typical_share in LARGE_NOISE_FACTORS.items():
        limit = factor * max(median, 1e-9)
        shares = _large_shares(table, limit)
        if before is None:
            earlier: Array = np.full_like(shares, typical_share)
        else:
            earlier = _large_shares(before, factor * max(earlier_median, 1e-9))
        growth = shares / np.maximum(earlier, MIN_LARGE_SHARE)
        additional = np.maximum(1 - 1 / np.maximum(growth, 1e-12), 0)
        flags = noise > limit
        sums = sum_with_replicates(table, mismatch * flags[:, None])
        tails.append(_Tail(factor, growth, MismatchSums(*(additional * column for column in sums.T)), flags))
    return max(tails, key=lambda tail: float(tail.explained.k3[0]))


def detect_few_tokens(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the tokens whose noise is large in comparison with that of a typical token."""
    table, total, before = evidence.elsewhere, evidence.mismatch_after, evidence.tokens_before
    if not len(table):
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    factor, growth, explained, flags = _find_tail(table, before)
    share = max(float(part[0]) / max(float(sums[0]), 1e-12) for part, sums in zip(explained, total, strict=True))
    few = float((table.weight * flags).sum() / table.weight.sum())
    where = "" if table is evidence.tokens else " elsewhere"
    is_beyond = (
        few < MAX_FEW
        and float(growth[0]) > threshold
        and float(np.quantile(growth[1:], 0.025)) > MIN_SURE_GROWTH
        and share > MIN_EXPLAINED_SHARE
    )
    description = (
        f"{few:.2g} of the tokens{where} have more than {factor:g} times the median noise, {growth[0]:.1f} times as "
        f"many as {'usual' if before is None else _reference(evidence)}"
    )
    return Detection(
        float(growth[0]),
        description,
        evidence.is_worse and is_beyond,
        needs=_needs(evidence, is_beyond=is_beyond),
        explained=explained,
        part_value=lambda part: (
            float(max(_large_shares(part, factor * max(median_noise(part), 1e-9))[0], MIN_LARGE_SHARE))
            if len(part)
            else math.nan
        ),
    )


def detect_routing(evidence: Evidence, threshold: float) -> Detection:
    """Look for expert routing: a few tokens with large noise in a model with experts, spread, and without a sign."""
    if evidence.statistics.experts is None:
        needs = "whether the model has experts (--experts, or records of loss_fn.record)"
        return Detection(math.nan, "nothing says whether the model has experts", needs=needs)
    if not evidence.statistics.experts:
        return Detection(0.0, "the model has no experts")
    detection = detect_few_tokens(evidence, threshold)
    if not detection.is_shown:
        return detection
    table = evidence.elsewhere
    flags = noise_of(table) > _LARGE_FACTOR * max(median_noise(table), 1e-9)
    change = np.expm1(np.clip(table.delta[flags].astype(float), -3.0, 3.0)) * table.weight[flags]
    sign = float(change.sum() / max(np.abs(change).sum(), 1e-30))
    concentrated = sum(region.excess for region in evidence.location.regions)
    reason = ""
    if abs(sign) > MAX_ASYMMETRY:
        reason = f"their Δ has a sign ({sign:.2f}), which that of other experts has not"
    elif concentrated > MAX_CONCENTRATION:
        reason = f"the mismatch is concentrated in {evidence.location.regions[0].description}"
    if reason:
        return Detection(0.0, f"{detection.description}, but {reason}")
    return detection


def detect_precision(evidence: Evidence, threshold: float) -> Detection:
    """Look for an increase of the typical token's noise."""
    table, growth = evidence.elsewhere, _median_growth(evidence)
    if math.isnan(growth):
        return Detection(math.nan, "too few tokens", needs="tokens with log-probs of both engines")
    typical = noise_of(table) <= _LARGE_FACTOR * median_noise(table)
    columns = np.stack([table.k3 * typical, table.capped_abs * typical], axis=1)
    k3, capped_abs = sum_with_replicates(table, columns).T
    explained = MismatchSums(
        k3 * max(1 - 1 / max(growth, 1.0) ** 2, 0.0), capped_abs * max(1 - 1 / max(growth, 1.0), 0.0)
    )
    return Detection(
        growth,
        f"the noise of a typical token is {growth:.1f} times that {_reference(evidence)}{_recorded_engines(evidence)}",
        evidence.is_worse and growth > threshold,
        needs=_needs(evidence, is_beyond=growth > threshold),
        explained=explained,
        part_value=lambda part: 0.0 if (median := median_noise(part)) < NO_NOISE else median,
    )
