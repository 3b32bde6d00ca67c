"""Who belongs to which sequence, and statistics over it.

Everything in a loss that speaks of a sequence goes through a :class:`Segments`: pool token values to one value a
sequence, work there, spread back. A loss written on it does not know how its tokens are laid out. This is also the
only place where statistics cross ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_geomask.errors import ShapeError

__all__ = ["PackedSegments", "PaddedSegments", "Segments"]

Groups = tuple[dist.ProcessGroup, ...]


class Segments(ABC):
    """Sequences among the tokens at hand.

    Token tensors share one layout (the "token layout"); sequence tensors are [S]. Values handed in must already
    be neutral at tokens that don't count: 0 for sums, ±inf for extremes.
    """

    @abstractmethod
    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum each token tensor over its whole sequence, all of them in one reduction.

        Args:
            values: token-layout tensors of one dtype.

        Returns:
            The same keys with [S] tensors, the same on all ranks; differentiable.
        """

    @abstractmethod
    def extremes(
        self, lowest: Mapping[str, Tensor], highest: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Minimum of each tensor in ``lowest`` and maximum of each in ``highest``, over its whole sequence.

        Returns:
            Two mappings with the keys of ``lowest`` and ``highest`` and [S] tensors, without gradient; a sequence
            without tokens gives +inf and -inf.
        """

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """[S] to a tensor that broadcasts against the token layout; differentiable."""

    def whole(self, total: Tensor) -> Tensor:
        """A total over this rank's tokens as that over all ranks' tokens, of any shape.

        The value is the same on all ranks; the gradient is that of this rank's own part, so that each rank's
        backward pass gives its tokens the gradient of the whole.
        """
        return total

    def whole_extremes(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum of ``lowest`` and maximum of ``highest`` over all ranks, elementwise, without gradient."""
        return lowest, highest


class PaddedSegments(Segments):
    """Rows of a padded batch: token layout [B, T], one sequence a row, S = B."""

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Segments.sum`."""
        return {name: value.sum(dim=-1) for name, value in values.items()}

    def extremes(
        self, lowest: Mapping[str, Tensor], highest: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See :meth:`Segments.extremes`."""
        return (
            {name: _or_empty(value, torch.inf).amin(dim=-1) for name, value in lowest.items()},
            {name: _or_empty(value, -torch.inf).amax(dim=-1) for name, value in highest.items()},
        )

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [B, 1], which broadcasts against [B, T]."""
        return values.unsqueeze(-1)


def _or_empty(value: Tensor, empty: float) -> Tensor:
    # A reduction over no element is an error in torch; a row of width 0 is an empty response here.
    return value if value.shape[-1] else value.new_full((*value.shape[:-1], 1), empty)


class PackedSegments(Segments):
    """Sequences packed one after another: token layout [N], whole or a context-parallel share.

    Under context parallelism each rank holds, of every sequence, chunks r and 2·CP−1−r of 2·CP equal ones, in that
    order (Megatron's load-balanced split), so its share of a sequence is contiguous too and its statistics need no
    index arithmetic.

    Args:
        cu_seqlens: [S+1] token offsets of the sequences in the whole packed row, padding included, starting at 0:
            Megatron's ``cu_seqlens_q_padded``. From the host (a list or CPU tensor) it costs no synchronisation.
        device: where the tokens are.
        cp_rank: this rank in the context-parallel group.
        cp_size: its size; each padded length must be a multiple of 2·``cp_size``.
        groups: process groups over which the tokens of a sequence are spread: the context-parallel group. Without
            it, statistics are those of this rank's share alone.

    Attributes:
        token_index: [N] int64, where this rank's tokens lie in the whole packed row.

    Raises:
        ShapeError: offsets don't start at 0, decrease, or don't divide into the context-parallel chunks.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int] | Tensor,
        *,
        device: torch.device | str = "cpu",
        cp_rank: int = 0,
        cp_size: int = 1,
        groups: Groups = (),
    ) -> None:
        offsets = torch.as_tensor(cu_seqlens, dtype=torch.int64, device="cpu")
        lengths = offsets.diff()
        if offsets.dim() != 1 or offsets.numel() == 0 or int(offsets[0]) != 0 or bool((lengths < 0).any()):
            raise ShapeError(f"cu_seqlens must be non-decreasing offsets that start at 0, but it is {offsets.tolist()}")
        if not 0 <= cp_rank < cp_size:
            raise ShapeError(f"cp_rank must be from 0 to cp_size - 1 = {cp_size - 1}, but it is {cp_rank}")
        if cp_size > 1 and bool((lengths % (2 * cp_size) != 0).any()):
            raise ShapeError(
                f"each padded sequence length must be a multiple of 2·{cp_size} for context-parallel size {cp_size}, "
                f"but the lengths are {lengths.tolist()}; pad the sequences to that multiple"
            )
        index = _share(offsets[:-1], lengths, cp_rank, cp_size)
        local = lengths // cp_size
        count = lengths.numel()
        self.count = count
        self.token_index = index.to(device, non_blocking=True)
        self._ids = torch.repeat_interleave(torch.arange(count), local).to(device, non_blocking=True)
        self._offsets = torch.cat([local.new_zeros(1), local.cumsum(0)]).to(device, non_blocking=True)
        self._groups = groups

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Segments.sum`. One all-reduce of [k, S] a group, and one in the backward pass."""
        if not values:
            return {}
        stacked = torch.stack([value.expand(self._ids.shape) for value in values.values()])
        sums = _SegmentSum.apply(stacked, self._offsets, self._ids, self._groups)  # type: ignore[no-untyped-call]
        return dict(zip(values, sums.unbind(0), strict=True))

    def extremes(
        self, lowest: Mapping[str, Tensor], highest: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See :meth:`Segments.extremes`. Minima travel as maxima of the negative: one all-reduce a group."""
        values = [-value for value in lowest.values()] + list(highest.values())
        if not values:
            return {}, {}
        peaks = _segment_reduce(torch.stack(values).detach(), self._offsets, "max", -torch.inf)
        for group in self._groups:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        count = len(lowest)
        return (
            dict(zip(lowest, (-peaks[:count]).unbind(0), strict=True)),
            dict(zip(highest, peaks[count:].unbind(0), strict=True)),
        )

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [N]."""
        result: Tensor = _Spread.apply(values, self._offsets, self._ids)  # type: ignore[no-untyped-call]
        return result

    def whole(self, total: Tensor) -> Tensor:
        """See :meth:`Segments.whole`."""
        result: Tensor = _Whole.apply(total, self._groups)  # type: ignore[no-untyped-call]
        return result

    def whole_extremes(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Segments.whole_extremes`."""
        both = torch.cat([-lowest.reshape(-1), highest.reshape(-1)]).detach()
        for group in self._groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        low, high = both[: lowest.numel()], both[lowest.numel() :]
        return -low.reshape(lowest.shape), high.reshape(highest.shape)


def _share(starts: Tensor, lengths: Tensor, rank: int, size: int) -> Tensor:
    """Positions in the packed row of a rank's tokens, in the order in which it holds them."""
    if size == 1:
        return torch.arange(int(lengths.sum()))
    chunk = lengths // (2 * size)
    # Two runs a sequence, each of its chunk's length.
    first = torch.stack([starts + rank * chunk, starts + (2 * size - 1 - rank) * chunk], dim=1).reshape(-1)
    run = chunk.repeat_interleave(2)
    within = torch.arange(int(run.sum())) - (run.cumsum(0) - run).repeat_interleave(run)
    return first.repeat_interleave(run) + within


def _segment_reduce(values: Tensor, offsets: Tensor, reduce: str, empty: float) -> Tensor:
    """[k, N] to [k, S]; no atomics, so deterministic on any device."""
    # "unsafe" skips a check of the offsets that would synchronise with the device; they were checked on the host.
    bounds = offsets.expand(values.shape[0], -1).contiguous()
    result: Tensor = torch.segment_reduce(
        values.contiguous(), reduce, offsets=bounds, axis=1, initial=empty, unsafe=True
    )
    return result


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, ids: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.groups = groups
        # A serial sum over a long sequence loses digits in float32; [S] values in float64 cost nothing to send.
        sums = _segment_reduce(values.double(), offsets, "sum", 0.0)
        for group in groups:
            dist.all_reduce(sums, group=group)
        return sums.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        # Every rank's part of the loss depends on the statistic; its gradient is the sum over them.
        grad = grads[0].contiguous()
        if ctx.groups:
            grad = grad.clone()
        for group in ctx.groups:
            dist.all_reduce(grad, group=group)
        return grad[:, ids], None, None, None


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


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, groups: Groups) -> Tensor:
        whole = total.clone()
        for group in groups:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
