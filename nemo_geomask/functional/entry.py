"""Argument checks shared by the public functions of :mod:`nemo_geomask.functional`."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError

__all__ = ["check_choice", "check_dense", "check_layout"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dense(name: str, value: Tensor) -> None:
    """Raise ShapeError unless a value is a dense tensor, complete on this rank, of a dtype that torch computes with.

    Args:
        name: the tensor's name in the message.
        value: refused if it is no tensor, a ``DTensor``, sparse, nested, quantized, or of a float8 or float4 dtype.
    """
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor, but it is {_describe_type(value)}")
    if hasattr(value, "full_tensor"):
        actual, remedy = "a DTensor", "pass value.full_tensor(), or this rank's shard value.to_local()"
    elif value.is_nested:
        actual, remedy = "a nested tensor", "pad it, or pack its rows and give their cu_seqlens"
    elif value.layout is not torch.strided:
        actual, remedy = f"a sparse tensor ({value.layout})", "pass value.to_dense()"
    elif value.is_quantized or (value.is_floating_point() and value.dtype not in _FLOATS):
        actual, remedy = f"of {value.dtype}", "convert it to bfloat16 or float32, with its scales"
    else:
        return
    raise ShapeError(f"{name} must be a dense tensor, but it is {actual}; {remedy}")


def check_layout(**tensors: Tensor | None) -> None:
    """Raise unless the tensors share one layout: the same number of dimensions, with sizes that are equal or 1.

    Without this check, [B] times [B, 1] would silently broadcast to [B, B].

    Args:
        tensors: float32 or float64, each passed under the name that the error message uses; None is skipped.

    Raises: ShapeError: a tensor has another dtype (the caller converts half precision first), or the shapes don't fit.
    """
    first, shape = "", torch.Size()
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise ShapeError(f"{name} must be a float32 or float64 tensor, but it is {_describe_type(value)}")
        if value.dtype not in (torch.float32, torch.float64):
            raise ShapeError(f"{name} must be float32 or float64, but it is {value.dtype}; convert it by .float()")
        if not first:
            first, shape = name, value.shape
        elif len(value.shape) != len(shape) or any(
            size != first_size and 1 not in (size, first_size)
            for size, first_size in zip(value.shape, shape, strict=True)
        ):
            raise ShapeError(
                f"{name} must have as many dimensions as {first} {list(shape)}, each of the same size or 1, but it is "
                f"{list(value.shape)}"
            )


def _describe_type(value: object) -> str:
    name = type(value).__name__
    if type(value).__module__ == "numpy":
        return f"a NumPy {name}; convert it by torch.as_tensor"
    return f"a {name}; convert it by torch.tensor" if isinstance(value, float | int) else f"a {name}"


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``choices``; ``name`` is the argument's name in the message."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, but it is {value!r}")
