"""What every public function here asks of its arguments."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError

__all__ = ["check_choice", "check_layout"]


def check_layout(**tensors: Tensor | None) -> None:
    """Raise unless the tensors share one layout: one rank, and sizes that are equal or 1.

    Broadcasting over a missing dimension is how [B] times [B, 1] becomes [B, B] without a word.

    Args:
        tensors: by the name to use in the error, float32 or float64; None is left out.

    Raises: ShapeError: another dtype (half precision is for the caller to raise first), or shapes that don't fit.
    """
    first, shape = "", torch.Size()
    for name, value in tensors.items():
        if value is None:
            continue
        if value.dtype not in (torch.float32, torch.float64):
            raise ShapeError(f"{name} must be float32 or float64, but it is {value.dtype}; convert it by .float()")
        if not first:
            first, shape = name, value.shape
        elif len(value.shape) != len(shape) or any(
            mine != other and mine != 1 and other != 1 for mine, other in zip(value.shape, shape, strict=True)
        ):
            raise ShapeError(
                f"{name} must have the rank of {first}, {list(shape)}, and sizes equal to its or 1, but it is "
                f"{list(value.shape)}"
            )


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, but it is {value!r}")
