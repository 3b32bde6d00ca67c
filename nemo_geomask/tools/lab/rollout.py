"""Collection of a rollout batch: sampling, scoring and advantages, under NeMo-RL's data keys, also as JSON lines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask import LossConfig
from nemo_geomask import functional as F
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.records.flight import JSONL_KEYS
from nemo_geomask.tools.lab.generation_engine import SampledResponses, zero_filtered
from nemo_geomask.tools.lab.lab_recipe import GrpoConfig, LabRecipe
from nemo_geomask.tools.lab.samplers import Sampler, build_sampler
from nemo_geomask.tools.lab.tasks import Prompts, Task, draw_prompts
from nemo_geomask.tools.lab.training_engine import TrainingEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# NeMo-RL's constant: it is added to the standard deviation, and a deviation up to it counts as 0.
_STD_EPSILON = 1e-6


def reward_kl_coefficient(loss: LossConfig, config: GrpoConfig) -> float:
    """Return β of the KL penalty in the reward; 0 if the reward has none.

    Raises: ConfigError: the loss requires a penalty in the reward, and the recipe's estimator does not support it.
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

    ``data`` is the batch under NeMo-RL's keys, with ``reference_policy_logprobs`` if the reward has a KL penalty.

    Returns: [B, T] float32.
    """
    mask, rewards = data[TOKEN_MASK], data["rewards"]
    if config.adv_estimator.name == "grpo":
        advantages = group_advantages(rewards, config)[:, None].expand_as(mask).clone()
        return _reply_advantages(data, advantages, config) if config.adv_estimator.reply_baseline else advantages
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


def _reply_advantages(data: Mapping[str, Tensor], advantages: Tensor, config: GrpoConfig) -> Tensor:
    """Return ``advantages`` [B, T] with those after a reply relative to the group's responses with the same replies."""
    mask, size = data[TOKEN_MASK], config.num_generations_per_prompt
    positions = torch.arange(mask.shape[1])
    is_reply = (mask.cumsum(dim=1) > 0) & (mask == 0) & (positions < data["input_lengths"][:, None])
    counts = is_reply.cumsum(dim=1)  # reply tokens up to each token
    replies = [ids[chosen].tolist() for ids, chosen in zip(data["input_ids"], is_reply, strict=True)]
    for count in range(1, int(counts.max()) + 1):
        heads = [reply[:count] for reply in replies]
        groups = [heads[start : start + size] for start in range(0, len(heads), size)]
        is_same = torch.tensor([[[head == other for other in group] for head in group] for group in groups])
        relative = group_advantages(data["rewards"], config, is_same)
        advantages = torch.where(counts == count, relative[:, None], advantages)
    return advantages


def group_advantages(rewards: Tensor, config: GrpoConfig, is_comparable: Tensor | None = None) -> Tensor:
    """Compute one advantage per response as NeMo-RL's GRPO estimator does.

    ``A_i = r_i - b_i``, with ``b_i`` the mean reward of the group, or of the group without i (leave-one-out). With
    ``normalize_rewards`` the advantage is divided by the unbiased standard deviation of the same responses about
    ``b_i``, unless that is 0. So under leave-one-out, the advantage of a response is not normalised if all the other
    rewards are equal, and is large if they are nearly equal; ``advantage_clip_low`` and ``…_high`` bound it. A prompt
    that is drawn twice makes two groups here, while NeMo-RL merges the groups of identical prompts.

    Of the rewards [B], those of the ``num_generations_per_prompt`` responses to one prompt are adjacent.
    ``is_comparable`` [B / n, n, n] says which responses j belong to the baseline of response i; None: all of a group. A
    response without another has an advantage of 0.

    Returns: [B] float32.
    """
    # float64, so that rounding does not make equal rewards differ.
    group = rewards.double().reshape(-1, config.num_generations_per_prompt)
    in_baseline = torch.ones(len(group), group.shape[1], group.shape[1], dtype=group.dtype)
    if is_comparable is not None:
        in_baseline = in_baseline * is_comparable
    if config.use_leave_one_out_baseline:
        in_baseline.diagonal(dim1=1, dim2=2).zero_()
    size = in_baseline.sum(dim=-1)
    baseline = torch.where(size > 0, (in_baseline @ group[:, :, None]).squeeze(-1) / size.clamp(min=1), group)
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


@dataclass(frozen=True)
class Rollout:
    """Rollout batch, ready to train on.

    Attributes:
        data: tensors under NeMo-RL's keys, [B, T] unless noted: ``input_ids``, ``input_lengths`` [B],
            ``generation_logprobs``, ``prev_logprobs``, ``reference_policy_logprobs`` (with a reference),
            ``advantages``, ``token_mask``, ``sample_mask`` [B], ``rewards`` [B]. Column t is about token t. The lab
            adds ``weight_age``, the number of weight updates between the weights that sampled a token and the weights
            that are trained. If the engine reports routes, the lab also adds ``routed_experts`` [B, T, L, K], and
            ``routes_differ``, 1 if the training engine would use other experts to predict the token. If the trainer
            filters, it adds ``outside_filter``, 1 if the trainer's filter excludes the token.
    """

    data: dict[str, Tensor]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(self.data["rewards"].mean())

    @property
    def origin_metrics(self) -> dict[str, float]:
        """Metrics of how far the batch is from the trained policy: staleness, routes, filters, and reference policy.

        ``avg_trajectory_age`` (NeMo-RL's name) and ``avg_token_age`` are the mean numbers of weight updates since a
        response was begun and since a token was sampled. ``routes_differ`` and ``outside_filter`` are fractions of the
        sampled tokens. If there is a reference, ``reference_kl`` is the mean of log π_old − log π_ref over the sampled
        tokens, in nats.
        """
        data, mask = dict(self.data), self.data[TOKEN_MASK]
        if REFERENCE_POLICY_LOGPROBS in data:
            data["reference_kl"] = data[PREV_LOGPROBS] - data[REFERENCE_POLICY_LOGPROBS]
        names = ("weight_age", "routes_differ", "outside_filter", "reference_kl")
        means = {name: float((data[name] * mask).sum() / mask.sum().clamp(min=1)) for name in names if name in data}
        oldest = float(self.data["weight_age"].amax(dim=1).float().mean())
        return {"avg_trajectory_age": oldest, "avg_token_age": means.pop("weight_age"), **means}

    @property
    def response_length(self) -> float:
        """Mean response length in tokens."""
        return float(self.data[TOKEN_MASK].sum(dim=1).mean())


def collect_rollout(
    versions: Sequence[PreTrainedModel],
    reference: PreTrainedModel | None,
    recipe: LabRecipe,
    task: Task,
    generators: tuple[torch.Generator, torch.Generator],
    engine: TrainingEngine,
    sampler: Sampler | None = None,
    *,
    entropy: bool = False,
    loss: LossConfig | None = None,
) -> Rollout:
    """Draw prompts, sample a group of responses for each, and score them; all ranks get the same batch.

    Only the first rank samples. If every rank sampled with the same generator, they would all do the same work on one
    machine, and a rounding difference on one rank could make their batches differ.

    Args:
        versions: the policy after each of the last weight updates, oldest first, float32. The first begins the
            responses; the last is the policy to train and computes ``prev_logprobs``.
        reference: frozen policy of the KL term, or None.
        generators: those of the prompts and of the sampling, which are separate so that all variants get the same
            prompts.
        engine: computes the log-probs of the policy and of ``reference``.
        sampler: the generation engine; None: create the recipe's engine for this batch.
        entropy: add the policy's ``entropy`` at each token, [B, T], to the batch.
        loss: validated ``loss_fn:`` settings, which may put the KL into the reward; None: the defaults.
    """
    policy = versions[-1]
    data = engine.ranks.compute_on_first(
        lambda: _sample_batch(versions, recipe, task, generators, sampler or build_sampler(recipe))
    )
    micro_batch = recipe.policy.train_micro_batch_size
    scores = engine.score_batch(policy, data, micro_batch, entropy=entropy)
    data[PREV_LOGPROBS] = zero_filtered(scores.logprobs)
    if engine.is_filtered:
        data["outside_filter"] = scores.logprobs.isinf().float()
    if "routed_experts" in data:
        data["routes_differ"] = scores.routes_differ
    if entropy:
        data["entropy"] = scores.entropies
    if reference is not None:
        data[REFERENCE_POLICY_LOGPROBS] = engine.score_batch(reference, data, micro_batch).logprobs
    if recipe.policy.generation.logprobs == "trainer":
        _use_trainer_logprobs(data, versions, engine, micro_batch)
    data["advantages"] = token_advantages(data, recipe.grpo, loss or LossConfig())
    return Rollout(data)


def _use_trainer_logprobs(
    data: dict[str, Tensor], versions: Sequence[PreTrainedModel], engine: TrainingEngine, micro_batch: int
) -> None:
    """Replace ``generation_logprobs`` by the training engine's log-probs under the weights that sampled each token."""
    for age, policy in enumerate(reversed(versions)):
        has_age = (data[TOKEN_MASK] != 0) & (data["weight_age"] == age)
        # The data are equal on all ranks, so either all ranks score the batch or none does.
        if has_age.any():
            # The batch's prev_logprobs are those of the newest weights already.
            logprobs = data[PREV_LOGPROBS]
            if age:
                logprobs = zero_filtered(engine.score_batch(policy, data, micro_batch).logprobs)
            data[GENERATION_LOGPROBS] = torch.where(has_age, logprobs, data[GENERATION_LOGPROBS])


def _sample_batch(
    versions: Sequence[PreTrainedModel],
    recipe: LabRecipe,
    task: Task,
    generators: tuple[torch.Generator, torch.Generator],
    sampler: Sampler,
) -> dict[str, Tensor]:
    """Sample a rollout batch without the training engine's log-probs and the advantages."""
    prompt_generator, sampling_generator = generators
    drawn = draw_prompts(
        task, recipe.grpo.num_prompts_per_step, prompt_generator, held_out=False if recipe.grpo.val_period else None
    )
    repeats = recipe.grpo.num_generations_per_prompt
    prompts = Prompts(drawn.token_ids.repeat_interleave(repeats, 0), drawn.terms.repeat_interleave(repeats, 0))
    in_flight = recipe.grpo.async_grpo.in_flight_weight_updates
    sampled = sampler.sample(versions if in_flight else versions[:1], prompts, sampling_generator)

    routes = {} if sampled.routes is None else {"routed_experts": sampled.routes}
    return {
        **routes,
        "input_ids": sampled.input_ids,
        "input_lengths": sampled.input_lengths,
        GENERATION_LOGPROBS: sampled.logprobs,
        TOKEN_MASK: sampled.token_mask,
        "sample_mask": torch.ones(len(prompts.terms), dtype=torch.float32),
        "rewards": compute_rewards(task, prompts, sampled),
        "weight_age": torch.where(sampled.token_mask != 0, len(versions) - 1 - sampled.engine_index, 0),
    }


def compute_rewards(task: Task, prompts: Prompts, sampled: SampledResponses) -> Tensor:
    """Return the rewards of responses, [B] float32."""
    pairs = zip(_split_responses(task, sampled), prompts.terms.tolist(), strict=True)
    rewards = [task.reward(prompt, response, terms) for (prompt, response), terms in pairs]
    return torch.tensor(rewards, dtype=torch.float32)


def mean_measures(task: Task, sampled: SampledResponses) -> dict[str, float]:
    """Return the mean of each measure of the task over the responses that have it; empty if the task has none."""
    if not hasattr(task, "measures"):
        return {}
    values = defaultdict(list)
    for prompt, response in _split_responses(task, sampled):
        for name, value in task.measures(prompt, response).items():
            values[name].append(value)
    return {name: fmean(measured) for name, measured in values.items()}


def _split_responses(task: Task, sampled: SampledResponses) -> list[tuple[list[int], list[int]]]:
    """Return prompt and response of each row, as token ids."""
    rows = zip(sampled.input_ids.tolist(), sampled.input_lengths.tolist(), strict=True)
    return [(ids[: task.prompt_width], ids[task.prompt_width : length]) for ids, length in rows]


def write_rollout(rollout: Rollout, task: Task, path: Path) -> None:
    """Write a batch in the format of NeMo-RL's ``train_data_step{N}.jsonl``, one JSON object for each sequence.

    NeMo-RL's logger slices the batch into batches of size one, so every value except ``idx`` is a list of one element:
    ``rewards: [r]``, ``token_ids: [[…T ids…]]``.
    """
    columns = {name: rollout.data[key].tolist() for name, key in JSONL_KEYS.items()}
    width = task.prompt_width
    with path.open("w", encoding="utf-8") as file:
        for index, (ids, length) in enumerate(zip(columns["token_ids"], columns["input_lengths"], strict=True)):
            # In NeMo-RL, the content of a sequence is the list of its messages' texts: the prompt and the response.
            content = [[task.text(ids[:width]), task.text(ids[width:length])]]
            values = {name: [column[index]] for name, column in columns.items()}
            file.write(json.dumps({"content": content, **values, "idx": index}) + "\n")
