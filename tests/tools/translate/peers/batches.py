"""Random batches for the losses of peers and of this package.

A batch is drawn from a seed with ``RandomState``, whose stream numpy promises not to change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS, WIDTH = 4, 9


@dataclass(frozen=True)
class RandomBatch:
    """Per-token tensors of some responses, float32 [ROWS, WIDTH]; ``mask`` is 1 at the tokens to train on."""

    curr: Tensor
    prev: Tensor
    gen: Tensor
    ref: Tensor
    advantages: Tensor  # the same at every token of a row
    mask: Tensor

    def double(self) -> dict[str, Tensor]:
        """Return the tensors in float64; ``curr`` requires a gradient."""
        values = {name: getattr(self, name).double() for name in ("curr", "prev", "gen", "ref", "advantages", "mask")}
        values["curr"].requires_grad_()
        return values

    def nemo_rl_data(self) -> dict[str, Tensor]:
        """Return the tensors under NeMo-RL's keys, [ROWS, WIDTH + 1]: a prompt token precedes each response."""

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


def random_batch(seed: int) -> RandomBatch:
    """Return the batch of a seed.

    The size of the mismatch differs from row to row, from bfloat16's rounding to a collapsed run, so that both narrow
    and wide bounds have something to remove. Every other row contains masked tokens of a tool in its middle.
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
    return RandomBatch(
        *(torch.tensor(value, dtype=torch.float32) for value in (curr, prev, gen, ref, advantages, mask))
    )
