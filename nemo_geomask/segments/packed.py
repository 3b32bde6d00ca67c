"""Packed sequences: all of their tokens, or one rank's shard of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, RanksDisagreeError, ShapeError
from nemo_geomask.segments import packed_reductions as reductions
from nemo_geomask.segments.packed_tokens import PackedTokens, Runs
from nemo_geomask.segments.rank_comparison import PackedShape, checksum, compare_packings


class PackedSegments(PackedTokens):
    """Sequences packed one after another: token layout [N], all of the packed row or one rank's shard of it.

    Under context parallelism a sequence is cut into 2·CP equal chunks, of which rank r holds chunks r and 2·CP−1−r, in
    that order (Megatron's load-balanced split). With sequence parallelism, as in Fast-LLM, the tokens of a
    context-parallel rank are cut again into SP equal contiguous slices in rank order, even in the middle of a sequence.
    In both cases a rank's tokens of a sequence are contiguous in its shard, so offsets suffice to pool them.

    Padded rows [B, T] whose columns are split over context-parallel ranks are packed rows of equal lengths: give
    ``cu_seqlens=range(0, B * T + 1, T)`` and flatten each rank's [B, T/CP] tensors. Positions there are those of the
    model's input, so align each position with the data of the token that it predicts, the next one.

    Args:
        cu_seqlens: [S+1] token offsets of the sequences in the global packed row, padding included, starting at 0:
            Megatron's ``cu_seqlens_q_padded``. On the host (a list or CPU tensor) it costs no synchronisation.
        device: device of the tokens.
        cp_rank: this rank in the context-parallel group.
        cp_size: size of that group; each padded length must be a multiple of 2·``cp_size``, unless it is 1.
        sp_rank: this rank among the sequence-parallel ranks, which split the tokens of a context-parallel rank.
        sp_size: number of sequence-parallel ranks; it must divide the number of tokens of a context-parallel rank.
        groups: process groups that the tokens of a sequence are spread over: the context-parallel group, the
            sequence-parallel group, one group of both (the fewest collectives), or the two groups in that order.
            Without groups, a shard knows its :attr:`token_index` but cannot compute statistics.

    Attributes:
        count: S, number of sequences.
        tokens: N, number of tokens on this rank.
        cu_seqlens: [S+1] int64, the argument of the same name, on the tokens' device.

    Raises:
        ArgumentError: ``cp_rank`` or ``sp_rank`` is not in its group.
        ShapeError: offsets aren't integers, don't start at 0, decrease, or don't divide into the shards. The
            statistics raise it too, before any collective, if a shard has no groups, or groups in which this process
            has another rank or size.

    Source: Megatron-LM ``get_thd_partitioned_indices``; Fast-LLM PR 502 for the sequence-parallel slices.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int] | Tensor,
        *,
        device: torch.device | str = "cpu",
        cp_rank: int = 0,
        cp_size: int = 1,
        sp_rank: int = 0,
        sp_size: int = 1,
        groups: reductions.Groups = (),
    ) -> None:
        try:
            offsets = torch.as_tensor(cu_seqlens, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise ShapeError(
                f"cu_seqlens must be the token offsets of the sequences, but it is {cu_seqlens!r}"
            ) from None
        if offsets.dim() != 1:
            raise ShapeError(f"cu_seqlens must be [S+1], token offsets of S sequences, but it is {list(offsets.shape)}")
        if offsets.numel() and (offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool):
            raise ShapeError(f"cu_seqlens must be integers, token offsets of the sequences, but it is {offsets.dtype}")
        offsets = offsets.to(torch.int64)
        lengths = offsets.diff()
        if offsets.numel() == 0 or int(offsets[0]) != 0 or bool((lengths < 0).any()):
            raise ShapeError(f"cu_seqlens must be non-decreasing offsets that start at 0, but it is {offsets.tolist()}")
        for axis, rank, size in (("cp", cp_rank, cp_size), ("sp", sp_rank, sp_size)):
            if not 0 <= rank < size:
                raise ArgumentError(f"{axis}_rank must be from 0 to {axis}_size - 1 = {size - 1}, but it is {rank}")
        if cp_size > 1 and bool((lengths % (2 * cp_size) != 0).any()):
            raise ShapeError(
                f"each padded sequence length must be a multiple of 2·{cp_size} for context-parallel size {cp_size}, "
                f"but the lengths are {lengths.tolist()}; pad the sequences to that multiple"
            )
        tokens, remainder = divmod(int(offsets[-1]) // cp_size, sp_size)
        if remainder:
            raise ShapeError(
                f"the {tokens * sp_size + remainder} tokens of a context-parallel rank don't divide into {sp_size} "
                "equal slices, sp_size; pad the packed row"
            )
        self.count, self.tokens = lengths.numel(), tokens
        self.groups = groups
        self._cp, self._sp = (cp_rank, cp_size), (sp_rank, sp_size)
        self._host_offsets = offsets

        # Tensors of [N] are computed on the device; only the offsets are copied from the host.
        self.cu_seqlens = offsets.to(device, non_blocking=True)
        first = sp_rank * tokens
        self._offsets = (self.cu_seqlens // cp_size).clamp(first, first + tokens) - first
        self._ids = torch.repeat_interleave(self._offsets.diff(), output_size=tokens)
        self._chunks = self.cu_seqlens.diff() // (2 * cp_size)
        splits = self.cu_seqlens[:-1] // cp_size + self._chunks
        self._splits = splits.clamp(first, first + tokens) - first if cp_size > 1 else self._offsets[1:]
        self._runs = Runs(
            cp_rank * sp_size + sp_rank,
            (2 * cp_size - 1 - cp_rank) * sp_size + sp_rank,
            2 * cp_size * sp_size,
        )

    @functools.cached_property
    def position(self) -> Tensor:
        """[N] int64, place of each of this rank's tokens in its padded sequence."""
        cp_rank, cp_size = self._cp
        chunk = self.spread(self._chunks)
        local = self._index_in_cp_rank - self.spread(self.cu_seqlens[:-1]) // cp_size
        # The rank holds chunks cp_rank and 2·cp_size − 1 − cp_rank of a sequence. Other ranks hold the cp_rank chunks
        # before its first one, and 2·(cp_size − 1) − cp_rank chunks before its second one.
        return local + torch.where(local < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank) * chunk

    @functools.cached_property
    def token_index(self) -> Tensor:
        """[N] int64, place of each of this rank's tokens in the global packed row."""
        _, cp_size = self._cp
        return self._index_in_cp_rank if cp_size == 1 else self.spread(self.cu_seqlens[:-1]) + self.position

    @property
    def _index_in_cp_rank(self) -> Tensor:
        """[N] int64, place of each token among all tokens of this context-parallel rank."""
        sp_rank, _ = self._sp
        first = sp_rank * self.tokens
        return torch.arange(first, first + self.tokens, device=self._ids.device)

    @functools.cached_property
    def packing(self) -> PackedShape:
        """Numbers by which ranks compare their packed rows, computed on the host."""
        (cp_rank, cp_size), (sp_rank, _) = self._cp, self._sp
        offsets = self._host_offsets
        return PackedShape(self.count, int(offsets[-1]), int(checksum(offsets)), sp_rank * cp_size + cp_rank)

    def verify(self, **sequences: Tensor) -> None:
        """Raise unless the ranks of the groups hold the shards of one packed row.

        A loss compares the packed rows of its ranks by itself (``loss_fn.compare_ranks``), but not their values. In
        each group this makes one small all-gather, and one more for each of ``sequences``. The host waits for each.

        Args:
            sequences: [S] tensors, by name, that must be the same on all ranks, such as ``sample_mask``.

        Raises: RanksDisagreeError, on all ranks: they don't hold the shards of one packed row, or their ``sequences``
        differ.
        """
        self.check()
        rows = self.gather_rows(torch.tensor([self.packing], device=self._ids.device))
        compare_packings([PackedShape(*row) for row in rows.tolist()])
        for name, value in sequences.items():
            by_rank = self.gather_rows(value.detach().double().reshape(1, -1))
            differs = (by_rank != by_rank[0]) & ~(by_rank.isnan() & by_rank[0].isnan())
            differing = differs.any(dim=0).nonzero().flatten().tolist()
            if differing:
                raise RanksDisagreeError(
                    f"the ranks hold different {name} for the same sequences, the first is sequence {differing[0]} "
                    f"with {by_rank[:, differing[0]].tolist()} by rank; give all ranks that share sequences the same "
                    f"{name}"
                )

    def gather_rows(self, row: Tensor) -> Tensor:
        """Return [W, n] from the row [1, n] of each of the W ranks in the groups, by one all-gather in each group."""
        for group in self.groups:
            row = reductions.gather_ranks(row, group).flatten(0, 1)
        return row

    def check(self) -> None:
        """Raise unless this process's ranks in the groups and their sizes fit the shard; no collective.

        Raises: ShapeError: a rank or a size differs from the arguments, or a shard has no groups.
        """
        split_axes = [(rank, size) for rank, size in (self._cp, self._sp) if size > 1]
        if not self.groups:
            if split_axes:
                raise ShapeError(
                    "these segments are a shard of the packed row, but have no groups over which to reduce their "
                    "statistics; pass groups=(context-parallel group,)"
                )
            return
        in_groups = [(dist.get_rank(group), dist.get_world_size(group)) for group in self.groups]
        (cp_rank, cp_size), (sp_rank, sp_size) = self._cp, self._sp
        if len(in_groups) == 1 and len(split_axes) == 2:
            fits = in_groups[0][1] == cp_size * sp_size  # in any order of the ranks
        elif len(in_groups) == 1:
            fits = in_groups == (split_axes or [(0, 1)])
        else:
            fits = in_groups == [self._cp, self._sp]
        if not fits:
            raise ShapeError(
                f"(rank, size) in the groups is {in_groups}, but (cp_rank, cp_size) is {cp_rank, cp_size} and "
                f"(sp_rank, sp_size) is {sp_rank, sp_size}; give the context-parallel group, the sequence-parallel "
                "group, one group of both, or the two in that order"
            )
