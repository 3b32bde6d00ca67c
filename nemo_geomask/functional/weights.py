"""Importance-sampling weights against the mismatch between the training and the generation engine.

The weight of a token or sequence is ``w = exp(Δ)`` with the mismatch log-ratio ``Δ = prev - gen`` pooled at the
chosen level. It multiplies the surrogate and carries no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nemo_geomask.functional.ratios import ratio_side

__all__ = ["TruncatedWeight", "clamp_weight", "filter_weight"]


class TruncatedWeight(NamedTuple):
    """A weight after truncation, and where the bounds took effect."""

    weight: Tensor
    side: Tensor
    """-1 where the lower bound was exceeded, +1 where the upper one was, else 0."""


def clamp_weight(weight: Tensor, log_ratio: Tensor, *, min: float | None, max: float | None) -> TruncatedWeight:
    r"""Truncated importance sampling (TIS): :math:`\min(\max(e^{x}, w_{min}), w_{max})`.

    Args:
        weight: e^x, saturating, any shape, float32.
        log_ratio: pooled mismatch log-ratio x, same shape.
        min: lower bound on the weight itself; None is 0.
        max: upper bound on the weight itself; None is unbounded.

    Returns:
        The clamped weight and the side of the bounds it was on, decided on the log-ratio. A log-ratio whose
        exponential overflows gives ``max``.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    NeMo-RL ``truncated_importance_sampling_type: tis``.
    """
    clamped = weight.clamp(min=min if min is not None else 0.0, max=max)
    return TruncatedWeight(clamped, ratio_side(log_ratio, min=min, max=max))


def filter_weight(weight: Tensor, log_ratio: Tensor, *, min: float | None, max: float | None) -> TruncatedWeight:
    r"""IcePop: :math:`e^{x}` inside ``[min, max]``, 0 outside.

    Args and returns as for :func:`clamp_weight`.

    Source: Ring-1T report, arXiv:2510.18855 (double-sided masking, bounds 0.5 and 5); NeMo-RL
    ``truncated_importance_sampling_type: icepop``.
    """
    side = ratio_side(log_ratio, min=min, max=max)
    # The weight saturates and so is finite: a product selects.
    return TruncatedWeight(weight * (1 - side.abs()), side)
