"""Importance-sampling weights against the mismatch between the training and the generation engine.

The weight of a token or sequence is ``w = exp(Δ)`` with the mismatch log-ratio ``Δ = prev - gen`` pooled at the
chosen level. It multiplies the surrogate and carries no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.functional.ratios import bounds_exceeded, log_bound, saturating_exp

__all__ = ["TruncatedWeight", "clamp_weight", "filter_weight"]


class TruncatedWeight(NamedTuple):
    """A weight after truncation, and where the bounds took effect."""

    weight: Tensor
    below: Tensor
    above: Tensor


def clamp_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> TruncatedWeight:
    r"""Truncated importance sampling (TIS): :math:`\min(\max(e^{x}, w_{min}), w_{max})`.

    Args:
        log_ratio: pooled mismatch log-ratio x, any shape, float32.
        min: lower bound on the weight itself; None is 0.
        max: upper bound on the weight itself; None is unbounded.

    Returns:
        The clamped weight; ``below``/``above`` mark where each bound was exceeded, decided on the log-ratio.
        A log-ratio whose exponential overflows gives ``max``.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    NeMo-RL ``truncated_importance_sampling_type: tis``.
    """
    below, above = bounds_exceeded(
        log_ratio, log_bound(min, default=-float("inf")), log_bound(max, default=float("inf"))
    )
    weight = saturating_exp(log_ratio).clamp(min=min if min is not None else 0.0, max=max)
    return TruncatedWeight(weight, below, above)


def filter_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> TruncatedWeight:
    r"""IcePop: :math:`e^{x}` inside ``[min, max]``, 0 outside.

    Args and returns as for :func:`clamp_weight`.

    Source: Ring-1T report, arXiv:2510.18855 (double-sided masking, bounds 0.5 and 5); NeMo-RL
    ``truncated_importance_sampling_type: icepop``.
    """
    below, above = bounds_exceeded(
        log_ratio, log_bound(min, default=-float("inf")), log_bound(max, default=float("inf"))
    )
    weight = saturating_exp(log_ratio)
    return TruncatedWeight(torch.where(below | above, 0.0, weight), below, above)
