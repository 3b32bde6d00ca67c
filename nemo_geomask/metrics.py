"""What a step reports: sums computed on the device, read back once.

Every metric but the extrema that NeMo-RL defines is a sum over tokens or sequences divided by a global count, so it
adds up over microbatches and ranks. Nothing here synchronises with the device except :meth:`MetricSums.read`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nemo_geomask.segments import Segments

__all__ = ["MetricSums", "Normalizer"]

Normalizer = Literal["tokens", "sequences", "none"]


class MetricSums:
    """Collects metrics of one microbatch and makes them whole over the ranks that share its sequences.

    Args:
        weight: token layout, float32; 0 at tokens that don't train.
        sample_mask: [S], float32.
        segments: who belongs to which sequence, and over which ranks.
    """

    def __init__(self, weight: Tensor, sample_mask: Tensor, segments: Segments) -> None:
        self._weight = weight
        self._sample_mask = sample_mask
        self._scratch = torch.empty_like(weight)
        self._segments = segments
        self._tokens: dict[str, Tensor] = {}
        self._sequences: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._scalars: dict[str, Tensor] = {}
        self._lowest: dict[str, Tensor] = {}
        self._highest: dict[str, Tensor] = {}
        self._kinds: dict[str, Normalizer] = {}

    def tokens(self, name: str, value: Tensor, *, accumulate: torch.dtype = torch.float32) -> None:
        """Mean over the step's valid tokens.

        Args:
            name: of the metric.
            value: float32, finite, broadcasts against the token layout.
            accumulate: dtype of the sum; float64 where float32 could not hold it.
        """
        # At once, while the value is in cache; kept until the end it would only take memory. Not torch.dot: over
        # thousands of ratios near 1 it may lose three digits, which bounds such as 1 + 3e-4 need.
        torch.mul(value.detach(), self._weight, out=self._scratch)
        self._tokens[name] = self._scratch.sum(dtype=accumulate)
        self._kinds[name] = "tokens"

    def sequences(self, name: str, value: Tensor, *, accumulate: torch.dtype = torch.float32) -> None:
        """Mean over the step's valid sequences; ``value`` is [S], the rest as for :meth:`tokens`."""
        self._sequences[name] = (value.detach() * self._sample_mask).sum(dtype=accumulate)
        self._kinds[name] = "sequences"

    def alias(self, name: str, *, of: str) -> None:
        """The metric ``of`` under another name as well."""
        values = self._tokens if of in self._tokens else self._sequences
        values[name], self._kinds[name] = values[of], self._kinds[of]

    def part(self, name: str, value: Tensor, normalizer: Normalizer = "none") -> None:
        """A 0-d number over this rank's tokens, divided already by the count that ``normalizer`` names."""
        self._parts[name] = value.detach()
        self._kinds[name] = normalizer

    def scalar(self, name: str, value: Tensor) -> None:
        """A 0-d count over sequences, which all ranks that share them hold alike."""
        self._scalars[name] = value
        self._kinds[name] = "none"

    def extrema(self, name: str, lowest: Tensor, highest: Tensor) -> None:
        """0-d minimum and maximum, reported under ``name`` with NeMo-RL's suffixes."""
        self._lowest[f"{name}_min"], self._highest[f"{name}_max"] = lowest.detach(), highest.detach()
        self._kinds[f"{name}_min"] = self._kinds[f"{name}_max"] = "none"

    def normalizers(self) -> dict[str, Normalizer]:
        """Global count that each metric collected so far is divided by."""
        return dict(self._kinds)

    def read(self, *, global_seqs: Tensor, global_toks: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
        """All metrics as floats, by one copy from the device, and the whole parts as tensors.

        One vector crosses ranks.

        Args:
            global_seqs: 0-d, valid sequences in the step.
            global_toks: 0-d, valid tokens in the step.

        Returns:
            The metrics, and 0-d tensors of what :meth:`part` collected.
        """
        sums = torch.cat([_stack(self._tokens, self._weight), _stack(self._parts, self._weight)])
        whole, lowest, highest = self._segments.whole(
            sums, _stack(self._lowest, self._weight), _stack(self._highest, self._weight)
        )
        token_sums, parts = whole[: len(self._tokens)], whole[len(self._tokens) :]
        values = [
            token_sums / _divisor(global_toks),
            _stack(self._sequences, self._weight) / _divisor(global_seqs),
            parts,
            _stack(self._scalars, self._weight),
            lowest,
            highest,
        ]
        names = [*self._tokens, *self._sequences, *self._parts, *self._scalars, *self._lowest, *self._highest]
        # In float64, as the counts and squared weights among them.
        flat: list[float] = torch.cat(values).tolist()
        return dict(zip(names, flat, strict=True)), dict(zip(self._parts, parts.unbind(0), strict=True))


def _divisor(count: Tensor) -> Tensor:
    """The count in float64, so that a mean of ones is 1; a count of 0 meets only sums that are 0."""
    return count.double() + (count == 0)


def _stack(values: dict[str, Tensor], like: Tensor) -> Tensor:
    """[k] float64; scalars of one dtype are stacked together."""
    if not values:
        return like.new_zeros(0, dtype=torch.float64)
    dtypes = {value.dtype for value in values.values()}
    if len(dtypes) == 1:
        return torch.stack(list(values.values())).double()
    return torch.stack([value.double() for value in values.values()])
