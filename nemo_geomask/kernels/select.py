"""Selection at the speed of memory.

A position that does not train may hold NaN, and NaN · 0 is NaN, so masking must select. On a CPU ``torch.where`` takes
ten times as long as an addition, since torch does not vectorise it; AND-ing the bit pattern with all ones or all zeros
selects the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["count_finite", "selector", "where_finite"]


def where_finite(flags: Tensor, x: Tensor) -> Tensor:
    """``flags`` where x is finite, else 0.

    Args:
        flags: float32, finite.
        x: floating point, of ``flags``' shape.
    """
    if torch.compiler.is_compiling():
        # A test for NaN is not vectorised, and a product with 0 is taken to be 0 whatever the other factor.
        return torch.where(x.float().abs() <= torch.finfo(torch.float32).max, flags, 0.0)
    # Only a finite number times 0 is 0; a comparison takes four times as long on a CPU.
    return torch.add(flags, x, alpha=0).nan_to_num_(nan=0.0)


def count_finite(flags: Tensor, x: Tensor) -> Tensor:
    """Sum of :func:`where_finite`, 0-d."""
    if torch.compiler.is_compiling():
        return where_finite(flags, x).sum()
    return torch.add(flags, x, alpha=0).nansum()


def selector(keep: Tensor) -> Callable[[Tensor], Tensor]:
    """``x ↦ torch.where(keep != 0, x, 0)``, to be applied to several tensors.

    Args:
        keep: float32, 1 or 0.

    Returns: a function of float32 tensors of ``keep``'s shape: +0 where ``keep`` is 0, and so is the gradient, whatever
    x or the incoming gradient hold there.
    """
    if keep.device.type != "cpu" or torch.compiler.is_compiling():
        kept = keep != 0
        return lambda x: torch.where(kept, x, 0.0)
    bits = -keep.to(torch.int32)

    def select(x: Tensor) -> Tensor:
        selected: Tensor = _Select.apply(x, bits) if x.requires_grad else _masked(x, bits)  # type: ignore[no-untyped-call]
        return selected

    return select


def _masked(x: Tensor, bits: Tensor) -> Tensor:
    return (x.view(torch.int32) & bits).view(torch.float32)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return _masked(x, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return _masked(grads[0].contiguous(), bits), None
