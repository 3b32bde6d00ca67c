"""Packing of sequences one after another into a row, and its shards on context-parallel ranks."""

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


@dataclass(frozen=True)
class Packing:
    """Sequences that are packed into one row, and this rank's shard of the row.

    Under context parallelism each sequence is padded to a multiple of 2·CP tokens.

    Attributes:
        query_index: [S, Q] for each sequence, the indices of its tokens in this rank's shard; the last index is
            repeated as padding.
        key_index: [S, K] for each sequence, the indices of all its tokens in the concatenated shards of all ranks; the
            last index is repeated as padding.
    """

    lengths: Tensor  # [S] tokens of each sequence, without padding
    segments: PackedSegments  # the sequences, with this rank's N tokens
    row: Tensor  # [N] index of each token's sequence
    position: Tensor  # [N] position of each token in its sequence
    query_index: Tensor
    query_slot: Tensor  # [N] index of each token in the flattened ``query_index``
    key_index: Tensor
    cp: Axis  # the context-parallel axis

    @functools.cached_property
    def visible(self) -> Tensor:
        """Causal attention mask, [S, 1, Q, K] bool: True where a query may attend to a key."""
        # Padded keys come after every query of their sequence, so the causal mask hides them too.
        keys = torch.arange(self.key_index.shape[1], device=self.position.device)
        return keys <= self.position[self.query_index][:, None, :, None]

    def pack(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert NeMo-RL's rows to this rank's packed tokens; see :func:`nemo_geomask.losses.packing.pack_rows`."""
        return pack_rows(data, self.segments, starts=self.segments.cu_seqlens[:-1], lengths=self.lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute causal attention within each sequence.

        query [1, H, N, D] and key [1, G, N, D] are this rank's tokens with rotary embedding applied; value is [1, G, N,
        D].

        Returns: [N, H, D].
        """
        query, key, value = (tokens[0].transpose(0, 1) for tokens in (query, key, value))  # [N, H or G, D]
        # Without context parallelism, the shard has all tokens of a sequence in order.
        mask: dict[str, Any] = {"is_causal": True}
        if self.cp.group is not None:
            keys_and_values = _ShardConcatenation.apply(torch.stack([key, value], dim=1), self.cp)  # type: ignore[no-untyped-call]
            key, value = keys_and_values.unbind(1)
            mask = {"attn_mask": self.visible}
        queries = _gather_tokens(query, self.query_index).transpose(1, 2)  # [S, H, Q, D]
        # [S, G, K, D]
        keys, values = (_gather_tokens(tokens, self.key_index).transpose(1, 2) for tokens in (key, value))
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=True, **mask)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, self.query_slot)

    def unpack(self, values: Tensor, targets: Tensor, like: Tensor) -> Tensor:
        """Scatter values [N] to the tokens that this rank's tokens predict, in rows [B, T] like ``like``; else 0."""
        rows, predicts = torch.zeros_like(like), targets >= 0
        rows[self.row[predicts], self.position[predicts] + 1] = values[predicts]
        return rows


def pack_sequences(lengths: Tensor, cp: Axis) -> Packing:
    """Compute the packing of sequences with lengths [S], each at least 1, on this rank."""
    multiple = 1 if cp.size == 1 else 2 * cp.size
    padded = -(-lengths // multiple) * multiple
    offsets = _cumulative_offsets(padded)
    groups = () if cp.group is None else (cp.group,)
    shards = [
        PackedSegments(offsets, device=lengths.device, cp_rank=rank, cp_size=cp.size, groups=groups)
        for rank in range(cp.size)
    ]
    segments = shards[cp.rank]
    sequence = torch.arange(len(lengths), device=lengths.device)
    row = segments.spread(sequence)
    position = segments.token_index - offsets[row]
    local = padded // cp.size
    query_index = _row_indices(_cumulative_offsets(local), local)
    # Maps an index in the packed row to its index in the concatenated shards.
    index_in_shards = torch.cat([shard.token_index for shard in shards]).argsort()
    key_index = index_in_shards[_row_indices(offsets, padded)]
    first_slot = sequence * query_index.shape[1]
    query_slot = torch.arange(len(row), device=row.device) + (first_slot - _cumulative_offsets(local)[:-1])[row]
    return Packing(lengths, segments, row, position, query_index, query_slot, key_index, cp)


def vocabulary_shards(vocab_size: int, tp: int) -> list[int]:
    """Return the number of vocabulary columns of each tensor-parallel rank; the first ranks get one column more."""
    return [vocab_size // tp + (rank < vocab_size % tp) for rank in range(tp)]


def _cumulative_offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _row_indices(offsets: Tensor, lengths: Tensor) -> Tensor:
    """Return [S, longest] consecutive indices from each offset on, padded by repeating the last index."""
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    return offsets[:-1, None] + columns.minimum(lengths[:, None] - 1)


def _gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Return tokens [N, …] at indices [S, K] as [S, K, …]; index_select has a faster gradient than indexing."""
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


class _ShardConcatenation(torch.autograd.Function):
    """Concatenation of the shards [N, …] of all context-parallel ranks; its backward pass sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(cp.size)]
        dist.all_gather(parts, shard, group=cp.group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.cp.group)
        return total.chunk(ctx.cp.size)[ctx.cp.rank], None
