"""Batches for peers' losses and ours: made from a seed by a generator that numpy keeps as it is for all time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS, WIDTH = 4, 9


@dataclass(frozen=True)
class Problem:
    """Responses as most systems hold them: float32 values, [ROWS, WIDTH], of which those of ``mask`` count."""

    curr: Tensor
    prev: Tensor
    gen: Tensor
    ref: Tensor
    advantages: Tensor  # the same at every token of a row
    mask: Tensor

    def double(self) -> dict[str, Tensor]:
        """The same numbers in float64, ``curr`` as a leaf."""
        values = {name: getattr(self, name).double() for name in ("curr", "prev", "gen", "ref", "advantages", "mask")}
        values["curr"].requires_grad_()
        return values

    def batch(self) -> dict[str, Tensor]:
        """In NeMo-RL's layout: [ROWS, WIDTH + 1], a prompt token before each response."""

        def shifted(values: Tensor) -> Tensor:
            return torch.cat([torch.zeros(ROWS, 1), values], dim=1)

        columns = {
            "prev_logprobs": self.prev,
            "generation_logprobs": self.gen,
            "reference_policy_logprobs": self.ref,
            "advantages": self.advantages,
            "token_mask": self.mask,
        }
        return {name: shifted(value) for name, value in columns.items()} | {"sample_mask": torch.ones(ROWS)}


def problem(seed: int) -> Problem:
    """One batch.

    A row's mismatch has a size of its own, from what bfloat16 makes to what ends a run, so that narrow and wide bounds
    both decide; every other row has a tool's tokens in its middle.
    """
    draw = np.random.RandomState(seed)

    def normal(scale: float = 1.0) -> np.ndarray:
        return scale * draw.standard_normal((ROWS, WIDTH))

    sizes = np.exp(draw.uniform(np.log(3e-4), np.log(0.5), (ROWS, 1)))
    gen = -(0.02 + 3.0 * draw.random_sample((ROWS, WIDTH)) ** 2)
    prev = np.minimum(gen + sizes * (0.7 * draw.standard_normal((ROWS, 1)) + normal()), -1e-3)
    curr = np.minimum(
        prev + draw.choice([0.02, 0.3], (ROWS, 1)) * (0.5 * draw.standard_normal((ROWS, 1)) + normal()), -1e-3
    )
    ref = np.minimum(curr + normal(0.4), -1e-3)
    advantages = draw.choice([-1.0, 1.0], (ROWS, 1)) * (0.3 + draw.random_sample((ROWS, 1))) * np.ones((ROWS, WIDTH))
    mask = np.zeros((ROWS, WIDTH))
    for row in range(ROWS):
        length = draw.randint(3, WIDTH + 1)
        mask[row, :length] = 1
        if row % 2 and length > 4:
            mask[row, 2:4] = 0
    return Problem(*(torch.tensor(value, dtype=torch.float32) for value in (curr, prev, gen, ref, advantages, mask)))
