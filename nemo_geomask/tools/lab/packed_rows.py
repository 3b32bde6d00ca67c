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

from nemo_geomask.losses.packing import pack_rows
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.lab.ranks import Axis

__all__ = ["Packing", "enter_sharded_layer", "pack_sequences", "vocabulary_shards"]


@dataclass(frozen=True)
class Packing:
    """Sequences one after another, under context parallelism each padded to a multiple of 2·CP, and this rank's share.

    Attributes:
        lengths: [S] tokens of each sequence, without padding.
        segments: the sequences, with this rank's N tokens of them.
        row: [N] index of each token's sequence.
        position: [N] position of each token in its sequence.
        queries: [S, Q] indices of each sequence's tokens in this rank's share, padded by repeating the last.
        slots: [N] index of each token in the flattened ``queries``.
        keys: [S, K] indices of each complete sequence's tokens in the concatenated shares of all ranks, padded by
            repeating the last.
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
        """Causal attention mask, [S, 1, Q, K] bool: True where a query may attend to a key."""
        # Padded keys come after every query of their sequence, so the causal mask hides them too.
        return torch.arange(self.keys.shape[1]) <= self.position[self.queries][:, None, :, None]

    def pack(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert NeMo-RL's rows to this rank's packed tokens; see :func:`nemo_geomask.losses.packing.pack_rows`."""
        return pack_rows(data, self.segments, starts=self.segments.cu_seqlens[:-1], lengths=self.lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute causal attention within each sequence.

        Args:
            query: [1, H, N, D] of this rank's tokens, rotated by their places in the sequence.
            key: [1, G, N, D], likewise.
            value: [1, G, N, D].
            scaling: of the scores.

        Returns:
            [N, H, D].
        """
        query, key, value = (tokens[0].transpose(0, 1) for tokens in (query, key, value))  # [N, H or G, D]
        mask: dict[str, Any] = {"is_causal": True}  # Without context parallelism, the share is the sequence in order.
        if self.cp.group is not None:
            both = _GatherShares.apply(torch.stack([key, value], dim=1), self.cp)  # type: ignore[no-untyped-call]
            key, value = both.unbind(1)
            mask = {"attn_mask": self.visible}
        queries = _gather_tokens(query, self.queries).transpose(1, 2)  # [S, H, Q, D]
        keys, values = (_gather_tokens(tokens, self.keys).transpose(1, 2) for tokens in (key, value))  # [S, G, K, D]
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=True, **mask)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)

    def unpack(self, values: Tensor, targets: Tensor, like: Tensor) -> Tensor:
        """Scatter this rank's values [N] of the tokens that it predicts to rows [B, T] like ``like``; 0 elsewhere."""
        rows, predicts = torch.zeros_like(like), targets >= 0
        rows[self.row[predicts], self.position[predicts] + 1] = values[predicts]
        return rows


def pack_sequences(lengths: Tensor, cp: Axis) -> Packing:
    """Compute the packing of sequences with lengths [S], each at least 1, on this rank."""
    multiple = 1 if cp.size == 1 else 2 * cp.size
    padded = -(-lengths // multiple) * multiple
    offsets = _cumulative_offsets(padded)
    groups = () if cp.group is None else (cp.group,)
    shares = [PackedSegments(offsets, cp_rank=rank, cp_size=cp.size, groups=groups) for rank in range(cp.size)]
    segments = shares[cp.rank]
    row = segments.spread(torch.arange(len(lengths)))
    position = segments.token_index - offsets[row]
    local = padded // cp.size
    queries = _row_indices(_cumulative_offsets(local), local)
    # Maps an index in the packed row to its index in the concatenated shares.
    index_in_shares = torch.cat([share.token_index for share in shares]).argsort()
    keys = index_in_shares[_row_indices(offsets, padded)]
    slots = (
        torch.arange(len(row)) + (torch.arange(len(lengths)) * queries.shape[1] - _cumulative_offsets(local)[:-1])[row]
    )
    return Packing(lengths, segments, row, position, queries, slots, keys, cp)


def vocabulary_shards(vocab_size: int, tp: int) -> list[int]:
    """Divide the vocabulary evenly over tensor-parallel ranks; the first ranks get the remainder, one column each."""
    return [vocab_size // tp + (rank < vocab_size % tp) for rank in range(tp)]


def _cumulative_offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _row_indices(offsets: Tensor, lengths: Tensor) -> Tensor:
    """Return [S, longest] consecutive indices from each offset, padded by repeating the last."""
    columns = torch.arange(int(lengths.max()))
    return offsets[:-1, None] + columns.minimum(lengths[:, None] - 1)


def _gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Index tokens [N, …] by [S, K] to [S, K, …]; index_select has a faster gradient than indexing."""
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


class _GatherShares(torch.autograd.Function):
    """Concatenate the shares [N, …] of all context-parallel ranks; the backward pass sums gradients over the ranks."""

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
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.cp.group)
        return total.chunk(ctx.cp.size)[ctx.cp.rank], None


def enter_sharded_layer(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the hidden states unchanged; the backward pass sums their gradients over tensor-parallel shards."""
    sent: Tensor = hidden if group is None else _SumShardGradients.apply(hidden, group)  # type: ignore[no-untyped-call]
    return sent


class _SumShardGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
