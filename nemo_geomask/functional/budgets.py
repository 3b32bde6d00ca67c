r"""Budgets: bounds that a batch sets for itself, and what a sequence's prefix has used up of a trust region.

A bound says how large a value may be, that what is kept stays within a budget. Values are sizes, at least 0, of all
tokens or sequences of the batch. What exceeds the bound goes; equal values go together, so that the verdict depends on
no order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_layout

__all__ = ["bound_by_mean", "bound_by_share", "position_weights"]


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


def position_weights(place: Tensor, length: Tensor, least: float) -> tuple[Tensor, Tensor]:
    r"""Weights that fall from 1 at the first of T tokens to ``least`` at the last, and the sum of those before each.

    .. math:: w_t = w_{min} + (1 - w_{min})\frac{T-t}{T-1}, \qquad W_{t-1} = \sum_{s<t} w_s

    Args:
        place: t from 1, any shape, float32 or float64.
        length: T, same layout; a single token weighs 1.
        least: :math:`w_{min}`.

    Returns: :math:`w_t` and :math:`W_{t-1}`.
    Raises: ShapeError: half precision, integers, or shapes that don't fit.
    Source: CPPO, arXiv:2606.10968, as in its authors' verl PR 6731, which has the padded width of the batch for T.
    """
    check_layout(place=place, length=length)
    step, before = (1.0 - least) / (length - 1.0).clamp(min=1.0), place - 1.0
    return 1.0 - step * before, before - step * before * (before - 1.0) / 2.0
