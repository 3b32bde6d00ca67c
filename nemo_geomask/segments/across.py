"""Reductions of packed tokens to sequences, within a rank and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Groups", "gathered", "merged", "pool", "spread"]

Groups = tuple[dist.ProcessGroup, ...]


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[W, ...] from each rank's [...], in rank order."""
    parts = values.new_empty((dist.get_world_size(group), *values.shape))
    # The same under the name that torch 2.13 gave it.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(parts.view(-1), values.reshape(-1), group=group)
    return parts


def merged(values: Tensor, sums: int, groups: Groups) -> Tensor:
    """The first ``sums`` entries summed over the groups' ranks, of the others the maximum.

    All ranks merge in rank order, so they hold the same bits and decide alike at a bound, which an all-reduce leaves to
    the backend; and sums and maxima travel together.
    """
    for group in groups:
        parts = gathered(values, group)
        values = parts.sum(dim=0)
        if sums < len(values):
            values = torch.cat([values[:sums], parts[:, sums:].amax(dim=0)])
    return values


def pool(values: Sequence[Tensor], sums: int, *, offsets: Tensor, ids: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """Token values to sequences, over all ranks.

    Args:
        values: [N] each, floating.
        sums: how many of them, the first ones, are summed, with gradient; of the others it is the maximum, without.
        offsets: [S+1], where the sequences start among these N.
        ids: [N], whose sequence each is.
        groups: over which the sequences are spread.

    Returns:
        [S] each.
    """
    found: tuple[Tensor, ...] = _Pool.apply(offsets, ids, groups, sums, *values)  # type: ignore[no-untyped-call]
    return found


def spread(values: Tensor, *, offsets: Tensor, ids: Tensor) -> Tensor:
    """[S] to [N]; ``offsets`` and ``ids`` as for :func:`pool`."""
    result: Tensor = _Spread.apply(values, offsets, ids)  # type: ignore[no-untyped-call]
    return result


def _segment_reduce(values: Tensor, offsets: Tensor, reduce: str, empty: float) -> Tensor:
    """[k, N] to [k, S]; no atomics, so deterministic on any device."""
    # "unsafe" skips a check of the offsets that would synchronise with the device; they were checked on the host.
    bounds = offsets.expand(values.shape[0], -1).contiguous()
    result: Tensor = torch.segment_reduce(values, reduce, offsets=bounds, axis=1, initial=empty, unsafe=True)
    return result


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, offsets: Tensor, ids: Tensor, groups: Groups, sums: int, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(ids)
        ctx.groups = groups
        # A serial sum over a long sequence loses digits in float32; [S] values in float64 cost nothing to send.
        rows = torch.empty((len(values), len(ids)), dtype=torch.float64, device=ids.device)
        for row, value in zip(rows, values, strict=True):
            row.copy_(value)
        summed = _segment_reduce(rows[:sums], offsets, "sum", 0.0)
        highest = _segment_reduce(rows[sums:], offsets, "max", -torch.inf)
        pooled = merged(torch.cat([summed, highest]), sums, groups)
        found = tuple(row.to(value.dtype) for row, value in zip(pooled, values, strict=True))
        # Otherwise every output would ask for a backward pass, and so for a collective, once one input does.
        differentiable = ctx.needs_input_grad[4 : 4 + sums]
        constant = [row for row, needed in zip(found, differentiable, strict=False) if not needed]
        ctx.mark_non_differentiable(*constant, *found[sums:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        mine = torch.stack([grad for grad, need in zip(grads, needed, strict=True) if need])
        # Every rank's part of the loss depends on the statistic; its gradient is the sum over them.
        whole = merged(mine.double(), len(mine), ctx.groups).to(mine.dtype)
        rows = iter(whole[:, ids])
        return (None, None, None, None, *(next(rows) if need else None for need in needed))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return values[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        (grad,) = grads
        return _segment_reduce(grad.double().unsqueeze(0), offsets, "sum", 0.0)[0].to(grad.dtype), None, None
