"""Packed sequences, whole or a rank's share of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, RanksDisagreeError, ShapeError
from nemo_geomask.segments import across
from nemo_geomask.segments.base import NONE, Pooled, Prefix, Segments

__all__ = ["PackedSegments"]


_KINDS: tuple[tuple[Callable[[Tensor, Tensor], Tensor], float], ...] = (
    (torch.add, 0.0),
    (torch.minimum, math.inf),
    (torch.maximum, -math.inf),
)
"""How sums, minima and maxima combine, and those of nothing."""


def _part(name: str, run: int) -> str:
    return f"{name} of run {run}"


class PackedTokens(Segments):
    """Packed tokens as tensors alone: what a traced graph can take and :class:`PackedSegments` is made of.

    Args:
        offsets: [S+1] int64, where the sequences start among this rank's N tokens.
        ids: [N] int64, whose sequence each is.
        splits: [S] int64, where among them the second of a sequence's two runs starts: what lies between the two is on
            other ranks.
        runs: the places of the two among the runs of all ranks, and how many those are.
        groups: over which the sequences are spread.
    """

    def __init__(
        self, offsets: Tensor, ids: Tensor, splits: Tensor, runs: tuple[int, int, int], groups: across.Groups
    ) -> None:
        self._offsets, self._ids, self._splits, self._runs, self.groups = offsets, ids, splits, runs, groups

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See :attr:`Segments.tensors`."""
        return self._offsets, self._ids, self._splits

    def of(self, *tensors: Tensor) -> PackedTokens:
        """See :meth:`Segments.of`."""
        offsets, ids, splits = tensors
        return PackedTokens(offsets, ids, splits, self._runs, self.groups)

    def pool(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Pooled:
        """See :meth:`Segments.pool`.

        One all-gather of [k, S] a group, and one backward for the sums through which a gradient flows.
        """
        self.check()
        moving = [name for name, value in sums.items() if value.requires_grad]
        fixed = [name for name, value in sums.items() if not value.requires_grad]
        names = [*moving, *fixed]
        # Minima travel as maxima of the negative.
        values = [*(sums[name] for name in names), *(-value for value in lowest.values()), *highest.values()]
        summed, rest = across.pool(
            values[: len(moving)], values[len(moving) :], len(fixed), offsets=self._offsets, ids=self._ids
        )
        summed, rest = across.across_ranks(summed, rest, len(fixed), self.groups, own_gradient=False)
        found = zip([*summed.unbind(0), *rest.unbind(0)], values, strict=True)
        rows = [row.to(value.dtype) for row, value in found]
        pooled, peaks = dict(zip(names, rows, strict=False)), rows[len(names) :]
        return Pooled(
            {name: pooled[name] for name in sums},
            {name: -peak for name, peak in zip(lowest, peaks, strict=False)},
            dict(zip(highest, peaks[len(lowest) :], strict=True)),
        )

    def prefix(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Prefix:
        """See :meth:`Segments.prefix`. Under context parallelism its parts are the totals of each rank's runs, of which
        it has two in a sequence: [2·ranks, S] for a tensor."""
        second, place = self._second(), torch.arange(self._ids.numel(), device=self._ids.device)
        place = place - torch.where(second, self.spread(self._splits), self.spread(self._offsets[:-1]))
        given = [{name: value.detach().double() for name, value in of.items()} for of in (sums, lowest, highest)]
        here, parts = [], []
        for values, (combine, nothing) in zip(given, _KINDS, strict=True):
            here.append({name: across.scan(value, place, combine) for name, value in values.items()})
            # Other ranks' runs have nothing here; all are merged as any other statistic is.
            idle = torch.full((), nothing, dtype=torch.float64, device=place.device)
            mine = {self._runs[0]: ~second, self._runs[1]: second}
            parts.append(
                {
                    _part(name, run): torch.where(mine[run], value, idle) if run in mine else idle
                    for name, value in values.items()
                    for run in (range(self._runs[2]) if self.groups else ())
                }
            )
        return Prefix(Pooled(*here), Pooled(*parts))

    def whole_prefix(self, prefix: Prefix, pooled: Pooled) -> Pooled:
        """See :meth:`Segments.whole_prefix`."""
        if not self.groups:
            return prefix.here
        second = self._second()
        whole: list[dict[str, Tensor]] = []
        for values, found, (combine, nothing) in zip(prefix.here, pooled, _KINDS, strict=True):
            whole.append({})
            for name, value in values.items():
                before = [torch.full_like(self._splits, nothing, dtype=torch.float64)]
                for run in range(self._runs[1]):
                    before.append(combine(before[-1], found[_part(name, run)]))
                first, later = (self.spread(before[run]) for run in self._runs[:2])
                whole[-1][name] = combine(value, torch.where(second, later, first))
        return Pooled(*whole)

    def check(self) -> None:
        """Raise where the groups are not those that the tokens are spread over; tensors alone don't tell."""

    def _second(self) -> Tensor:
        """[N] bool, whether a token is in the second of its sequence's runs."""
        return torch.arange(self._ids.numel(), device=self._ids.device) >= self.spread(self._splits)

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [N]."""
        return across.spread(values, offsets=self._offsets, ids=self._ids)

    def whole(self, value: Tensor, rest: Tensor, *, sums: int, lowest: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Segments.whole`. One all-gather of [1 + m] a group."""
        self.check()
        if not self.groups:
            return value, rest
        low = sums + lowest
        signed = torch.cat([rest[:sums], -rest[sums:low], rest[low:]])
        total, found = across.across_ranks(value.double().unsqueeze(0), signed, sums, self.groups, own_gradient=True)
        return total[0].to(value.dtype), torch.cat([found[:sums], -found[sums:low], found[low:]])


class PackedSegments(PackedTokens):
    """Sequences packed one after another: token layout [N], whole or one rank's share.

    Under context parallelism a rank holds, of every sequence, chunks r and 2·CP−1−r of 2·CP equal ones, in that order
    (Megatron's load-balanced split). Where the loss runs on sequence-parallel shares, as Fast-LLM's does, those tokens
    are cut once more, into SP contiguous equal slices in rank order, wherever that cuts a sequence. Either way a rank's
    share of a sequence is contiguous, so that its statistics need no index arithmetic.

    Padded rows [B, T] whose columns are split over context-parallel ranks are packed rows of equal lengths:
    ``cu_seqlens=range(0, B * T + 1, T)``, with each rank's [B, T/CP] tensors flattened. Positions there are those of
    the model's input: put beside each the data of the token that it predicts, the next one.

    Args:
        cu_seqlens: [S+1] token offsets of the sequences in the whole packed row, padding included, starting at 0:
            Megatron's ``cu_seqlens_q_padded``. On the host (a list or CPU tensor) it costs no synchronisation.
        device: where the tokens are.
        cp_rank: this rank in the context-parallel group.
        cp_size: its size; each padded length must be a multiple of 2·``cp_size``.
        sp_rank: this rank among those that share the context-parallel rank's tokens.
        sp_size: their number; it must divide those tokens.
        groups: over which the tokens of a sequence are spread: the context-parallel group, the sequence-parallel one,
            one group of both together (the fewest collectives), or the two groups in that order. Without any, a share
            has its :attr:`token_index` but no statistics.

    Attributes:
        count: S.
        tokens: N, those of this rank.
        cu_seqlens: [S+1] int64, as given, on the tokens' device.

    Raises:
        ArgumentError: a rank is outside its size.
        ShapeError: offsets aren't integers, don't start at 0, decrease, or don't divide into the shares; from the
            statistics, without a collective: a share was given no groups, or groups in which its rank and size are
            others.

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
        groups: across.Groups = (),
    ) -> None:
        offsets = torch.as_tensor(cu_seqlens, device="cpu")
        if offsets.numel() and (offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool):
            raise ShapeError(f"cu_seqlens must be integers, token offsets of the sequences, but it is {offsets.dtype}")
        offsets = offsets.to(torch.int64)
        lengths = offsets.diff()
        if offsets.dim() != 1 or offsets.numel() == 0 or int(offsets[0]) != 0 or bool((lengths < 0).any()):
            raise ShapeError(f"cu_seqlens must be non-decreasing offsets that start at 0, but it is {offsets.tolist()}")
        for kind, rank, size in (("cp", cp_rank, cp_size), ("sp", sp_rank, sp_size)):
            if not 0 <= rank < size:
                raise ArgumentError(f"{kind}_rank must be from 0 to {kind}_size - 1 = {size - 1}, but it is {rank}")
        if cp_size > 1 and bool((lengths % (2 * cp_size) != 0).any()):
            raise ShapeError(
                f"each padded sequence length must be a multiple of 2·{cp_size} for context-parallel size {cp_size}, "
                f"but the lengths are {lengths.tolist()}; pad the sequences to that multiple"
            )
        tokens, rest = divmod(int(offsets[-1]) // cp_size, sp_size)
        if rest:
            raise ShapeError(
                f"the {tokens * sp_size + rest} tokens of a context-parallel rank don't divide into {sp_size} equal "
                "shares, sp_size; pad the packed row"
            )
        self.count, self.tokens = lengths.numel(), tokens
        self.groups = groups
        self._shares = ((cp_rank, cp_size), (sp_rank, sp_size))

        # From here on the device's own arithmetic: nothing of [N] crosses from the host.
        self.cu_seqlens = offsets.to(device, non_blocking=True)
        first = sp_rank * tokens
        self._offsets = (self.cu_seqlens // cp_size).clamp(first, first + tokens) - first
        self._ids = torch.repeat_interleave(self._offsets.diff(), output_size=tokens)
        self._chunks = self.cu_seqlens.diff() // (2 * cp_size)
        splits = self.cu_seqlens[:-1] // cp_size + self._chunks
        self._splits = splits.clamp(first, first + tokens) - first if cp_size > 1 else self._offsets[1:]
        self._runs = (
            cp_rank * sp_size + sp_rank,
            (2 * cp_size - 1 - cp_rank) * sp_size + sp_rank,
            2 * cp_size * sp_size,
        )

    @functools.cached_property
    def position(self) -> Tensor:
        """[N] int64, place of each of this rank's tokens in its padded sequence."""
        (cp_rank, cp_size), _ = self._shares
        chunk = self.spread(self._chunks)
        local = self._place - self.spread(self.cu_seqlens[:-1]) // cp_size
        # In the second of its chunks a rank has passed those of all ranks after it, twice.
        return local + torch.where(local < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank) * chunk

    @functools.cached_property
    def token_index(self) -> Tensor:
        """[N] int64, place of each of this rank's tokens in the whole packed row."""
        return self._place if self._shares[0][1] == 1 else self.spread(self.cu_seqlens[:-1]) + self.position

    @property
    def _place(self) -> Tensor:
        """[N] int64, place of each among the tokens of this context-parallel rank."""
        first = self._shares[1][0] * self.tokens
        return torch.arange(first, first + self.tokens, device=self._ids.device)

    def verify(self, **sequences: Tensor) -> None:
        """Compare the packing over the groups, by one small all-gather a group that is read back.

        Ranks that hold other sequences, or two that hold the same share, give wrong numbers or bring the process group
        down; this names them. For a trainer's first step.

        Args:
            sequences: [S] tensors that the ranks must hold alike, such as ``sample_mask`` and ``rewards``, by name.

        Raises: RanksDisagreeError: the ranks don't hold the shares of one packed row, or hold other values of
        ``sequences``; on all of them.
        """
        self.check()
        (cp_rank, cp_size), (sp_rank, sp_size) = self._shares
        offsets = self.cu_seqlens.cpu()
        identity = (self.count, int(offsets[-1]), int((offsets * torch.arange(1, self.count + 2)).sum()))
        ranks = torch.tensor([[*identity, sp_rank * cp_size + cp_rank]], device=self._ids.device)
        for group in self.groups:
            ranks = across.gathered(ranks, group).flatten(0, 1)
        *packings, shares = zip(*ranks.tolist(), strict=True)
        if any(len(set(found)) > 1 for found in packings):
            raise RanksDisagreeError(
                f"the ranks hold different packings: {list(packings[0])} sequences and {list(packings[1])} tokens in "
                "cu_seqlens, by rank, or sequences of other lengths; give all ranks of the groups the same cu_seqlens"
            )
        if sorted(shares) != list(range(cp_size * sp_size)):
            raise RanksDisagreeError(
                f"the ranks hold the shares {list(shares)} (sp_rank·cp_size + cp_rank), but together they must be 0 to "
                f"{cp_size * sp_size - 1}, each once; give every rank its own cp_rank and sp_rank"
            )
        for name, value in sequences.items():
            held = value.detach().double().reshape(1, -1)
            for group in self.groups:
                held = across.gathered(held, group).flatten(0, 1)
            differs = ((held != held[0]) & ~(held.isnan() & held[0].isnan())).any(dim=0).nonzero().flatten().tolist()
            if differs:
                raise RanksDisagreeError(
                    f"the ranks hold different {name} for the same sequences, the first is sequence {differs[0]} with "
                    f"{held[:, differs[0]].tolist()} by rank; give all ranks that share sequences the same {name}"
                )

    def check(self) -> None:
        """Raise unless this share's groups are those that it is a share in; reads their sizes, no collective.

        Raises: ShapeError: they are not.
        """
        split = [share for share in self._shares if share[1] > 1]
        if not self.groups:
            if split:
                raise ShapeError(
                    "these segments are a share of the packed row, and no groups were given over which their "
                    "statistics could be whole; give groups=(context-parallel group,)"
                )
            return
        found = [(dist.get_rank(group), dist.get_world_size(group)) for group in self.groups]
        (cp_rank, cp_size), (sp_rank, sp_size) = self._shares
        if len(found) == 1 and len(split) == 2:
            fits = found[0][1] == cp_size * sp_size  # in whatever order its ranks are
        else:
            fits = found == (list(self._shares) if len(found) > 1 else split or [(0, 1)])
        if not fits:
            raise ShapeError(
                f"(rank, size) in the groups is {found}, but (cp_rank, cp_size) is {cp_rank, cp_size} and (sp_rank, "
                f"sp_size) is {sp_rank, sp_size}; give the context-parallel group, the sequence-parallel group, one "
                "group of both, or the two in that order"
            )
