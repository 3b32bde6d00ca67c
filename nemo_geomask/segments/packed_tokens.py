"""Pooling over packed sequences, from the tensors of their layout alone, so that a traced graph can rebuild it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.segments import packed_reductions as reductions
from nemo_geomask.segments.padded import NO_TENSORS, Pooled, Prefix, Segments, TensorMap, Turns, find_turns

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
