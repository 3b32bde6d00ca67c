"""Reductions of packed tokens to sequences, within a rank and over ranks; traceable by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Groups", "across_ranks", "gathered", "merged", "pool", "scan", "spread"]

Groups = tuple[dist.ProcessGroup, ...]


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[W, ...] from each rank's [...], in rank order."""
    world = dist.get_world_size(group)
    if torch.compiler.is_compiling():
        # Its import brings sympy, which a loss that is not compiled can do without.
        from torch.distributed import _functional_collectives as traceable

        parts = traceable.all_gather_tensor(values.reshape(-1), 0, group)
        return parts.view(world, *values.shape)
    parts = values.new_empty((world, *values.shape))
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
        values = torch.cat([parts[:, :sums].sum(dim=0), parts[:, sums:].amax(dim=0)])
    return values


def across_ranks(
    moving: Tensor, fixed: Tensor, sums: int, groups: Groups, *, own_gradient: bool
) -> tuple[Tensor, Tensor]:
    """:func:`merged` of both, in one collective, and at most one backward.

    Args:
        moving: [d, ...], summed, with gradient.
        fixed: [c, ...], without; the first ``sums`` are summed, of the others it is the maximum.
        sums: see ``fixed``.
        groups: over which.
        own_gradient: whether each rank's gradient is that of its own part (of a total that every rank holds), and not
            the sum over ranks (of a statistic that every rank's part of the loss depends on).

    Returns: both; a gradient flows through the first alone.
    """
    if not groups:
        return moving, fixed
    if moving.requires_grad:
        found: tuple[Tensor, Tensor] = _AcrossRanks.apply(moving, fixed, sums, groups, own_gradient)  # type: ignore[no-untyped-call]
        return found
    values = merged(torch.cat([moving, fixed]), len(moving) + sums, groups)
    return values[: len(moving)], values[len(moving) :]


def pool(moving: Sequence[Tensor], fixed: Sequence[Tensor], sums: int, *, offsets: Tensor, ids: Tensor) -> Any:
    """Token values to sequences, over this rank's tokens.

    Args:
        moving: [N] each, floating, summed, with gradient.
        fixed: likewise, without gradient; the first ``sums`` are summed, of the others it is the maximum.
        sums: see ``fixed``.
        offsets: [S+1], where the sequences start among these N.
        ids: [N], whose sequence each is.

    Returns: [d, S] and [c, S], float64: a serial sum over a long sequence loses digits in float32.
    """
    constant = _stack([value.detach() for value in fixed], ids)
    parts = [_segment_reduce(constant[:sums], offsets, "sum", 0.0)]
    if sums < len(constant):
        parts.append(_segment_reduce(constant[sums:], offsets, "max", -torch.inf))
    rest = torch.cat(parts)
    if not moving:
        # Without a gradient to carry, a graph has no backward pass to make for it.
        return rest[:0], rest
    return _SegmentSum.apply(_stack(moving, ids), offsets, ids), rest  # type: ignore[no-untyped-call]


def spread(values: Tensor, *, offsets: Tensor, ids: Tensor) -> Tensor:
    """[S] to [N]; ``offsets`` and ``ids`` as for :func:`pool`."""
    if not values.requires_grad:
        return values.index_select(0, ids)  # half the time of indexing on a CPU
    result: Tensor = _Spread.apply(values, offsets, ids)  # type: ignore[no-untyped-call]
    return result


def scan(values: Tensor, place: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N] combined over each run up to and including a token, by doubling the reach.

    Where a run ends and another begins nothing is subtracted, so that what is large in one leaves the digits of the
    next; the error grows with the logarithm of a run's length.

    Args:
        values: [N].
        place: [N], of each token in its run.
        combine: associative.
    """
    # A graph is one for all lengths.
    for step in range(24 if torch.compiler.is_compiling() else (place.numel() - 1).bit_length()):
        values = torch.where(place >= 1 << step, combine(values, values.roll(1 << step)), values)
    return values


def _stack(values: Sequence[Tensor], ids: Tensor) -> Tensor:
    if not values:
        return torch.zeros((0, *ids.shape), dtype=torch.float64, device=ids.device)
    rows = [value.expand(ids.shape) for value in values]
    return (rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)).double()


def _segment_reduce(values: Tensor, offsets: Tensor, reduce: str, empty: float) -> Tensor:
    """[k, N] to [k, S]; no atomics, so deterministic on any device."""
    rows, tokens = values.shape
    if not rows:
        return values.new_zeros((0, offsets.numel() - 1))
    # The rows one after another: of several dimensions torch gives a GPU one thread a segment, of one a block.
    bounds = offsets
    if rows > 1:
        starts = offsets[:-1] + torch.arange(rows, device=offsets.device).unsqueeze(1) * tokens
        bounds = torch.cat([starts.flatten(), offsets[-1:] + (rows - 1) * tokens])
    # "unsafe" skips a check of the offsets that would synchronise with the device; they were checked on the host.
    result: Tensor = torch.segment_reduce(values.flatten(), reduce, offsets=bounds, initial=empty, unsafe=True)
    return result.view(rows, offsets.numel() - 1)


# Each with a setup_context of its own, as torch.func asks, by which a compiled loss takes its gradient.
class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(moving: Tensor, fixed: Tensor, sums: int, groups: Groups, own_gradient: bool) -> tuple[Tensor, Tensor]:
        values = merged(torch.cat([moving, fixed]), len(moving) + sums, groups)
        return values[: len(moving)].clone(), values[len(moving) :].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *_, ctx.groups, ctx.own_gradient = inputs
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        return (grad if ctx.own_gradient else merged(grad, len(grad), ctx.groups)), None, None, None, None


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        return _segment_reduce(values, offsets, "sum", 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        return grads[0].index_select(1, ids), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        return values.index_select(0, ids)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        (grad,) = grads
        return _segment_reduce(grad.double().unsqueeze(0), offsets, "sum", 0.0)[0].to(grad.dtype), None, None
