"""One rollout batch: sample, score, and lay out the tensors under NeMo-RL's data keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask import LossConfig
from nemo_geomask.lab.advantages import token_advantages
from nemo_geomask.lab.engine import TrainEngine
from nemo_geomask.lab.generation import Generated
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.samplers import Sampler, build_sampler
from nemo_geomask.lab.task import Prompts, Task, draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Rollout", "collect", "score"]


@dataclass(frozen=True)
class Rollout:
    """A batch ready to train on.

    Attributes:
        data: NeMo-RL's keys; [B, T] unless said: ``input_ids``, ``input_lengths`` [B], ``generation_logprobs``,
            ``prev_logprobs``, ``reference_policy_logprobs`` (with a reference), ``advantages``, ``token_mask``,
            ``sample_mask`` [B], ``rewards`` [B]. Column t speaks of token t. Beside them ``weight_age``, weight updates
            between the weights that sampled a token and ``policy``.
    """

    data: dict[str, Tensor]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(self.data["rewards"].mean())

    @property
    def ages(self) -> dict[str, float]:
        """Mean weight updates since a response was begun, by NeMo-RL's name, and since a token of it was sampled."""
        mask, age = self.data["token_mask"], self.data["weight_age"].float()
        return {
            "avg_trajectory_age": float(age.amax(dim=1).mean()),
            "avg_token_age": float((age * mask).sum() / mask.sum()),
        }

    @property
    def response_length(self) -> float:
        """Mean response length in tokens."""
        return float(self.data["token_mask"].sum(dim=1).mean())


def collect(
    versions: Sequence[PreTrainedModel],
    reference: PreTrainedModel | None,
    recipe: LabRecipe,
    task: Task,
    generators: tuple[torch.Generator, torch.Generator],
    engine: TrainEngine,
    sampler: Sampler | None = None,
    *,
    entropy: bool = False,
    loss: LossConfig | None = None,
) -> Rollout:
    """Draw prompts, sample a group of responses for each, and score them; the same batch on all ranks.

    The first rank samples for all. Were every rank to sample with the same generator, each would do the whole work on
    a machine that they share, and a rounding error on one of them could part their batches.

    Args:
        versions: the policy as it was at the last weight updates, oldest first, float32. The first begins the
            responses, and the last, which is to be trained, gives ``prev_logprobs``.
        reference: frozen policy of the KL term, or None.
        recipe: sizes.
        task: prompts and rewards.
        generators: of the prompts and of the sampling, apart, so that variants meet the same prompts.
        engine: computes the log-probs of ``policy`` and ``reference``.
        sampler: the generation engine; None: the recipe's, for this batch alone.
        loss: settings in force, which may put the KL into the reward; None: the defaults.
        entropy: whether the batch is to have the ``entropy`` of the policy at each token, [B, T].
    """
    policy = versions[-1]
    data = engine.ranks.from_first(
        lambda: _sample(versions, recipe, task, generators, sampler or build_sampler(recipe))
    )
    ids, lengths, micro_batch = data["input_ids"], data["input_lengths"], recipe.policy.train_micro_batch_size
    data["prev_logprobs"] = engine.sequence_logprobs(policy, ids, lengths, micro_batch)
    if entropy:
        data["entropy"] = engine.sequence_logprobs(policy, ids, lengths, micro_batch, entropy=True)
    if reference is not None:
        data["reference_policy_logprobs"] = engine.sequence_logprobs(reference, ids, lengths, micro_batch)
    if recipe.policy.generation.logprobs == "trainer":
        _control(data, versions, engine, micro_batch)
    data["advantages"] = token_advantages(data, recipe.grpo, loss or LossConfig())
    return Rollout(data)


def _control(
    data: dict[str, Tensor], versions: Sequence[PreTrainedModel], engine: TrainEngine, micro_batch: int
) -> None:
    """Put what the training engine says of each token, by the weights that sampled it, where the generation's was."""
    ids, lengths, ages = data["input_ids"], data["input_lengths"], data["weight_age"]
    for age, policy in enumerate(reversed(versions)):
        here = (data["token_mask"] != 0) & (ages == age)
        # On all ranks, or on none.
        if here.any():
            by_trainer = engine.sequence_logprobs(policy, ids, lengths, micro_batch)
            data["generation_logprobs"] = torch.where(here, by_trainer, data["generation_logprobs"])


def _sample(
    versions: Sequence[PreTrainedModel],
    recipe: LabRecipe,
    task: Task,
    generators: tuple[torch.Generator, torch.Generator],
    sampler: Sampler,
) -> dict[str, Tensor]:
    """A rollout batch but for the log-probs of the training engine and what is made of them."""
    of_prompts, of_sampling = generators
    drawn = draw(task, recipe.grpo.num_prompts_per_step, of_prompts, held_out=False if recipe.grpo.val_period else None)
    repeats = recipe.grpo.num_generations_per_prompt
    prompts = Prompts(drawn.token_ids.repeat_interleave(repeats, 0), drawn.terms.repeat_interleave(repeats, 0))
    in_flight = recipe.grpo.async_grpo.in_flight_weight_updates
    sampled = sampler.sample(versions if in_flight else versions[:1], prompts, of_sampling)

    lengths = sampled.token_mask.sum(dim=1).long()
    rewards = score(task, prompts, sampled)
    return {
        "input_ids": sampled.input_ids,
        "input_lengths": lengths + task.prompt_width,
        "generation_logprobs": sampled.logprobs,
        "token_mask": sampled.token_mask,
        "sample_mask": torch.ones(len(rewards), dtype=torch.float32),
        "rewards": rewards,
        "weight_age": torch.where(sampled.token_mask != 0, len(versions) - 1 - sampled.engine, 0),
    }


def score(task: Task, prompts: Prompts, sampled: Generated) -> Tensor:
    """Rewards [B] of responses."""
    width = task.prompt_width
    lengths = sampled.token_mask.sum(dim=1).long()
    found = [
        task.reward(ids[:width], ids[width : width + length], terms)
        for ids, length, terms in zip(sampled.input_ids.tolist(), lengths.tolist(), prompts.terms.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.float32)
