"""Two building blocks with gradients of their own: selection, and a value with a derivative in closed form.

A position that does not train may hold NaN, and ``NaN * 0`` is NaN, so masking must select. ``torch.where`` does, at
ten times the cost of an addition on a CPU, where it is not vectorised; AND-ing the bit pattern with all ones or all
zeros selects the same values at the speed of memory, on any device.

A surrogate with clips costs autograd a comparison and a selection a clip, forward and backward; its derivative with
respect to the log-ratio is one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["nonfinite", "select", "with_derivative"]

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _masked(x: Tensor, bits: Tensor) -> Tensor:
    return (x.view(bits.dtype) & bits).view(x.dtype)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        bits = -keep.to(_INTEGERS[x.dtype])
        ctx.save_for_backward(bits)
        return _masked(x, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        (grad,) = grads
        return _masked(grad.contiguous(), bits), None


def select(x: Tensor, keep: Tensor) -> Tensor:
    """``torch.where(keep, x, 0)`` for float32 and float64.

    Args:
        x: any shape; NaN and infinities are allowed.
        keep: bool, broadcastable to x's shape; x itself is not broadcast.

    Returns:
        x's shape and dtype; +0 where ``keep`` is False, and so is the gradient, whatever x or the incoming gradient
        hold there.
    """
    if not x.requires_grad:
        return _masked(x, -keep.to(_INTEGERS[x.dtype]))
    result: Tensor = _Select.apply(x, keep)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _WithDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        ctx.shape = x.shape
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (derivative,) = ctx.saved_tensors
        (grad,) = grads
        return (grad * derivative).sum_to_size(ctx.shape), None, None


def with_derivative(x: Tensor, *, value: Tensor, derivative: Tensor) -> Tensor:
    """``value``, whose derivative with respect to ``x`` is ``derivative``, elementwise. First order only.

    Args:
        x: where the gradient goes, broadcastable to ``value``.
        value: any shape, without gradient.
        derivative: same shape, without gradient.

    Returns:
        ``value``, on the graph of ``x``.
    """
    result: Tensor = _WithDerivative.apply(x, value, derivative)  # type: ignore[no-untyped-call]
    return result


def nonfinite(x: Tensor) -> Tensor:
    """Bool, True where x is NaN or infinite: there, and only there, ``x * 0`` is not zero."""
    return (x.detach() * 0).bool()
