"""Collection of a rollout batch: sampling, scoring, and tensors under NeMo-RL's data keys, also as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.records.flight import JSONL_KEYS
from nemo_geomask.tools.lab.advantages import token_advantages
from nemo_geomask.tools.lab.generation_engine import SampledResponses
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.progression_task import Prompts, Task, draw_prompts
from nemo_geomask.tools.lab.samplers import Sampler, build_sampler
from nemo_geomask.tools.lab.token_sampling import zero_filtered
from nemo_geomask.tools.lab.training_engine import TrainingEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Rollout", "collect_rollout", "compute_rewards", "write_rollout"]


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
        recipe: the settings.
        task: prompts and rewards.
        generators: random number generators of the prompts and of the sampling, which are separate so that all
            variants get the same prompts.
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
    width = task.prompt_width
    rows = zip(sampled.input_ids.tolist(), sampled.input_lengths.tolist(), prompts.terms.tolist(), strict=True)
    rewards = [task.reward(ids[:width], ids[width:length], terms) for ids, length, terms in rows]
    return torch.tensor(rewards, dtype=torch.float32)


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
