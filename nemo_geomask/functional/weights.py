"""Importance-sampling weights against the mismatch between the training and the generation engine.

The weight of a token or sequence is ``w = exp(Δ)`` with the mismatch log-ratio ``Δ = prev - gen`` pooled at the
chosen level. It multiplies the surrogate and carries no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.functional.ratios import log_bound, outside, saturating_exp

__all__ = ["Weight", "clamp_weight", "filter_weight"]


class Weight(NamedTuple):
    """A weight after truncation, and where the bounds took effect."""

    value: Tensor
    outside: Tensor
    """bool, True where the log-ratio lies outside the bounds."""


def clamp_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""Truncated importance sampling (TIS): :math:`\min(\max(e^{x}, w_{min}), w_{max})`.

    Args:
        log_ratio: pooled mismatch log-ratio x, any shape, float32.
        min: lower bound on the weight itself; None is 0.
        max: upper bound on the weight itself; None is unbounded.

    Returns:
        The clamped weight, and where it was outside the bounds, decided on the log-ratio. A log-ratio whose
        exponential overflows gives ``max``.

    Raises:
        ShapeError: half precision or integers.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    NeMo-RL ``truncated_importance_sampling_type: tis``.
    """
    return Weight(saturating_exp(log_ratio).clamp(min or 0.0, max), _outside(log_ratio, min, max))


def filter_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""IcePop: :math:`e^{x}` inside ``[min, max]``, 0 outside.

    Args, returns and raises as for :func:`clamp_weight`.

    Source: Ring-1T report, arXiv:2510.18855 (double-sided masking, bounds 0.5 and 5); NeMo-RL
    ``truncated_importance_sampling_type: icepop``.
    """
    removed = _outside(log_ratio, min, max)
    return Weight(torch.where(removed, 0.0, saturating_exp(log_ratio)), removed)


def _outside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    below, above = outside(log_ratio, log_bound(low, default=-math.inf), log_bound(high, default=math.inf))
    return below | above
