"""Importance-sampling weight π_old/μ against the mismatch: its level, truncation and metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.losses.batch import TokenBatch, zero_outside
from nemo_geomask.losses.sequence_stats import PooledBy, PooledStatistic, SequencePool, SequenceStats
from nemo_geomask.metrics import Metric, Reduction


class MismatchStatistics(NamedTuple):
    """Statistics of the mismatch log-ratio that the weight needs; None where its settings need none."""

    at_level: PooledStatistic | None  # as _POOLED_BY has it, or the sum for a plugin's level
    mean: PooledStatistic | None  # for truncation seq-mask-tis, whatever the level
    tokens: PooledStatistic | None = None  # number of trained tokens of the turn, for a plugin's level over turns


_POOLED_BY: dict[str, PooledBy] = {
    "turn": "turn_sum",
    "turn_mean": "turn_mean",
    "sequence": "sum",
    "sequence_mean": "mean",
}
"""How the mismatch is pooled, for each level of the weight but ``token`` and ``masks_only``."""


def request_mismatch(pool: SequencePool, batch: TokenBatch, config: LossConfig) -> MismatchStatistics:
    """Request the statistics that :func:`correct` needs."""
    if not config.knows_prev:
        return MismatchStatistics(None, None)
    level, plugin = config.correction_level, config.plugin_level
    mean = pool.request(batch.mismatch, "mean") if config.truncation == "seq-mask-tis" else None
    if level in ("token", "masks_only"):
        return MismatchStatistics(None, mean)
    if plugin is not None and plugin.over == "turn":
        tokens = pool.request(torch.ones_like(batch.mismatch), "turn_sum")
        return MismatchStatistics(pool.request(batch.mismatch, "turn_sum"), mean, tokens)
    return MismatchStatistics(pool.request(batch.mismatch, _POOLED_BY.get(level, "sum")), mean)


def correct(
    batch: TokenBatch, stats: SequenceStats, mismatch: MismatchStatistics, config: LossConfig
) -> tuple[Tensor | None, list[Metric]]:
    r"""Return the weights :math:`w = \mathrm{truncate}(e^{\Delta})` at the configured level, and their metrics.

    With the token mask m:

    ================= ============================================
    level             Δ
    ================= ============================================
    ``token``         prev_t − gen_t
    ``turn``          Σ m (prev − gen) over its turn
    ``turn_mean``     the same divided by Σ m over it
    ``sequence``      Σ_t m_t (prev_t − gen_t)
    ``sequence_mean`` the same divided by Σ_t m_t
    a plugin's        its function of token, sum and count
    ================= ============================================

    Returns: the weight without gradient, broadcastable to the token layout, or None if the settings apply none; and the
    list of metrics, which is empty if π_old is not known.
    Source: NeMo-RL ``ClippedPGLossFn`` and PR 2269.
    """
    if not config.knows_prev:
        return None, []
    spread = batch.segments.spread
    log_ratio = _weight_log_ratio(batch, stats, mismatch, config)
    by_token = config.has_token_weights
    reduction: Reduction = "tokens" if by_token else "sequences"
    bounds = {"min": config.truncated_importance_sampling_ratio_min, "max": config.truncated_importance_sampling_ratio}
    raw_weight = F.saturating_exp(log_ratio)
    weight, reports = raw_weight, []
    if config.truncation == "seq-mask-tis":
        assert mismatch.mean is not None
        is_removed = F.filter_weight(mismatch.mean.value, **bounds).outside & ~stats.is_empty
        weight = torch.where(spread(is_removed), 0.0, raw_weight)
        reports.append(Metric(("is_oob_ratio",), "sequences", is_removed.float))
    elif config.truncation is not None:
        truncate = F.clamp_weight if config.truncation == "tis" else F.filter_weight
        if config.plugin_truncation is not None:
            truncate = config.plugin_truncation.of
        weight, out_of_bounds = truncate(log_ratio, **bounds)
        # NeMo-RL averages this metric over tokens at every level.
        token_out_of_bounds = out_of_bounds if by_token else spread(out_of_bounds)
        reports.append(Metric(("is_oob_ratio",), "tokens", token_out_of_bounds.float))

    def moments(values: Tensor, mean: tuple[str, ...], square: tuple[str, ...]) -> list[Metric]:
        # The square of the largest weight fits into float32, but a sum of many such squares doesn't. Therefore the
        # squares are summed in units of 2^16.
        return [
            Metric(mean, reduction, lambda: values),
            Metric(square, reduction, lambda: (values * 2**-8).square(), unit=2.0**16),
        ]

    mean, square = ("sampling_importance_ratio", "geomask/weight_mean"), ("geomask/weight_sq",)
    raw_mean, raw_square = ("geomask/weight_raw_mean",), ("geomask/weight_raw_sq",)
    if weight is raw_weight:
        reports += moments(weight, mean + raw_mean, square + raw_square)
    else:
        reports += [*moments(weight, mean, square), *moments(raw_weight, raw_mean, raw_square)]
    live, saturated = ("geomask/weight_live",), ("geomask/saturated_weight",)
    if by_token:
        reports.append(Metric(live, "token_sum", lambda: stats.total_weight))
        reports.append(Metric(saturated, "local_sum", lambda: count_saturated(log_ratio, stats.is_trained)))
    else:
        reports.append(Metric(live, "sequences", lambda: torch.ones_like(weight)))
        reports.append(Metric(saturated, "shared_count", lambda: count_saturated(log_ratio, ~stats.is_empty)))
    if not config.applies_weight:
        return None, reports
    return weight if by_token else spread(weight), reports


def _weight_log_ratio(
    batch: TokenBatch, stats: SequenceStats, mismatch: MismatchStatistics, config: LossConfig
) -> Tensor:
    """Return Δ of :func:`correct`: token layout if ``config.has_token_weights``, else [S]."""
    if mismatch.at_level is None:
        return batch.mismatch
    pooled, spread = mismatch.at_level.value, batch.segments.spread
    if config.plugin_level is not None:
        sums = (spread(pooled), spread(stats.trained_tokens))
        if mismatch.tokens is not None:
            sums = (pooled.float(), mismatch.tokens.value.float())
        log_ratio: Tensor = config.plugin_level.log_weight(batch.mismatch, *sums)
        return zero_outside(stats.is_trained, log_ratio).detach()
    if config.has_token_weights:
        return zero_outside(stats.is_trained, pooled.float())
    # At the level sequence, NeMo-RL multiplies the exponent by the sample mask, which may be fractional.
    return pooled * stats.sample_mask if config.correction_level == "sequence" else pooled


def count_saturated(log_ratio: Tensor, is_counted: Tensor) -> Tensor:
    """Return the number of counted log-ratios above the limit of ``saturating_exp``, 0-d float32."""
    return ((log_ratio > F.LOG_RATIO_LIMIT) & is_counted).count_nonzero().float()
