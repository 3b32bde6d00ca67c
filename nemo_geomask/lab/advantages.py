"""Advantages: each response against the others to the same prompt, and the KL where it is taken from the reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_geomask import LossConfig
from nemo_geomask import functional as F
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.lab.recipe import GrpoConfig

__all__ = ["group_advantages", "kl_of_reward", "token_advantages"]

_EPSILON = 1e-6


def kl_of_reward(loss: LossConfig, config: GrpoConfig) -> float:
    """β of the KL that the reward is to have; 0 where it is to have none.

    Raises:
        ConfigError: it is to have one, and the estimator puts none into it.
    """
    coefficient = loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0
    if coefficient and config.adv_estimator.name == "grpo":
        keys = ("loss_fn.use_kl_in_reward", "grpo.adv_estimator.name")
        text = (
            "use_kl_in_reward: true takes the KL out of the loss, and the estimator grpo does not put it into the "
            "reward; set grpo.adv_estimator.name: reinforce_plus_plus, or use_kl_in_reward: false"
        )
        raise ConfigError(Problem(keys, text))
    return coefficient


def token_advantages(data: Mapping[str, Tensor], config: GrpoConfig, loss: LossConfig) -> Tensor:
    r"""Advantages of a batch, by the estimator that the recipe names.

    ``reinforce_plus_plus`` is NeMo-RL's: with the reward less the group's mean, :math:`a`, and each token's own KL,

    .. math:: A_t = \frac{x_t - \bar x}{\sqrt{\max(\mathrm{Var}\,x,\ 10^{-8})}}, \qquad
        x_t = a - \beta\,k(\log\pi_{old} - \log\pi_{ref})

    over the batch's trained tokens; the log-ratio is clamped at ±20 and k at ±10.

    Args:
        data: the batch, ``reference_policy_logprobs`` where the reward has a KL.
        config: the ``grpo:`` section.
        loss: the loss's settings in force.

    Returns:
        [B, T] float32.
    """
    mask, rewards = data["token_mask"], data["rewards"]
    if config.adv_estimator.name == "grpo":
        return group_advantages(rewards, config)[:, None].expand_as(mask).clone()
    found = rewards.double().reshape(-1, config.num_generations_per_prompt)
    if config.adv_estimator.minus_baseline:
        found = found - found.mean(dim=1, keepdim=True)
    found = found.reshape(-1, 1).expand(mask.shape)
    if coefficient := kl_of_reward(loss, config):
        log_ratio = (data["prev_logprobs"] - data["reference_policy_logprobs"]).clamp(-20, 20)
        found = found - coefficient * F.kl_estimate(log_ratio, loss.reference_policy_kl_type).clamp(-10, 10)
    trained = mask != 0
    of_tokens = found[trained]
    found = (found - of_tokens.mean()) * of_tokens.var(correction=0).clamp(min=1e-8).rsqrt()
    return torch.where(trained, _clipped(found.float(), config), 0.0)


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
    return _clipped(advantages.flatten().float(), config)


def _clipped(advantages: Tensor, config: GrpoConfig) -> Tensor:
    bounds = (config.advantage_clip_low, config.advantage_clip_high)
    return advantages if bounds == (None, None) else advantages.clamp(*bounds)
