"""Token sampling: temperature, top-k and top-p applied to logits, and draws from the result."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask.tools.lab.policy_config import GenerationConfig

__all__ = ["draw_tokens", "filter_logits", "zero_filtered"]


def filter_logits(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Divide logits by the temperature, and set those to -inf that top-k, then top-p of the rest, exclude.

    As in vLLM and NeMo-RL's trainer, ties with the k-th token stay, and a token stays if the more likely tokens hold
    less probability than ``top_p``; the most likely token always stays.

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
        probs = ordered.softmax(dim=-1)
        dropped = probs.cumsum(dim=-1) - probs >= config.top_p
        dropped[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits


def zero_filtered(logprobs: Tensor) -> Tensor:
    """Replace the infinite log-probs of tokens that the trainer's filter excludes by a constant 0, as NeMo-RL does."""
    return torch.where(torch.isinf(logprobs), 0.0, logprobs)


def draw_tokens(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each row of log-probs [B, V] by numbers [B] in [0, 1); never one of probability 0."""
    cumulative = distribution.double().exp().cumsum(dim=-1)
    return (cumulative <= uniform[:, None].double() * cumulative[:, -1:]).sum(dim=-1)
