"""The distribution that tokens are drawn from: temperature, top-k and top-p applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask.lab.policy import GenerationConfig

__all__ = ["draw", "drawable", "filtered"]


def filtered(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Logits divided by the temperature, and -inf where top-k, then top-p of what it leaves, drop a token.

    As vLLM and NeMo-RL's trainer have it: ties with the k-th token stay, and a token stays if those more likely than it
    hold less than ``top_p``; the most likely one always does.

    Args:
        logits: [..., V] float32.
        config: ``temperature``, ``top_k`` and ``top_p``.
    """
    logits = logits / config.temperature
    if config.top_k is not None:
        kth = logits.topk(min(config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if config.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        share = ordered.softmax(dim=-1)
        dropped = share.cumsum(dim=-1) - share >= config.top_p
        dropped[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits


def drawable(logprobs: Tensor) -> Tensor:
    """Log-probs with 0 for tokens that the trainer's own filter leaves out, as NeMo-RL has it: no gradient there."""
    return torch.where(torch.isinf(logprobs), 0.0, logprobs)


def draw(distribution: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row of log-probs [B, V], by numbers [B] in [0, 1); never one of probability 0."""
    mass = distribution.double().exp().cumsum(dim=-1)
    return (mass <= uniform[:, None].double() * mass[:, -1:]).sum(dim=-1)
