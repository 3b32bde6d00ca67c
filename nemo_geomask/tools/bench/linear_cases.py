"""Cases of the benchmark without logits, their random inputs, and the gradients of a path's outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.tools.bench.logprob_cases import IGNORE

__all__ = ["LinearCase", "LinearOutputs", "LinearSample", "draw", "gradients"]

LinearOutputs = tuple[Tensor, Tensor | None]
"""Log-probs [T], and entropies [T] if the case has them."""


class LinearCase(NamedTuple):
    """One measured shape.

    Attributes:
        tokens: number of tokens, T.
        hidden: size of a hidden state, H.
        vocab: size of the global vocabulary, V.
        tp: number of equal vocabulary shards, of which the weight is one; no collectives are run.
        fraction: fraction of the tokens that train.
        entropy: True if the entropy and its gradient are also computed.
        dtype: type of the hidden states and the weight.
    """

    tokens: int
    hidden: int
    vocab: int
    tp: int = 1
    fraction: float = 1.0
    entropy: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        """Number of columns of the shard."""
        return self.vocab // self.tp

    @property
    def product(self) -> float:
        """Floating-point operations of one matrix product over the rows that train."""
        return 2.0 * round(self.fraction * self.tokens) * self.hidden * self.width

    @property
    def logits_bytes(self) -> int:
        """Size of the logits in bytes."""
        return self.tokens * self.width * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", f"H={self.hidden}", f"V={self.vocab}{f'/{self.tp}' if self.tp > 1 else ''}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.fraction:g} of the tokens train"] if self.fraction < 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class LinearSample(NamedTuple):
    """Random inputs of the paths.

    Attributes:
        hidden: [T, H], a leaf tensor.
        weight: [V/TP, H], a leaf tensor.
        targets: [T] int64, ``IGNORE`` where a token does not train.
        is_trained: [T] bool, the tokens that train.
        g: [T] float32, incoming gradient of the log-probs, 0 where a token does not train.
        h: [T] float32, incoming gradient of the entropies, 0 where a token does not train.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    is_trained: Tensor
    g: Tensor
    h: Tensor

    @property
    def labels(self) -> Tensor:
        """Targets for paths that compute all rows, [T] int64 with 0 in place of ``IGNORE``."""
        return self.targets.clamp(min=0)


def draw(case: LinearCase, device: torch.device, seed: int) -> LinearSample:
    """Draw the inputs of a case; the same seed gives the same inputs."""
    source = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(case.tokens, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight = torch.randn(case.width, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight *= 3.0 * case.hidden**-0.5  # such logits are neither nearly equal nor dominated by one
    order = torch.randperm(case.tokens, generator=source, device=device)
    is_trained = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    is_trained[order[: round(case.fraction * case.tokens)]] = True
    labels = torch.randint(0, case.width, (case.tokens,), generator=source, device=device)
    g, h = torch.randn(2, case.tokens, generator=source, device=device, dtype=torch.float32) * is_trained
    leaves = (hidden.to(case.dtype).requires_grad_(), weight.to(case.dtype).requires_grad_())
    return LinearSample(*leaves, labels.where(is_trained, IGNORE), is_trained, g, h)


def gradients(outputs: LinearOutputs, sample: LinearSample) -> list[Tensor]:
    """Return the gradients of the hidden states and of the weight."""
    leaves, (logprobs, entropy) = [sample.hidden, sample.weight], outputs
    if entropy is None:
        return list(torch.autograd.grad(logprobs, leaves, sample.g.to(logprobs.dtype)))
    incoming = [sample.g.to(logprobs.dtype), sample.h.to(entropy.dtype)]
    return list(torch.autograd.grad([logprobs, entropy], leaves, incoming))
