r"""Bounds that a batch sets for itself: how large a value may be, that what is kept stays within a budget.

Values are sizes, at least 0, of all tokens or sequences of the batch. What exceeds the bound goes; equal values go
together, so that the verdict depends on no order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_layout

__all__ = ["bound_by_mean", "bound_by_share"]


def bound_by_share(sizes: Tensor, share: float) -> float:
    r"""The bound that at most :math:`\lfloor share \cdot n \rfloor` of n values exceed, and no fewer but for those that
    equal the largest kept.

    Args:
        sizes: [n], float32 or float64, at least 0, without NaN.
        share: from 0 to 1.

    Returns: the bound, see :func:`bound_by_mean`.
    Raises: ShapeError: half precision or integers.
    """
    check_layout(sizes=sizes)
    # Of 100 values a share of 0.29 is 28.999999999999996.
    count = math.floor(share * sizes.numel() + 1e-9)
    if count == 0:
        return math.inf
    largest = sizes.topk(count + 1).values if count < sizes.numel() else sizes.new_full((1,), -1.0)
    return _between(sizes, sizes > largest[-1])


def bound_by_mean(sizes: Tensor, mean: float) -> float:
    r"""The largest bound under which the mean of the values kept is at most ``mean``.

    Args:
        sizes: [n], float32 or float64, at least 0, without NaN.
        mean: in the units of the values.

    Returns: the bound, as float32 holds it: midway between the largest value kept and the smallest that goes, so that
    rounding of either in another layout decides nothing; infinite where all are kept, -1 where none is.
    Raises: ShapeError: half precision or integers.
    Source: M2PO, arXiv:2510.01161, whose values are squared log-ratios.
    """
    check_layout(sizes=sizes)
    ordered = sizes.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=sizes.device)
    count = int((means <= mean).sum())
    if count == len(ordered):
        return math.inf
    return _between(sizes, sizes >= ordered[count])


def _between(sizes: Tensor, goes: Tensor) -> float:
    if not goes.any():
        return math.inf
    if goes.all():
        return -1.0
    kept, gone = float(sizes[~goes].max()), float(sizes[goes].min())
    middle = float(torch.tensor(kept + (gone - kept) / 2, dtype=torch.float32))
    return middle if kept <= middle < gone else kept
