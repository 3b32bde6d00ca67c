"""What a step reports: sums computed on the device, read back once.

Every metric but the extrema that NeMo-RL defines is a sum over tokens or sequences divided by a global count, so it
adds up over microbatches and ranks. Nothing here synchronises with the device except :meth:`MetricSums.read`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nemo_geomask.functional import inverse_count

__all__ = ["MetricSums", "Normalizer"]

Normalizer = Literal["tokens", "sequences", "none"]


class MetricSums:
    """Collects metrics of one microbatch.

    Args:
        weight: token layout, float32; 0 at tokens that don't train.
        sample_mask: [S], float32.
    """

    def __init__(self, weight: Tensor, sample_mask: Tensor) -> None:
        self._weight = weight
        self._sample_mask = sample_mask
        self._tokens: dict[str, Tensor] = {}
        self._sequences: dict[str, Tensor] = {}
        self._scalars: dict[str, Tensor] = {}
        self._scalar_kinds: dict[str, Normalizer] = {}

    def tokens(self, name: str, value: Tensor) -> None:
        """Mean over the step's valid tokens; ``value`` is floating, finite and broadcasts against the token layout."""
        self._tokens[name] = value

    def sequences(self, name: str, value: Tensor) -> None:
        """Mean over the step's valid sequences; ``value`` is [S]."""
        self._sequences[name] = value

    def scalar(self, name: str, value: Tensor, normalizer: Normalizer = "none") -> None:
        """A number as it is: a count, an extremum, or already divided by the count that ``normalizer`` names."""
        self._scalars[name] = value
        self._scalar_kinds[name] = normalizer

    def normalizers(self) -> dict[str, Normalizer]:
        """Global count that each metric collected so far is divided by."""
        return {
            **self._scalar_kinds,
            **dict.fromkeys(self._tokens, "tokens"),
            **dict.fromkeys(self._sequences, "sequences"),
        }

    def read(self, *, global_seqs: Tensor, global_toks: Tensor) -> dict[str, float]:
        """All metrics as floats, by one copy from the device.

        Args:
            global_seqs: 0-d, valid sequences in the step.
            global_toks: 0-d, valid tokens in the step.
        """
        parts = [
            _weighted_sums(self._tokens, self._weight) * inverse_count(global_toks),
            _weighted_sums(self._sequences, self._sample_mask) * inverse_count(global_seqs),
            torch.stack([value.detach().double() for value in self._scalars.values()]),
        ]
        names = [*self._tokens, *self._sequences, *self._scalars]
        # In float64, as the counts and squared weights among them.
        flat: list[float] = torch.cat(parts).tolist()
        return dict(zip(names, flat, strict=True))


def _weighted_sums(values: dict[str, Tensor], weight: Tensor) -> Tensor:
    """[k] float64."""
    sums = []
    # The squares of saturated weights come in float64, which is all that holds them.
    weights = {weight.dtype: weight.reshape(-1), torch.float64: weight.double().reshape(-1)}
    for value in values.values():
        flat = value.detach().expand(weight.shape).reshape(-1)
        sums.append(torch.dot(flat, weights[flat.dtype]))
    return torch.stack(sums).double() if sums else weight.new_zeros(0, dtype=torch.float64)
