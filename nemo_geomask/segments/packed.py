"""Packed sequences: all of their tokens, or one rank's shard of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, RanksDisagreeError, ShapeError
from nemo_geomask.segments import packed_reductions as reductions
from nemo_geomask.segments.padded import NO_TENSORS, Pooled, Prefix, Segments, TensorMap, Turns, find_turns
from nemo_geomask.segments.rank_comparison import PackedShape, checksum, compare_packings

_COMBINE: tuple[tuple[Callable[[Tensor, Tensor], Tensor], float], ...] = (
    (torch.add, 0.0),
    (torch.minimum, math.inf),
    (torch.maximum, -math.inf),
)
"""Function that combines two values, and its neutral element, for the sums, minima and maxima of :class:`Pooled`."""


class Runs(NamedTuple):
    """Indices of this rank's two runs of a sequence among the runs of all ranks, in the sequence's order.

    A run is a contiguous piece of a sequence. The context-parallel split gives each rank two runs of every sequence.
    The indices are the same for every sequence.
    """

    first: int
    second: int
    total: int
    """Number of runs of a sequence over all ranks."""


class PackedTokens(Segments):
    """Layout of packed tokens that a traced graph can rebuild from its tensors; base of :class:`PackedSegments`.

    Args:
        offsets: [S+1] int64, where the sequences start among this rank's N tokens.
        ids: [N] int64, the sequence of each token.
        splits: [S] int64, where among the N tokens the second run of each sequence starts. Other ranks hold the tokens
            between a sequence's two runs.
        runs: indices of the two runs among those of all ranks.
        groups: process groups that the sequences are spread over.
    """

    def __init__(self, offsets: Tensor, ids: Tensor, splits: Tensor, runs: Runs, groups: reductions.Groups) -> None:
        self._offsets, self._ids, self._splits, self._runs, self.groups = offsets, ids, splits, runs, groups

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See :attr:`Segments.tensors`."""
        return self._offsets, self._ids, self._splits

    def with_tensors(self, *tensors: Tensor) -> PackedTokens:
        """See :meth:`Segments.with_tensors`."""
        offsets, ids, splits = tensors
        return PackedTokens(offsets, ids, splits, self._runs, self.groups)

    def pool(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Pooled:
        """See :meth:`Segments.pool`.

        For k tensors this makes one all-gather of [k, S] in each group. The backward pass makes another one for the
        sums with a gradient.
        """
        self.check()
        differentiable = {name: value for name, value in sums.items() if value.requires_grad}
        constant_sums = {name: value for name, value in sums.items() if not value.requires_grad}
        # Minima are reduced as maxima of the negative values.
        negated = [-value for value in lowest.values()]
        summed, rest = reductions.reduce_segments(
            [*differentiable.values()],
            [*constant_sums.values(), *negated, *highest.values()],
            len(constant_sums),
            offsets=self._offsets,
            ids=self._ids,
        )
        summed, rest = reductions.reduce_over_ranks(summed, rest, len(constant_sums), self.groups, local_gradient=False)
        rows = iter([*summed.unbind(0), *rest.unbind(0)])

        def take_rows(tensors: TensorMap) -> dict[str, Tensor]:
            return {name: next(rows).to(value.dtype) for name, value in tensors.items()}

        pooled_sums = take_rows(differentiable) | take_rows(constant_sums)
        negated_minima, maxima = take_rows(lowest), take_rows(highest)
        return Pooled(
            {name: pooled_sums[name] for name in sums},
            {name: -value for name, value in negated_minima.items()},
            maxima,
        )

    def prefix(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Prefix:
        """See :meth:`Segments.prefix`.

        The local prefix of a token starts at the first token of its run. The run totals contain a token tensor for each
        run of all ranks. It has the values at the tokens of that run, if this rank holds the run, and the neutral
        element elsewhere, so that :meth:`pool` reduces it to the run's total. Each tensor thus adds [2·ranks, S] to a
        collective of :meth:`pool`.
        """
        is_second, position = self._is_in_second_run(), self._place_in_run()
        held_runs = {self._runs.first: ~is_second, self._runs.second: is_second}
        local, run_totals = Pooled({}, {}, {}), Pooled({}, {}, {})
        for tensors, (combine, neutral_value), scanned, totals in zip(
            (sums, lowest, highest), _COMBINE, local, run_totals, strict=True
        ):
            neutral = torch.full((), neutral_value, dtype=torch.float64, device=position.device)
            for name, tensor in tensors.items():
                values = tensor.detach().double()
                scanned[name] = reductions.scan_runs(values, position, combine)
                for run in range(self._runs.total) if self.groups else ():
                    is_held = run in held_runs
                    totals[_run_key(name, run)] = torch.where(held_runs[run], values, neutral) if is_held else neutral
        return Prefix(local, run_totals)

    def global_prefix(self, prefix: Prefix, pooled: Pooled) -> Pooled:
        """See :meth:`Segments.global_prefix`: combine each token's local prefix with the totals of earlier runs."""
        if not self.groups:
            return prefix.local
        is_second = self._is_in_second_run()
        over_ranks = Pooled({}, {}, {})
        for local, totals, (combine, neutral_value), combined in zip(
            prefix.local, pooled, _COMBINE, over_ranks, strict=True
        ):
            for name, value in local.items():
                total = torch.full_like(self._splits, neutral_value, dtype=torch.float64)
                before_run = [total]
                for run in range(self._runs.second):
                    total = combine(total, totals[_run_key(name, run)])
                    before_run.append(total)
                before_first, before_second = (self.spread(before_run[run]) for run in self._runs[:2])
                combined[name] = combine(value, torch.where(is_second, before_second, before_first))
        return over_ranks

    def turns(self, is_member: Tensor) -> Turns:
        """See :meth:`Segments.turns`."""
        return find_turns(is_member, self._place_in_run() == 0)

    def turn_sums(self, turns: Turns, sums: TensorMap) -> Prefix:
        """See :meth:`Segments.turn_sums`.

        For each run of all ranks, the run totals have the sums of the pieces at both of its ends, which turns that
        cross ranks are put together from, and once the number of tokens that are no members.
        """
        local = super().turn_sums(turns, sums)
        if not self.groups:
            return local
        is_second = self._is_in_second_run()
        held_runs = {self._runs.first: ~is_second, self._runs.second: is_second}
        values = {_NON_MEMBERS: (~turns.is_member).double()}
        for name, value in local.local.sums.items():
            values |= {f"{name} at the start": torch.where(turns.is_first, value, 0.0)}
            values |= {f"{name} at the end": torch.where(turns.is_last, value, 0.0)}
        zero = torch.zeros((), dtype=torch.float64, device=is_second.device)
        totals = {
            _run_key(name, run): torch.where(held_runs[run], value, zero) if run in held_runs else zero
            for name, value in values.items()
            for run in range(self._runs.total)
        }
        return local._replace(run_totals=Pooled(totals, {}, {}))

    def global_turn_sums(self, turns: Turns, local: Prefix, pooled: Pooled) -> dict[str, Tensor]:
        """See :meth:`Segments.global_turn_sums`: add to a piece what other runs have of its turn."""
        if not self.groups:
            return local.local.sums
        num_runs, is_second = self._runs.total, self._is_in_second_run()
        # A turn goes on through a run whose tokens are all members, or that has none.
        is_full = [pooled.sums[_run_key(_NON_MEMBERS, run)] == 0 for run in range(num_runs)]
        at_start, at_end = turns.is_first.gather(0, turns.start), turns.is_last.gather(0, turns.end)
        result = {}
        for name, piece in local.local.sums.items():
            starts, ends = (
                [pooled.sums[_run_key(f"{name} at the {side}", run)] for run in range(num_runs)]
                for side in ("start", "end")
            )
            before, after = _carry(ends, is_full), _carry(starts[::-1], is_full[::-1])[::-1]
            carried = [
                torch.where(is_second, self.spread(sums[self._runs.second]), self.spread(sums[self._runs.first]))
                for sums in (before, after)
            ]
            total = piece + torch.where(at_start, carried[0], 0.0) + torch.where(at_end, carried[1], 0.0)
            result[name] = torch.where(turns.is_member, total, 0.0)
        return result

    def check(self) -> None:
        """Do nothing; :class:`PackedSegments`, whose arguments name the ranks, compares these with the groups."""

    def _place_in_run(self) -> Tensor:
        """Return [N] int64, the place of each token in its run of the sequence, from 0."""
        start = torch.where(self._is_in_second_run(), self.spread(self._splits), self.spread(self._offsets[:-1]))
        return torch.arange(self._ids.numel(), device=self._ids.device) - start

    def _is_in_second_run(self) -> Tensor:
        """Return [N] bool, True for a token in the second of its sequence's runs."""
        return torch.arange(self._ids.numel(), device=self._ids.device) >= self.spread(self._splits)

    def spread(self, values: Tensor) -> Tensor:
        """Return [N], the value in [S] of each token's sequence; differentiable."""
        return reductions.spread(values, offsets=self._offsets, ids=self._ids)

    def reduce_over_ranks(
        self, loss: Tensor, statistics: Tensor, *, num_sums: int, num_minima: int
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Segments.reduce_over_ranks`; makes one all-gather of [1 + m] in each group."""
        self.check()
        if not self.groups:
            return loss, statistics

        def negate_minima(values: Tensor) -> Tensor:
            sums, minima, maxima = values.tensor_split((num_sums, num_sums + num_minima))
            return torch.cat([sums, -minima, maxima])

        # Minima are reduced as maxima of the negative values.
        total, reduced = reductions.reduce_over_ranks(
            loss.double().unsqueeze(0), negate_minima(statistics), num_sums, self.groups, local_gradient=True
        )
        return total[0].to(loss.dtype), negate_minima(reduced)


def _run_key(name: str, run: int) -> str:
    """Return the key in the run totals for one run of the tensor ``name``."""
    return f"{name} of run {run}"


_NON_MEMBERS = "tokens that are no members"


def _carry(ends: Sequence[Tensor], is_full: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each run, what the runs before it have of a turn that reaches its start: [S] each.

    Args:
        ends: sum of the piece at the end of each run.
        is_full: whether the run is one piece, so that what came before goes on through it.
    """
    carried, before = torch.zeros_like(ends[0]), []
    for end, full in zip(ends, is_full, strict=True):
        before.append(carried)
        carried = torch.where(full, carried + end, end)
    return before


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
