"""What a loss needs of its tokens' layout, and padded rows, where it is simple."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.segments.across import Groups

__all__ = ["NONE", "PaddedSegments", "Pooled", "Prefix", "Segments"]

NONE: Mapping[str, Tensor] = {}


class Pooled(NamedTuple):
    """[S] statistics under the keys that were asked for, the same bits on all ranks."""

    sums: dict[str, Tensor]
    lowest: dict[str, Tensor]
    highest: dict[str, Tensor]


class Prefix(NamedTuple):
    """Statistics of each token's prefix, itself included, in token layout: over the tokens at hand, and what
    :meth:`Segments.pool` has to be given too for those of whole prefixes, of other ranks' tokens."""

    here: Pooled
    parts: Pooled = Pooled({}, {}, {})


class Segments(ABC):
    """Sequences among the tokens at hand.

    Token tensors share one layout (the "token layout"); sequence tensors are [S]. Values handed in must already
    be neutral at tokens that don't count: 0 for sums, ±inf for extremes.

    Attributes:
        groups: over which statistics cost a collective; empty where a rank holds whole sequences.
    """

    groups: Groups = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What :meth:`of` needs to make this layout again, where a graph is traced."""
        return ()

    @abstractmethod
    def of(self, *tensors: Tensor) -> Segments:
        """The same kind of layout over the same ranks, from its :attr:`tensors`."""

    @abstractmethod
    def pool(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Pooled:
        """Statistics of token tensors over their whole sequences, all of them in one reduction.

        Args:
            sums: floating token-layout tensors to sum; differentiable.
            lowest: tensors to take the minimum of, without gradient; +inf for a sequence without tokens.
            highest: tensors to take the maximum of, without gradient; -inf for a sequence without tokens.
        """

    @abstractmethod
    def prefix(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Prefix:
        """Statistics of token tensors over each token's prefix, without gradient; arguments are those of :meth:`pool`.

        Sums are accumulated in float64 and returned in it. No collective: :attr:`Prefix.parts` travel by :meth:`pool`.
        """

    def whole_prefix(self, prefix: Prefix, pooled: Pooled) -> Pooled:
        """The statistics over all ranks' tokens, token layout, from what :meth:`pool` made of the parts."""
        return prefix.here

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """[S] to a tensor that broadcasts against the token layout; differentiable."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a token tensor over each sequence: [S], differentiable."""
        return self.pool({"": values}).sums[""]

    def mean(self, values: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean of a token tensor over each sequence: [S], differentiable; 0 where the weights sum to 0."""
        total, weights = self.pool({"total": values * weight, "weights": weight}).sums.values()
        return total / torch.where(weights == 0, 1.0, weights)

    def max(self, values: Tensor) -> Tensor:
        """Maximum of a token tensor over each sequence: [S], without gradient; -inf for a sequence without tokens."""
        return self.pool({}, highest={"": values}).highest[""]

    def prefixes(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of token tensors over each token's prefix, as :meth:`prefix`, with a collective of their own."""
        prefix = self.prefix(sums)
        return self.whole_prefix(prefix, self.pool(*prefix.parts)).sums

    def quantile(self, values: Tensor, counted: Tensor, share: float) -> Tensor:
        """Of each sequence's values that count, exactly as ``torch.quantile`` interpolates them: [S], float64.

        Found bit by bit from counts, three at a time, so that under context parallelism no value crosses ranks but the
        two that are interpolated: 13 collectives of at most [8, S].

        Args:
            values: token layout, float32, at least 0.
            counted: token layout, 1 or 0.
            share: from 0 to 1.

        Returns: the quantile; 0 for a sequence without a value.
        """
        # Floats of one sign are ordered as their bits are.
        bits, none = (values + 0.0).view(torch.int32).long(), counted == 0
        number = self.sum(counted.double())
        rank = (number - 1.0).clamp(min=0.0) * share
        base = torch.zeros_like(number, dtype=torch.int64)
        for shift in range(30, -1, -3):
            steps = {str(step): base + (step << shift) for step in range(1, 8)}
            below = self.pool({name: counted * (bits < self.spread(step)) for name, step in steps.items()}).sums
            # As many steps up as leave no more than the rank's values below.
            base = base + (torch.stack(list(below.values())) <= rank.floor()).sum(dim=0) * (1 << shift)
        beyond = none | (bits <= self.spread(base))
        found = self.pool({"": counted * (bits <= self.spread(base))}, {"": torch.where(beyond, torch.inf, values)})
        low = base.int().view(torch.float32).double()
        high = torch.where(found.sums[""] > rank.floor() + 1.0, low, found.lowest[""].double())
        # The last value has none above it, and the fraction is 0.
        high = torch.where(high.isinf(), low, high)
        return torch.where(number == 0, 0.0, low + (rank - rank.floor()) * (high - low))

    def whole(self, value: Tensor, rest: Tensor, *, sums: int, lowest: int) -> tuple[Tensor, Tensor]:
        """This rank's part of a total and its totals, minima and maxima as those over all ranks' tokens.

        Args:
            value: 0-d, over this rank's tokens, differentiable: its gradient is that of this rank's part.
            rest: [m] float64, likewise, without gradient: totals, then minima, then maxima.
            sums: number of totals.
            lowest: number of minima.

        Returns: both, over all ranks; the same bits on all of them.
        """
        return value, rest


class PaddedSegments(Segments):
    """Rows of a padded batch: token layout [B, T], one sequence a row, S = B."""

    def pool(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Pooled:
        """See :meth:`Segments.pool`."""
        return Pooled(
            {name: value.sum(dim=-1) for name, value in sums.items()},
            {name: _or_empty(value.detach(), torch.inf).amin(dim=-1) for name, value in lowest.items()},
            {name: _or_empty(value.detach(), -torch.inf).amax(dim=-1) for name, value in highest.items()},
        )

    def prefix(
        self, sums: Mapping[str, Tensor], lowest: Mapping[str, Tensor] = NONE, highest: Mapping[str, Tensor] = NONE
    ) -> Prefix:
        """See :meth:`Segments.prefix`."""
        return Prefix(
            Pooled(
                {name: value.detach().double().cumsum(-1) for name, value in sums.items()},
                {name: value.detach().cummin(-1).values for name, value in lowest.items()},
                {name: value.detach().cummax(-1).values for name, value in highest.items()},
            )
        )

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [B, 1], which broadcasts against [B, T]."""
        return values.unsqueeze(-1)

    def of(self, *tensors: Tensor) -> PaddedSegments:
        """See :meth:`Segments.of`."""
        return self


def _or_empty(value: Tensor, empty: float) -> Tensor:
    # A reduction over no element is an error in torch; a row of width 0 is an empty response here.
    return value if value.shape[-1] else value.new_full((*value.shape[:-1], 1), empty)
