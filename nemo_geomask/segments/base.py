"""What a loss needs of its tokens' layout, and padded rows, where it is simple."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NONE", "PaddedSegments", "Pooled", "Segments"]

NONE: Mapping[str, Tensor] = {}


class Pooled(NamedTuple):
    """[S] statistics under the keys that were asked for, the same bits on all ranks."""

    sums: dict[str, Tensor]
    lowest: dict[str, Tensor]
    highest: dict[str, Tensor]


class Segments(ABC):
    """Sequences among the tokens at hand.

    Token tensors share one layout (the "token layout"); sequence tensors are [S]. Values handed in must already
    be neutral at tokens that don't count: 0 for sums, ±inf for extremes.

    Attributes:
        crosses_ranks: whether statistics cost a collective.
    """

    crosses_ranks: bool = False

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

    def whole(self, sums: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's totals, minima and maxima as those over all ranks' tokens.

        Args:
            sums: [m], over this rank's tokens.
            lowest: [i], likewise.
            highest: [j], likewise.

        Returns:
            The same shapes, float64, without gradient, the same bits on all ranks.
        """
        return sums.detach().double(), lowest.detach().double(), highest.detach().double()


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

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [B, 1], which broadcasts against [B, T]."""
        return values.unsqueeze(-1)


def _or_empty(value: Tensor, empty: float) -> Tensor:
    # A reduction over no element is an error in torch; a row of width 0 is an empty response here.
    return value if value.shape[-1] else value.new_full((*value.shape[:-1], 1), empty)
