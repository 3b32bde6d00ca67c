"""The weight against the mismatch: level, truncation and what is reported of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.statistics import SequenceStatistics
from nemo_geomask.metrics import MetricSums

__all__ = ["Correction", "correct"]


@dataclass(frozen=True)
class Correction:
    """Importance-sampling weights of one microbatch.

    Attributes:
        weight: applied weight, broadcastable to the token layout, without gradient.
        by_sequence: whether there is one weight a sequence.
        raw: before truncation; token layout or [S].
        truncated: after truncation; token layout or [S].
        saturated: 0-d count of weights whose exponential overflowed.
        side: None without truncation; else on which side of the bounds, -1, 0 or +1: token layout, or [S] for
            ``seq-mask-tis``.
        side_by_sequence: whether that is [S].
    """

    weight: Tensor
    by_sequence: bool
    raw: Tensor
    truncated: Tensor
    saturated: Tensor
    side: Tensor | None
    side_by_sequence: bool

    def report(self, metrics: MetricSums) -> None:
        """Add the weight's metrics."""
        add = metrics.sequences if self.by_sequence else metrics.tokens
        add("geomask/weight_mean", self.truncated)
        # The square of a saturated weight fits float32, the sum of many doesn't.
        add("geomask/weight_sq", self.truncated.square(), accumulate=torch.float64)
        metrics.alias("sampling_importance_ratio", of="geomask/weight_mean")
        if self.raw is self.truncated:
            metrics.alias("geomask/weight_raw_mean", of="geomask/weight_mean")
            metrics.alias("geomask/weight_raw_sq", of="geomask/weight_sq")
        else:
            add("geomask/weight_raw_mean", self.raw)
            add("geomask/weight_raw_sq", self.raw.square(), accumulate=torch.float64)
        (metrics.scalar if self.by_sequence else metrics.part)("geomask/saturated_weight", self.saturated)
        if self.side is not None:
            (metrics.sequences if self.side_by_sequence else metrics.tokens)("is_oob_ratio", self.side.abs())


def correct(batch: TokenBatch, statistics: SequenceStatistics, config: LossConfig) -> Correction:
    r"""Weights :math:`w = \mathrm{truncate}(e^{\Delta})` at the configured level.

    ================= ============================================
    level             Δ
    ================= ============================================
    ``token``         prev_t − gen_t
    ``sequence``      Σ_t m_t (prev_t − gen_t)
    ``sequence_mean`` the same divided by Σ_t m_t
    ================= ============================================

    Source: NeMo-RL ``ClippedPGLossFn`` and PR 2269.
    """
    level = config.correction_level
    by_sequence = level != "token"
    log_ratio = statistics.pooled("mismatch.ratio", level) if by_sequence else batch.mismatch
    raw = F.saturating_exp(log_ratio)
    saturated = F.overflow_count(log_ratio)
    spread = batch.segments.spread if by_sequence else _as_is
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    truncated, side = raw, None
    if config.truncation == "seq-mask-tis":
        side = F.ratio_side(statistics.pooled("mismatch.ratio", "sequence_mean"), min=low, max=high)
        side = side * ~statistics.empty
        truncated = raw * (1 - batch.segments.spread(side.abs()))
    elif config.truncation is not None:
        truncate = F.clamp_weight if config.truncation == "tis" else F.filter_weight
        truncated, side = truncate(raw, log_ratio, min=low, max=high)
        side = spread(side)
    applied = spread(truncated) if config.use_importance_sampling_correction else torch.ones_like(batch.prev)
    return Correction(applied, by_sequence, raw, truncated, saturated, side, config.truncation == "seq-mask-tis")


def _as_is(value: Tensor) -> Tensor:
    return value
