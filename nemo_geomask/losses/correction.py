"""The weight against the mismatch: level, truncation and what is reported of both."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.kernels.select import select
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.observe import Observed
from nemo_geomask.metrics import Metric, Over

__all__ = ["correct", "saturated"]


def saturated(log_ratio: Tensor, where: Tensor) -> Tensor:
    """How often :func:`~nemo_geomask.functional.saturating_exp` saturates where ``where`` is 1 and not 0, 0-d."""
    return select(log_ratio, where, above=F.LOG_RATIO_LIMIT).sum()


def correct(batch: TokenBatch, seen: Observed, config: LossConfig) -> tuple[Tensor | None, list[Metric]]:
    r"""Weights :math:`w = \mathrm{truncate}(e^{\Delta})` at the configured level, and their metrics.

    ================= ============================================
    level             Δ
    ================= ============================================
    ``token``         prev_t − gen_t
    ``sequence``      Σ_t m_t (prev_t − gen_t)
    ``sequence_mean`` the same divided by Σ_t m_t
    a plugin's        its function of token, sum and count
    ================= ============================================

    Returns: the weight, broadcastable to the token layout, without gradient; None where none is applied. Nothing is
    reported of it where π_old is not known.
    Source: NeMo-RL ``ClippedPGLossFn`` and PR 2269.
    """
    if not config.knows_prev:
        return None, []
    level, spread = config.correction_level, batch.segments.spread
    if config.own_level is not None:
        of_sequence = (spread(seen.sums["mismatch.ratio"]), spread(seen.tokens))
        log_ratio = config.own_level.log_weight(batch.mismatch, *of_sequence)
        level, log_ratio = "token", torch.where(seen.trains != 0, log_ratio, 0.0).detach()
    elif level == "token":
        log_ratio = batch.mismatch
    elif level == "sequence":
        # NeMo-RL's exponent carries the sample mask, which may be fractional.
        log_ratio = seen.sums["mismatch.ratio"] * seen.sample_mask
    else:
        log_ratio = seen.mean("mismatch.ratio")
    by_token = level == "token"
    over: Over = "tokens" if by_token else "sequences"
    bounds = {"min": config.truncated_importance_sampling_ratio_min, "max": config.truncated_importance_sampling_ratio}
    raw = F.saturating_exp(log_ratio)
    weight, reports = raw, []
    if config.truncation == "seq-mask-tis":
        removed = F.filter_weight(seen.mean("mismatch.ratio"), **bounds).outside & ~seen.empty
        weight = torch.where(spread(removed), 0.0, raw)
        reports.append(Metric(("is_oob_ratio",), "sequences", lambda: removed.float()))
    elif config.truncation is not None:
        truncate = F.clamp_weight if config.truncation == "tis" else F.filter_weight
        if config.own_truncation is not None:
            truncate = config.own_truncation.of
        weight, outside = truncate(log_ratio, **bounds)
        of_tokens = outside if by_token else spread(outside)
        reports.append(Metric(("is_oob_ratio",), "tokens", lambda: of_tokens.float()))

    def moments(of: Tensor, mean: tuple[str, ...], square: tuple[str, ...]) -> list[Metric]:
        # The square of a saturated weight fits float32, the sum of many doesn't.
        return [Metric(mean, over, lambda: of), Metric(square, over, lambda: (of * 2**-8).square(), unit=2.0**16)]

    mean, square = ("sampling_importance_ratio", "geomask/weight_mean"), ("geomask/weight_sq",)
    raw_mean, raw_square = ("geomask/weight_raw_mean",), ("geomask/weight_raw_sq",)
    if weight is raw:
        reports += moments(weight, mean + raw_mean, square + raw_square)
    else:
        reports += [*moments(weight, mean, square), *moments(raw, raw_mean, raw_square)]
    live, name = ("geomask/weight_live",), ("geomask/saturated_weight",)
    if by_token:
        reports.append(Metric(live, "summed", lambda: seen.trained))
        reports.append(Metric(name, "part", lambda: saturated(log_ratio, seen.trains)))
    else:
        reports.append(Metric(live, over, lambda: torch.ones_like(weight)))
        reports.append(Metric(name, "count", lambda: saturated(log_ratio, (~seen.empty).float())))
    if not config.applies_weight:
        return None, reports
    return weight if by_token else spread(weight), reports
