"""GRPO's advantages: each response against the others to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask.lab.recipe import GrpoConfig

__all__ = ["group_advantages"]

_EPSILON = 1e-6


def group_advantages(rewards: Tensor, config: GrpoConfig) -> Tensor:
    """One advantage a response, as NeMo-RL's GRPO estimator computes it.

    ``A_i = r_i - b_i``, with ``b_i`` the mean reward of the group, or of the group without i (leave-one-out); with
    ``normalize_rewards`` divided by the unbiased standard deviation of the same responses about ``b_i``, unless that
    is 0. Under leave-one-out a lone response that differs from all others is therefore left unnormalised, and one
    that differs from nearly equal others gets a large advantage: bound it by ``advantage_clip_low`` and ``…_high``.
    A prompt that is drawn twice makes two groups here; NeMo-RL pools identical prompts.

    Args:
        rewards: [B], the responses to one prompt side by side, ``num_generations_per_prompt`` of them.
        config: the ``grpo:`` section.

    Returns:
        [B] float32.
    """
    # float64, so that rounding does not pass for a spread among equal rewards.
    group = rewards.double().reshape(-1, config.num_generations_per_prompt)
    counted = torch.ones(group.shape[1], group.shape[1], dtype=group.dtype)
    if config.use_leave_one_out_baseline:
        counted.fill_diagonal_(0.0)
    size = counted.sum(dim=1)
    baseline = group @ counted.T / size
    advantages = group - baseline
    if config.normalize_rewards:
        # deviation[g, i, j]: of response j from the baseline of response i.
        deviation = group[:, None, :] - baseline[:, :, None]
        std = ((deviation.square() * counted).sum(dim=-1) / (size - 1).clamp(min=1)).sqrt()
        advantages = torch.where(std > _EPSILON, advantages / (std + _EPSILON), advantages)
    advantages = advantages.flatten().float()
    if config.advantage_clip_low is not None:
        advantages = advantages.clamp(min=config.advantage_clip_low)
    if config.advantage_clip_high is not None:
        advantages = advantages.clamp(max=config.advantage_clip_high)
    return advantages
