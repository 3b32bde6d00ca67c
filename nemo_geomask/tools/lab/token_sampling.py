"""Token sampling: temperature, top-k and top-p applied to logits, and draws from the result."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask.tools.lab.policy_config import GenerationConfig

__all__ = ["draw_tokens", "filter_logits", "zero_filtered"]


def filter_logits(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Divide logits by the temperature, and set the logits to -inf that top-k, and then top-p of the rest, exclude.

    As in vLLM and NeMo-RL's trainer, tokens with the same logit as the k-th stay. A token stays if the more likely
    tokens together have a probability below ``top_p``. The most likely token always stays.

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
    """Replace the infinite log-probs of tokens that the trainer's filter excludes by 0, as NeMo-RL does."""
    return torch.where(torch.isinf(logprobs), 0.0, logprobs)


def draw_tokens(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each row of log-probs [B, V] by uniform numbers [B] in [0, 1); never one of probability 0."""
    cumulative = distribution.double().exp().cumsum(dim=-1)
    return (cumulative <= uniform[:, None].double() * cumulative[:, -1:]).sum(dim=-1)
