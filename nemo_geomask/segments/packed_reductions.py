"""Reductions of packed tokens to sequences, within a rank and over ranks; traceable by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.segments.rank_comparison import as_lost_rank_error

Groups = tuple[dist.ProcessGroup, ...]

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def gather_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [W, ...], the ``values`` of the group's W ranks in rank order, by one all-gather.

    Raises: LostRankError: the collective failed. From a compiled graph the backend's own error is raised.
    """
    if torch.compiler.is_compiling():
        return _gather_ranks_traceably(values, group)
    gathered = values.new_empty((dist.get_world_size(group), *values.shape))
    with as_lost_rank_error():
        _all_gather(gathered.view(-1), values.reshape(-1), group=group)
    return gathered


def _gather_ranks_traceably(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Imported here, since it imports sympy, which a loss that is not compiled does not need.
    from torch.distributed import _functional_collectives as traceable

    gathered = traceable.all_gather_tensor(values.reshape(-1), 0, group)
    return gathered.view(dist.get_world_size(group), *values.shape)


def merge_ranks(values: Tensor, num_sums: int, groups: Groups) -> Tensor:
    """Return the sum over ranks of the first ``num_sums`` entries, and the maximum over ranks of the others.

    Each rank merges the gathered values in rank order, so that all ranks hold the same bits and a mask decides alike on
    all of them, even at its bound. An all-reduce does not guarantee this. Sums and maxima share one collective in each
    group.

    Args:
        values: [k, ...], this rank's values, of the same shape on all ranks.
        num_sums: number of leading entries to sum.
        groups: process groups to merge over, one after the other.

    Returns: [k, ...], the same bits on all ranks.
    """
    for group in groups:
        gathered = gather_ranks(values, group)
        values = torch.cat([gathered[:, :num_sums].sum(dim=0), gathered[:, num_sums:].amax(dim=0)])
    return values


def reduce_over_ranks(
    differentiable: Tensor, constant: Tensor, num_sums: int, groups: Groups, *, local_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return :func:`merge_ranks` of both tensors, by one collective in each group.

    The backward pass makes at most one more.

    Args:
        differentiable: [d, ...], summed, with gradient.
        constant: [c, ...], without gradient; the first ``num_sums`` entries are summed, the others maximised.
        num_sums: number of leading entries of ``constant`` to sum.
        groups: process groups to reduce over.
        local_gradient: True if the sums are the final loss, which every rank differentiates by its own tokens: the
            incoming gradient is passed on as it is. False if the loss of every rank depends on the sums, as on sequence
            statistics: the incoming gradients are summed over ranks.

    Returns: both tensors, reduced; only the first has a gradient.
    """
    if not groups:
        return differentiable, constant
    if differentiable.requires_grad:
        reduced: tuple[Tensor, Tensor] = _ReduceOverRanks.apply(  # type: ignore[no-untyped-call]
            differentiable, constant, num_sums, groups, local_gradient
        )
        return reduced
    values = merge_ranks(torch.cat([differentiable, constant]), len(differentiable) + num_sums, groups)
    return values[: len(differentiable)], values[len(differentiable) :]


def reduce_segments(
    differentiable: Sequence[Tensor], constant: Sequence[Tensor], num_sums: int, *, offsets: Tensor, ids: Tensor
) -> Any:
    """Reduce token values to sequences, over this rank's tokens.

    Args:
        differentiable: [N] each, floating, summed, with gradient.
        constant: [N] each, without gradient; the first ``num_sums`` are summed, the others maximised.
        num_sums: number of leading entries of ``constant`` to sum.
        offsets: [S+1] int64, where the sequences start among the rank's N tokens.
        ids: [N] int64, the sequence of each token.

    Returns: the d tensors of ``differentiable`` as [d, S] and the c of ``constant`` as [c, S]; float64, because a
    serial float32 sum over a long sequence loses digits.
    """
    constant_rows = _stack([value.detach() for value in constant], ids)
    reduced = [_segment_reduce(constant_rows[:num_sums], offsets, "sum", 0.0)]
    if num_sums < len(constant_rows):
        reduced.append(_segment_reduce(constant_rows[num_sums:], offsets, "max", -torch.inf))
    constant_reduced = torch.cat(reduced)
    if not differentiable:
        # Skip the autograd function, so that a graph without gradients has no backward pass to trace.
        return constant_reduced[:0], constant_reduced
    sums = _SegmentSum.apply(_stack(differentiable, ids), offsets, ids)  # type: ignore[no-untyped-call]
    return sums, constant_reduced


def spread(values: Tensor, *, offsets: Tensor, ids: Tensor) -> Tensor:
    """Return [N], the value in [S] of each token's sequence; ``offsets`` and ``ids`` as for :func:`reduce_segments`."""
    if not values.requires_grad:
        return values.index_select(0, ids)  # half the time of indexing on a CPU
    token_values: Tensor = _Spread.apply(values, offsets, ids)  # type: ignore[no-untyped-call]
    return token_values


def scan_runs(values: Tensor, position: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the values of each run of tokens up to and including each token, in log2(N) doubling steps.

    No step combines values of two runs, so a large value in one run does not reduce the precision in the next. The
    rounding error grows with the logarithm of a run's length.

    Args:
        values: [N].
        position: [N] int64, place of each token in its run, from 0.
        combine: associative function of two tensors.

    Returns: [N].
    """
    # A compiled graph serves all lengths up to 2**24.
    num_steps = 24 if torch.compiler.is_compiling() else (position.numel() - 1).bit_length()
    for step in range(num_steps):
        values = torch.where(position >= 1 << step, combine(values, values.roll(1 << step)), values)
    return values


def _stack(values: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Return [k, N] float64 from k tensors that broadcast to [N]."""
    if not values:
        return torch.zeros((0, *ids.shape), dtype=torch.float64, device=ids.device)
    rows = [value.expand(ids.shape) for value in values]
    return (rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)).double()


def _segment_reduce(values: Tensor, offsets: Tensor, reduce: str, initial: float) -> Tensor:
    """Reduce each sequence's tokens, [k, N] to [k, S]; deterministic on any device, since it uses no atomics."""
    rows, tokens = values.shape
    if not rows:
        return values.new_zeros((0, offsets.numel() - 1))
    # The k rows become one row of k·S segments: on a GPU, torch reduces a 1-d tensor with a block a segment, but a 2-d
    # tensor with a single thread a segment.
    bounds = offsets
    if rows > 1:
        starts = offsets[:-1] + torch.arange(rows, device=offsets.device).unsqueeze(1) * tokens
        bounds = torch.cat([starts.flatten(), offsets[-1:] + (rows - 1) * tokens])
    # "unsafe" skips a check of the offsets that would synchronise with the device; the host has checked them already.
    reduced: Tensor = torch.segment_reduce(values.flatten(), reduce, offsets=bounds, initial=initial, unsafe=True)
    return reduced.view(rows, offsets.numel() - 1)


# Each autograd function defines setup_context, because torch.func requires it, and losses/compiled.py uses torch.func.
class _ReduceOverRanks(torch.autograd.Function):
    """:func:`merge_ranks` with a gradient for the first tensor; see :func:`reduce_over_ranks`."""

    @staticmethod
    def forward(
        differentiable: Tensor, constant: Tensor, num_sums: int, groups: Groups, local_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        values = merge_ranks(torch.cat([differentiable, constant]), len(differentiable) + num_sums, groups)
        return values[: len(differentiable)].clone(), values[len(differentiable) :].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *_, ctx.groups, ctx.local_gradient = inputs
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if not ctx.local_gradient:
            grad = merge_ranks(grad, len(grad), ctx.groups)
        return grad, None, None, None, None


class _SegmentSum(torch.autograd.Function):
    """Sums of [k, N] over segments, [k, S]; the gradient of a token is that of its segment."""

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
    """[S] to [N]; the gradient of a segment is the sum over its tokens, deterministic on any device."""

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
