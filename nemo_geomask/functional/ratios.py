"""Log-ratios and their exponentials.

Pooling and comparing happen on log-ratios; ``exp`` comes last and saturates instead of overflowing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_layout

__all__ = ["LOG_RATIO_LIMIT", "log_bound", "outside", "saturated", "saturating_exp"]

LOG_RATIO_LIMIT = 40.0
"""Natural logarithm of the largest ratio represented, ``exp(40) = 2.4e17``.

float32 overflows at 88.7, and what a loss multiplies must fit too: a weight, a ratio and an advantage, summed over
thousands of tokens. At 40 a finite input gives a finite loss."""


def saturating_exp(log_ratio: Tensor) -> Tensor:
    """``exp(min(x, 40))``: a ratio too large to compute with becomes the largest one allowed.

    An overflow to infinity would turn into NaN as soon as it meets a zero, and replacing it by 0 (as NeMo-RL's
    ``nan_to_num(posinf=0)`` does) would silently drop the most over-weighted sample instead of truncating it.

    Args:
        log_ratio: any shape, float32, natural logarithm. NaN stays NaN.

    Returns:
        The ratio, same shape and dtype; the gradient is 0 where saturated.

    Raises:
        ShapeError: half precision or integers.
    """
    check_layout(log_ratio=log_ratio)
    # hardtanh is a clamp whose backward pass is one vectorised step on a CPU.
    return torch.exp(torch.nn.functional.hardtanh(log_ratio, -torch.inf, LOG_RATIO_LIMIT))


def saturated(log_ratio: Tensor, where: Tensor) -> Tensor:
    """How often :func:`saturating_exp` saturates where ``where`` is 1 and not 0, 0-d."""
    beyond = log_ratio.detach() - LOG_RATIO_LIMIT
    return beyond.relu_().sign_().mul_(where).sum()


def log_bound(bound: float | None, *, default: float) -> float:
    """Natural logarithm of a bound on a ratio; 0 gives -inf and ``None`` gives ``default``."""
    if bound is None:
        return default
    return math.log(bound) if bound > 0 else -math.inf


def outside(value: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where a statistic lies below and above ``[low, high]``; both ends belong to the interval.

    Bounds on a ratio are to be given as logarithms and compared with the log-ratio: a comparison of
    exponentials loses the resolution that bounds such as ``1 + 3e-4`` need and overflows for long sequences.

    Args:
        value: any shape, float32.
        low: lower bound in the units of ``value``, rounded to its dtype; may be -inf.
        high: upper bound, likewise; may be +inf.

    Returns:
        ``(below, above)``, bool, same shape.

    Raises:
        ShapeError: half precision or integers.
    """
    check_layout(value=value)
    return value < low, value > high
