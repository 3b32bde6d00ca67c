"""Sequences packed one after another, and the shares of them that context-parallel ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nemo_geomask.integrations.packing import pack_rows
from nemo_geomask.lab.ranks import Axis
from nemo_geomask.segments import PackedSegments

__all__ = ["Packing", "lay_out", "to_shards", "vocabulary_shards"]


@dataclass(frozen=True)
class Packing:
    """Sequences one after another, under context parallelism each padded to a multiple of 2·CP, and this rank's share.

    Attributes:
        lengths: [S] tokens of each sequence, without padding.
        segments: whose tokens this rank holds, N of them.
        row: [N] sequence of each token.
        position: [N] its place in the sequence.
        queries: [S, Q] where this rank's tokens of each sequence lie in its share, filled up with the last.
        slots: [N] where each token lies in the flattened ``queries``.
        keys: [S, K] where the whole sequence's tokens lie in the shares of all ranks put one after another, filled up
            with the last.
        cp: the context-parallel axis.
    """

    lengths: Tensor
    segments: PackedSegments
    row: Tensor
    position: Tensor
    queries: Tensor
    slots: Tensor
    keys: Tensor
    cp: Axis

    @functools.cached_property
    def visible(self) -> Tensor:
        """[S, 1, Q, K] bool, what each query may attend to: its own sequence up to itself."""
        # A key that fills up comes after every query of its sequence, so the causal rule hides it too.
        return torch.arange(self.keys.shape[1]) <= self.position[self.queries][:, None, :, None]

    def pack(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """NeMo-RL's rows as this rank's tokens, see :func:`nemo_geomask.integrations.packing.pack_rows`."""
        return pack_rows(data, self.segments, starts=self.segments.cu_seqlens[:-1], lengths=self.lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention of each sequence's tokens among themselves.

        Args:
            query: [1, H, N, D] of this rank's tokens, rotated by their places in the sequence.
            key: [1, G, N, D], likewise.
            value: [1, G, N, D].
            scaling: of the scores.

        Returns:
            [N, H, D].
        """
        query, key, value = (tokens[0].transpose(0, 1) for tokens in (query, key, value))  # [N, H or G, D]
        seen: dict[str, Any] = {"is_causal": True}  # One rank's share is the whole sequence, in order.
        if self.cp.group is not None:
            both = _FromShares.apply(torch.stack([key, value], dim=1), self.cp)  # type: ignore[no-untyped-call]
            key, value = both.unbind(1)
            seen = {"attn_mask": self.visible}
        queries = _take(query, self.queries).transpose(1, 2)  # [S, H, Q, D]
        keys, values = (_take(tokens, self.keys).transpose(1, 2) for tokens in (key, value))  # [S, G, K, D]
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=True, **seen)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)

    def unpack(self, values: Tensor, targets: Tensor, like: Tensor) -> Tensor:
        """This rank's values [N] of the tokens that it predicts as rows [B, T], as wide as ``like``; 0 elsewhere."""
        rows, predicts = torch.zeros_like(like), targets >= 0
        rows[self.row[predicts], self.position[predicts] + 1] = values[predicts]
        return rows


def lay_out(lengths: Tensor, cp: Axis) -> Packing:
    """Lay out sequences of the given lengths [S], each at least 1."""
    multiple = 1 if cp.size == 1 else 2 * cp.size
    padded = -(-lengths // multiple) * multiple
    offsets = _offsets(padded)
    groups = () if cp.group is None else (cp.group,)
    shares = [PackedSegments(offsets, cp_rank=rank, cp_size=cp.size, groups=groups) for rank in range(cp.size)]
    segments = shares[cp.rank]
    row = segments.spread(torch.arange(len(lengths)))
    position = segments.token_index - offsets[row]
    local = padded // cp.size
    queries = _rows(_offsets(local), local)
    # Position in the whole packed row to position among the shares put one after another.
    where = torch.cat([share.token_index for share in shares]).argsort()
    keys = where[_rows(offsets, padded)]
    slots = torch.arange(len(row)) + (torch.arange(len(lengths)) * queries.shape[1] - _offsets(local)[:-1])[row]
    return Packing(lengths, segments, row, position, queries, slots, keys, cp)


def vocabulary_shards(vocab_size: int, tp: int) -> list[int]:
    """Columns of each tensor-parallel rank: as even as can be, the first ranks one more."""
    return [vocab_size // tp + (rank < vocab_size % tp) for rank in range(tp)]


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _rows(offsets: Tensor, lengths: Tensor) -> Tensor:
    """[S, longest] consecutive positions from each offset, filled up with the last."""
    columns = torch.arange(int(lengths.max()))
    return offsets[:-1, None] + columns.minimum(lengths[:, None] - 1)


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """[N, …] at [S, K] to [S, K, …]; by index_select, whose gradient is the faster one."""
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


class _FromShares(torch.autograd.Function):
    """[N, …] of each context-parallel rank one after another; the gradient is summed over the ranks that looked."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        share = share.contiguous()
        parts = [torch.empty_like(share) for _ in range(cp.size)]
        dist.all_gather(parts, share, group=cp.group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.cp.group)
        return whole.chunk(ctx.cp.size)[ctx.cp.rank], None


def to_shards(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Hidden states on their way into the sharded output layer: what comes back through the shards is summed."""
    sent: Tensor = hidden if group is None else _ToShards.apply(hidden, group)  # type: ignore[no-untyped-call]
    return sent


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
