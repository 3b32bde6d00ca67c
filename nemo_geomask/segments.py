"""Who belongs to which sequence, and statistics over it.

Everything in a loss that speaks of a sequence goes through a :class:`Segments`: pool token values to one value a
sequence, work there, spread back. A loss written on it does not know how its tokens are laid out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["PaddedSegments", "Segments"]


class Segments(ABC):
    """Sequences among the tokens at hand.

    Token tensors share one layout (the "token layout"); sequence tensors are [S]. Values handed in must already
    be neutral at tokens that don't count: 0 for sums, ±inf for extremes.
    """

    @abstractmethod
    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum each token tensor over its sequence, all of them in one reduction.

        Args:
            values: token-layout tensors of one dtype.

        Returns:
            The same keys with [S] tensors; differentiable.
        """

    @abstractmethod
    def extremes(self, lowest: Mapping[str, Tensor], highest: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Minimum of each tensor in ``lowest`` and maximum of each in ``highest``, over its sequence.

        Returns:
            Two mappings with the keys of ``lowest`` and ``highest`` and [S] tensors; a sequence without tokens
            gives +inf and -inf.
        """

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """[S] to a tensor that broadcasts against the token layout; differentiable."""


class PaddedSegments(Segments):
    """Rows of a padded batch: token layout [B, T], one sequence a row, S = B."""

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Segments.sum`."""
        return {name: value.sum(dim=-1) for name, value in values.items()}

    def extremes(self, lowest: Mapping[str, Tensor], highest: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """See :meth:`Segments.extremes`."""
        return (
            {name: _extreme(value, torch.amin, float("inf")) for name, value in lowest.items()},
            {name: _extreme(value, torch.amax, -float("inf")) for name, value in highest.items()},
        )

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [B, 1], which broadcasts against [B, T]."""
        return values.unsqueeze(-1)


def _extreme(value: Tensor, reduce, empty: float) -> Tensor:  # type: ignore[no-untyped-def]
    # A reduction over no element is an error in torch; a row of width 0 is an empty response here.
    if value.shape[-1] == 0:
        return value.new_full(value.shape[:-1], empty)
    result: Tensor = reduce(value, dim=-1)
    return result
