"""Selection at the speed of memory.

A position that does not train may hold NaN, and NaN · 0 is NaN, so masking must select. On a CPU ``torch.where`` takes
ten times as long as an addition, since torch does not vectorise it, and a comparison four times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_finite", "select", "where_finite"]


def select(flags: Tensor, x: Tensor, above: float = 0.0) -> Tensor:
    """``torch.where(flags > above, x, 0)``: +0 elsewhere, and so is the gradient, whatever x or the incoming gradient
    hold there.

    Args:
        flags: float32, without NaN.
        x: floating point; the two broadcast.
        above: what a flag exceeds.
    """
    # What relu's backward pass does with a gradient: one vectorised step, whose own backward pass is the same.
    selected: Tensor = torch.ops.aten.threshold_backward.default(x, flags, above)
    return selected


def where_finite(flags: Tensor, x: Tensor) -> Tensor:
    """``flags`` where x is finite, else 0.

    Args:
        flags: float32, finite.
        x: floating point, of ``flags``' shape.
    """
    if torch.compiler.is_compiling():
        # A test for NaN is not vectorised, and a product with 0 is taken to be 0 whatever the other factor.
        return torch.where(x.float().abs() <= torch.finfo(torch.float32).max, flags, 0.0)
    # Only a finite number times 0 is 0.
    return torch.add(flags, x, alpha=0).nan_to_num_(nan=0.0)


def count_finite(flags: Tensor, x: Tensor) -> Tensor:
    """Sum of :func:`where_finite`, 0-d."""
    if torch.compiler.is_compiling():
        return where_finite(flags, x).sum()
    return torch.add(flags, x, alpha=0).nansum()
