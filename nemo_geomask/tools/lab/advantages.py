"""Advantage estimators of the lab: group-relative advantages, and the KL penalty that is subtracted from the reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_geomask import LossConfig
from nemo_geomask import functional as F
from nemo_geomask.data_keys import PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.tools.lab.lab_recipe import GrpoConfig

__all__ = ["group_advantages", "reward_kl_coefficient", "token_advantages"]

# NeMo-RL's constant: it is added to the standard deviation, and a deviation up to it counts as 0.
_STD_EPSILON = 1e-6


def reward_kl_coefficient(loss: LossConfig, config: GrpoConfig) -> float:
    """Return β of the KL penalty in the reward; 0 if the reward has none.

    Raises:
        ConfigError: the loss requires a penalty in the reward, and the recipe's estimator does not support it.
    """
    coefficient = loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0
    if coefficient and config.adv_estimator.name == "grpo":
        keys = ("loss_fn.use_kl_in_reward", "grpo.adv_estimator.name")
        message = (
            "use_kl_in_reward: true moves the KL from the loss to the reward, and the estimator grpo does not "
            "subtract it there; set grpo.adv_estimator.name: reinforce_plus_plus, or use_kl_in_reward: false"
        )
        raise ConfigError(Problem(keys, message))
    return coefficient


def token_advantages(data: Mapping[str, Tensor], config: GrpoConfig, loss: LossConfig) -> Tensor:
    r"""Compute the advantages of a batch by the estimator that ``grpo.adv_estimator`` names.

    ``reinforce_plus_plus`` is NeMo-RL's. With :math:`a` the reward minus the group's mean and k the KL estimate,

    .. math:: A_t = \frac{x_t - \bar x}{\sqrt{\max(\mathrm{Var}\,x,\ 10^{-8})}}, \qquad
        x_t = a - \beta\,k(\log\pi_{old} - \log\pi_{ref})

    The mean and the variance are over the batch's trained tokens. The log-ratio is clamped at ±20 and k at ±10.

    Args:
        data: the batch under NeMo-RL's keys; needs ``reference_policy_logprobs`` if the reward has a KL penalty.
        config: the ``grpo:`` section.
        loss: the validated ``loss_fn:`` settings.

    Returns:
        [B, T] float32.
    """
    mask, rewards = data[TOKEN_MASK], data["rewards"]
    if config.adv_estimator.name == "grpo":
        return group_advantages(rewards, config)[:, None].expand_as(mask).clone()
    advantages = rewards.double().reshape(-1, config.num_generations_per_prompt)
    if config.adv_estimator.minus_baseline:
        advantages = advantages - advantages.mean(dim=1, keepdim=True)
    advantages = advantages.reshape(-1, 1).expand(mask.shape)
    if coefficient := reward_kl_coefficient(loss, config):
        log_ratio = (data[PREV_LOGPROBS] - data[REFERENCE_POLICY_LOGPROBS]).clamp(-20, 20)
        advantages = advantages - coefficient * F.kl_estimate(log_ratio, loss.reference_policy_kl_type).clamp(-10, 10)
    is_trained = mask != 0
    trained = advantages[is_trained]
    advantages = (advantages - trained.mean()) * trained.var(correction=0).clamp(min=1e-8).rsqrt()
    return torch.where(is_trained, _clip(advantages.float(), config), 0.0)


def group_advantages(rewards: Tensor, config: GrpoConfig) -> Tensor:
    """Compute one advantage per response as NeMo-RL's GRPO estimator does.

    ``A_i = r_i - b_i``, with ``b_i`` the mean reward of the group, or of the group without i (leave-one-out). With
    ``normalize_rewards`` the advantage is divided by the unbiased standard deviation of the same responses about
    ``b_i``, unless that is 0. So under leave-one-out, the advantage of a response is not normalised if all the other
    rewards are equal, and is large if they are nearly equal; ``advantage_clip_low`` and ``…_high`` bound it. A prompt
    that is drawn twice makes two groups here, while NeMo-RL merges the groups of identical prompts.

    Args:
        rewards: [B]; the ``num_generations_per_prompt`` responses to one prompt are adjacent.
        config: the ``grpo:`` section.

    Returns:
        [B] float32.
    """
    # float64, so that rounding does not make equal rewards differ.
    group = rewards.double().reshape(-1, config.num_generations_per_prompt)
    in_baseline = torch.ones(group.shape[1], group.shape[1], dtype=group.dtype)
    if config.use_leave_one_out_baseline:
        in_baseline.fill_diagonal_(0.0)
    size = in_baseline.sum(dim=1)
    baseline = group @ in_baseline.T / size
    advantages = group - baseline
    if config.normalize_rewards:
        # deviation[g, i, j] is the deviation of response j from the baseline of response i.
        deviation = group[:, None, :] - baseline[:, :, None]
        std = ((deviation.square() * in_baseline).sum(dim=-1) / (size - 1).clamp(min=1)).sqrt()
        advantages = torch.where(std > _STD_EPSILON, advantages / (std + _STD_EPSILON), advantages)
    return _clip(advantages.flatten().float(), config)


def _clip(advantages: Tensor, config: GrpoConfig) -> Tensor:
    bounds = (config.advantage_clip_low, config.advantage_clip_high)
    return advantages if bounds == (None, None) else advantages.clamp(*bounds)
