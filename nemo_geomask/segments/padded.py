"""The interface of token layouts, and its implementation for padded rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.segments.packed_reductions import Groups

TensorMap = Mapping[str, Tensor]
NO_TENSORS: TensorMap = {}


class Pooled(NamedTuple):
    """Statistics of the sequences, each [S], under the keys of the pooled tensors; the same bits on all ranks.

    Inputs of a pool, and statistics of prefixes, use the same three fields for token tensors.
    """

    sums: dict[str, Tensor]
    lowest: dict[str, Tensor]
    highest: dict[str, Tensor]


class Prefix(NamedTuple):
    """Statistics of each token's prefix (the token included) on this rank, and what other ranks need of them.

    A run is a contiguous piece of a sequence on one rank.
    """

    local: Pooled
    """Statistics in token layout. Under context parallelism a prefix starts with the token's run."""
    run_totals: Pooled = Pooled({}, {}, {})
    """Token tensors whose :meth:`Segments.pool` gives the totals of all ranks' runs.

    Empty without context parallelism. :meth:`Segments.global_prefix` takes the pooled totals."""


class Turns(NamedTuple):
    """Contiguous runs of member tokens, the turns, as far as this rank's tokens show them; all in token layout.

    A piece is the part of a turn in one of this rank's runs of a sequence.
    """

    is_member: Tensor  # bool
    start: Tensor  # int64, index along the last dimension of the first token of the token's piece
    end: Tensor  # int64, index of its last token
    is_first: Tensor  # bool, first token of its run of the sequence
    is_last: Tensor  # bool, last token of its run


def find_turns(is_member: Tensor, is_first: Tensor) -> Turns:
    """Return the turns of tokens whose runs of a sequence start where ``is_first`` is True."""
    index = torch.arange(is_member.shape[-1], device=is_member.device).expand_as(is_member)
    is_last = torch.nn.functional.pad(is_first[..., 1:], (0, 1), value=True)
    # A piece ends at the last member of a run, or before a token that is no member.
    before, after = (torch.nn.functional.pad(is_member, pad)[..., s] for pad, s in _NEIGHBOURS)
    begins, ends = is_member & (is_first | ~before), is_member & (is_last | ~after)
    start = torch.where(begins, index, 0).cummax(-1).values
    end = torch.where(ends, index, is_member.shape[-1] - 1).flip(-1).cummin(-1).values.flip(-1)
    return Turns(is_member, start, end, is_first, is_last)


_NEIGHBOURS = (((1, 0), slice(None, -1)), ((0, 1), slice(1, None)))
"""Padding and slice that give each token the value of the one before it, and of the one after it."""


def sum_pieces(values: Tensor, turns: Turns) -> Tensor:
    """Return the float64 sum of the values, 0 where they don't count, over each member's piece; 0 at other tokens."""
    totals = torch.nn.functional.pad(values.detach().double().cumsum(-1), (1, 0))
    piece = totals.gather(-1, turns.end + 1) - totals.gather(-1, turns.start)
    return torch.where(turns.is_member, piece, 0.0)


class Segments(ABC):
    """Layout of a rank's tokens: which sequence each token belongs to.

    Token tensors share one shape, the "token layout": [B, T] if padded, [N] if packed. Sequence tensors are [S].
    Tensors to be pooled must already be neutral at tokens that don't count: 0 for sums, +inf for minima, -inf for
    maxima.

    Attributes:
        groups: process groups over which the tokens of a sequence are spread; a statistic takes a collective in each.
            Empty if the rank holds complete sequences.
    """

    groups: Groups = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the layout: inputs of a compiled graph, which rebuilds the layout by :meth:`with_tensors`."""
        return ()

    @abstractmethod
    def with_tensors(self, *tensors: Tensor) -> Segments:
        """Return a layout of the same kind, over the same ranks, with these as its :attr:`tensors`."""

    @abstractmethod
    def pool(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Pooled:
        """Pool token tensors over their sequences, across ranks, all of them in one reduction.

        Args:
            sums: floating token-layout tensors to sum; differentiable.
            lowest: tensors to take the minimum of, without gradient; +inf for a sequence without tokens.
            highest: tensors to take the maximum of, without gradient; -inf for a sequence without tokens.

        Returns: [S] each, in the dtype of its tensor, under the same keys.
        """

    @abstractmethod
    def prefix(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Prefix:
        """Pool token tensors over each token's prefix on this rank, without gradient and without a collective.

        Sums are accumulated and returned in float64. For the prefix over all ranks' tokens, add
        :attr:`Prefix.run_totals` to the tensors of a :meth:`pool` and hand its result to :meth:`global_prefix`.

        Args:
            sums, lowest, highest: as for :meth:`pool`.
        """

    @abstractmethod
    def turns(self, is_member: Tensor) -> Turns:
        """Return the turns among this rank's tokens: contiguous runs of a sequence's members, bool in token layout."""

    def turn_sums(self, turns: Turns, sums: TensorMap) -> Prefix:
        """Sum token tensors over the turns' pieces on this rank, float64, without gradient and without a collective.

        As with :meth:`prefix`, add :attr:`Prefix.run_totals` to the tensors of a :meth:`pool`, and hand its result to
        :meth:`global_turn_sums` for the sums over complete turns.
        """
        return Prefix(Pooled({name: sum_pieces(value, turns) for name, value in sums.items()}, {}, {}))

    def global_turn_sums(self, turns: Turns, local: Prefix, pooled: Pooled) -> dict[str, Tensor]:
        """Return the sums over each member's complete turn, in token layout."""
        return local.local.sums

    def global_prefix(self, prefix: Prefix, pooled: Pooled) -> Pooled:
        """Return the statistics of each token's prefix over all ranks' tokens, in token layout.

        Args:
            prefix: from :meth:`prefix`.
            pooled: from :meth:`pool` of tensors that include ``prefix.run_totals``.
        """
        return prefix.local

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """Return the value [S] of each token's sequence, broadcastable to the token layout; differentiable."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a token tensor over each sequence: [S], differentiable."""
        return self.pool({"": values}).sums[""]

    def prefix_sums(self, sums: TensorMap) -> dict[str, Tensor]:
        """Return float64 sums of token tensors over each token's prefix on all ranks, by a collective of their own."""
        prefix = self.prefix(sums)
        return self.global_prefix(prefix, self.pool(*prefix.run_totals)).sums

    def quantile(self, values: Tensor, counted: Tensor, fraction: float) -> Tensor:
        """Return a quantile of each sequence's counted values, exactly as ``torch.quantile`` interpolates it.

        The result is interpolated between two neighbouring values. A radix search determines the bits of the lower one,
        three at a time, from the numbers of values below several candidates. Under context parallelism only these
        numbers and the upper value cross ranks, in 13 collectives of at most [7, S].

        Args:
            values: token layout, float32, at least 0.
            counted: token layout, bool or 1 and 0: marks the tokens whose values enter.
            fraction: from 0 to 1.

        Returns: [S], float64; 0 for a sequence without a counted value.
        """
        # The bits of non-negative floats, read as integers, have the same order as the floats. -0 comes before 0.
        bits, is_counted = values.view(torch.int32).long(), counted != 0

        def count(condition: Tensor) -> Tensor:
            return (is_counted & condition).float()

        number = self.sum(is_counted.double())
        # torch.quantile interpolates between the values of ranks floor(rank) and floor(rank) + 1.
        rank = (number - 1.0).clamp(min=0.0) * fraction
        low_bits = torch.zeros_like(number, dtype=torch.int64)
        for shift in range(30, -1, -3):
            candidates = {str(digit): low_bits + (digit << shift) for digit in range(1, 8)}
            below = self.pool({digit: count(bits < self.spread(end)) for digit, end in candidates.items()}).sums
            # The largest digit that leaves at most floor(rank) values below.
            digit = (torch.stack(list(below.values())) <= rank.floor()).sum(dim=0)
            low_bits = low_bits + digit * (1 << shift)
        is_low = bits <= self.spread(low_bits)
        pooled = self.pool({"": count(is_low)}, {"": torch.where(is_counted & ~is_low, values, torch.inf)})
        low = low_bits.int().view(torch.float32).double()
        # Where several values equal the lower one, the upper one may be among them.
        high = torch.where(pooled.sums[""] > rank.floor() + 1.0, low, pooled.lowest[""].double())
        # If the lower value is the largest, there is no upper value. None is needed, as the rank is then an integer.
        high = torch.where(high.isinf(), low, high)
        return torch.where(number == 0, 0.0, low + (rank - rank.floor()) * (high - low))

    def reduce_over_ranks(
        self, loss: Tensor, statistics: Tensor, *, num_sums: int, num_minima: int
    ) -> tuple[Tensor, Tensor]:
        """Reduce the loss and the statistics of this rank's tokens over all ranks.

        Args:
            loss: 0-d, over this rank's tokens, differentiable. Its gradient stays that of this rank's part.
            statistics: [m] float64, over this rank's tokens, without gradient: sums, then minima, then maxima.
            num_sums: number of sums in ``statistics``.
            num_minima: number of minima in ``statistics``.

        Returns: both, over all ranks' tokens; the same bits on all ranks.
        """
        return loss, statistics


class PaddedSegments(Segments):
    """Rows of a padded batch: token layout [B, T], one sequence a row, S = B."""

    def pool(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Pooled:
        """See :meth:`Segments.pool`."""
        return Pooled(
            {name: value.sum(dim=-1) for name, value in sums.items()},
            {name: _fill_empty_rows(value.detach(), torch.inf).amin(dim=-1) for name, value in lowest.items()},
            {name: _fill_empty_rows(value.detach(), -torch.inf).amax(dim=-1) for name, value in highest.items()},
        )

    def prefix(self, sums: TensorMap, lowest: TensorMap = NO_TENSORS, highest: TensorMap = NO_TENSORS) -> Prefix:
        """See :meth:`Segments.prefix`."""
        return Prefix(
            Pooled(
                {name: value.detach().double().cumsum(-1) for name, value in sums.items()},
                {name: value.detach().cummin(-1).values for name, value in lowest.items()},
                {name: value.detach().cummax(-1).values for name, value in highest.items()},
            )
        )

    def turns(self, is_member: Tensor) -> Turns:
        """See :meth:`Segments.turns`."""
        is_first = torch.zeros_like(is_member)
        is_first[..., :1] = True
        return find_turns(is_member, is_first)

    def spread(self, values: Tensor) -> Tensor:
        """Spread [B] to [B, 1], which broadcasts against [B, T]."""
        return values.unsqueeze(-1)

    def with_tensors(self, *tensors: Tensor) -> PaddedSegments:
        """See :meth:`Segments.with_tensors`."""
        return self


def _fill_empty_rows(values: Tensor, neutral: float) -> Tensor:
    """Return the values [B, T], or [B, 1] of ``neutral`` if T = 0, since ``amin`` and ``amax`` refuse an empty row."""
    return values if values.shape[-1] else values.new_full((*values.shape[:-1], 1), neutral)
