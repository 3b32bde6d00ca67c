"""One rollout batch: sample, score, and lay out the tensors under NeMo-RL's data keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.advantages import group_advantages
from nemo_geomask.lab.generation import generate
from nemo_geomask.lab.model import generation_copy, token_logprobs
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.task import Progressions, Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Rollout", "collect", "sequence_logprobs"]


@dataclass(frozen=True)
class Rollout:
    """A batch ready to train on.

    Attributes:
        data: NeMo-RL's keys; [B, T] unless said: ``input_ids``, ``input_lengths`` [B], ``generation_logprobs``,
            ``prev_logprobs``, ``reference_policy_logprobs`` (with a reference), ``advantages``, ``token_mask``,
            ``sample_mask`` [B], ``rewards`` [B]. Column t speaks of token t.
    """

    data: dict[str, Tensor]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(self.data["rewards"].mean())

    @property
    def response_length(self) -> float:
        """Mean response length in tokens."""
        return float(self.data["token_mask"].sum(dim=1).mean())


@torch.no_grad()
def sequence_logprobs(policy: PreTrainedModel, input_ids: Tensor, micro_batch: int) -> Tensor:
    """Log-probs under the training engine, [B, T]; column 0, which nothing predicts, is 0."""
    parts = [token_logprobs(policy, rows) for rows in torch.split(input_ids, micro_batch)]
    return torch.nn.functional.pad(torch.cat(parts), (1, 0))


def collect(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    recipe: LabRecipe,
    task: Progressions,
    generators: tuple[torch.Generator, torch.Generator],
) -> Rollout:
    """Draw prompts, sample a group of responses for each, and score them.

    Args:
        policy: float32; its log-probs are ``prev_logprobs``, a bfloat16 copy of it samples.
        reference: frozen policy of the KL term, or None.
        recipe: sizes.
        task: prompts and rewards.
        generators: of the prompts and of the sampling, apart, so that variants meet the same prompts.
    """
    of_prompts, of_sampling = generators
    drawn = task.sample(recipe.grpo.num_prompts_per_step, of_prompts)
    repeats = recipe.grpo.num_generations_per_prompt
    prompts = Prompts(drawn.token_ids.repeat_interleave(repeats, 0), drawn.terms.repeat_interleave(repeats, 0))
    generation = recipe.policy.generation
    engine = generation_copy(policy, generation, of_sampling)
    sampled = generate(engine, prompts, task, generation, of_sampling)

    lengths = sampled.token_mask.sum(dim=1).long()
    width = task.prompt_width
    rewards = torch.tensor(
        [
            task.reward(ids[:width], ids[width : width + length], terms)
            for ids, length, terms in zip(
                sampled.input_ids.tolist(), lengths.tolist(), prompts.terms.tolist(), strict=True
            )
        ]
    )
    micro_batch = recipe.policy.train_micro_batch_size
    data = {
        "input_ids": sampled.input_ids,
        "input_lengths": lengths + width,
        "generation_logprobs": sampled.logprobs,
        "prev_logprobs": sequence_logprobs(policy, sampled.input_ids, micro_batch),
        "advantages": group_advantages(rewards, recipe.grpo)[:, None].expand_as(sampled.token_mask).clone(),
        "token_mask": sampled.token_mask,
        "sample_mask": torch.ones(len(rewards)),
        "rewards": rewards,
    }
    if reference is not None:
        data["reference_policy_logprobs"] = sequence_logprobs(reference, sampled.input_ids, micro_batch)
    return Rollout(data)
