r"""Mask bounds computed from the values of a batch, and position weights for a budget over each sequence's prefix.

The values are non-negative sizes, such as squared log-ratios, one for each token or sequence of the batch. The mask
removes values above the bound. The bound is chosen so that the share of the values that are removed, or the mean of the
values that are kept, stays within a budget. Equal values are kept or removed together, so their order does not matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_layout

__all__ = ["bound_by_mean", "bound_by_share", "position_weights"]


def bound_by_share(sizes: Tensor, share: float) -> float:
    r"""Return a bound that at most :math:`\lfloor share \cdot n \rfloor` of n values exceed.

    Exactly this many exceed it, unless several equal values lie at the limit: these are then all kept.

    Args:
        sizes: [n], float32 or float64, at least 0, without NaN.
        share: largest fraction of the values to remove, from 0 to 1.

    Returns: the bound, chosen between the values as in :func:`bound_by_mean`; infinite if all are kept, -1 if none is.
    Raises: ShapeError: half precision or integers.
    """
    check_layout(sizes=sizes)
    # The product may be just below a whole number: 0.29 · 100 is 28.999999999999996.
    count = math.floor(share * sizes.numel() + 1e-9)
    if count == 0:
        return math.inf
    # -1 is below all sizes, so that all are removed.
    largest_kept = sizes.topk(count + 1).values[-1] if count < sizes.numel() else sizes.new_tensor(-1.0)
    return _bound_between(sizes, sizes > largest_kept)


def bound_by_mean(sizes: Tensor, mean: float) -> float:
    r"""Return a bound that keeps as many values as possible while the mean of the kept ones is at most ``mean``.

    Args:
        sizes: [n], float32 or float64, at least 0, without NaN.
        mean: largest mean of the kept values, in their unit.

    Returns: the bound, rounded to float32, midway between the largest value kept and the smallest removed; infinite if
    all are kept, -1 if none is. Midway, because another token layout (padded or packed) may round the values
    differently, and that must not change which ones are kept.
    Raises: ShapeError: half precision or integers.
    Source: M2PO, arXiv:2510.01161, whose values are squared log-ratios.
    """
    check_layout(sizes=sizes)
    ascending = sizes.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=sizes.device)
    kept_count = int((means <= mean).sum())
    if kept_count == len(ascending):
        return math.inf
    return _bound_between(sizes, sizes >= ascending[kept_count])


def _bound_between(sizes: Tensor, is_removed: Tensor) -> float:
    """Return a bound between the values that are kept and those that are removed; see :func:`bound_by_mean`."""
    if not is_removed.any():
        return math.inf
    if is_removed.all():
        return -1.0
    largest_kept, smallest_removed = float(sizes[~is_removed].max()), float(sizes[is_removed].min())
    middle = largest_kept + (smallest_removed - largest_kept) / 2
    middle = float(torch.tensor(middle, dtype=torch.float32, device="cpu"))
    # Where the two are so close that the rounded middle is not between them, the largest kept value is the bound.
    return middle if largest_kept <= middle < smallest_removed else largest_kept


def position_weights(position: Tensor, length: Tensor, min_weight: float) -> tuple[Tensor, Tensor]:
    r"""Return weights that fall from 1 at the first of T tokens to ``min_weight`` at the last, and their prefix sums.

    .. math:: w_t = w_{min} + (1 - w_{min})\frac{T-t}{T-1}, \qquad W_{t-1} = \sum_{s<t} w_s

    Args:
        position: t, the token's place in its sequence, counted from 1; any shape, float32 or float64.
        length: T, number of tokens of its sequence, same layout; where T is 1 the weight is 1.
        min_weight: :math:`w_{min}`.

    Returns: :math:`w_t`, and :math:`W_{t-1}`, the sum of the weights before t; both in the layout of ``position``.
    Raises: ShapeError: half precision, integers, or shapes that don't fit.
    Source: CPPO, arXiv:2606.10968, as in its authors' verl PR 6731, which uses the padded width of the batch as T.
    """
    check_layout(position=position, length=length)
    step = (1.0 - min_weight) / (length - 1.0).clamp(min=1.0)
    tokens_before = position - 1.0
    return 1.0 - step * tokens_before, tokens_before - step * tokens_before * (tokens_before - 1.0) / 2.0
