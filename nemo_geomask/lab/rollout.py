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
from nemo_geomask.lab.sampling import drawable
from nemo_geomask.lab.task import Prompts, Task, draw_prompts

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
            between the weights that sampled a token and those that are trained; where routes are known,
            ``routed_experts`` [B, T, L, K] of token t and ``routes_differ``, 1 where training would have predicted it
            with others; with a filter in the trainer, ``outside_filter``, 1 where that would not have drawn it.
    """

    data: dict[str, Tensor]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(self.data["rewards"].mean())

    @property
    def causes(self) -> dict[str, float]:
        """What is known of the mismatch's causes, and how far the policy is from the reference.

        Mean weight updates since a response was begun (by NeMo-RL's name) and since a token of it was sampled; of the
        sampled tokens, the shares that training would have predicted with other experts, or not drawn;
        ``reference_kl``: with a reference, the mean of log π_old - log π_ref over the sampled tokens, in nats.
        """
        data, mask = dict(self.data), self.data["token_mask"]
        if "reference_policy_logprobs" in data:
            data["reference_kl"] = data["prev_logprobs"] - data["reference_policy_logprobs"]
        names = ("weight_age", "routes_differ", "outside_filter", "reference_kl")
        means = {name: float((data[name] * mask).sum() / mask.sum().clamp(min=1)) for name in names if name in data}
        oldest = float(self.data["weight_age"].amax(dim=1).float().mean())
        return {"avg_trajectory_age": oldest, "avg_token_age": means.pop("weight_age"), **means}

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
    micro_batch = recipe.policy.train_micro_batch_size
    prev, entropies, differ = engine.scores(policy, data, micro_batch, entropy=entropy)
    data["prev_logprobs"] = drawable(prev)
    if engine.filters:
        data["outside_filter"] = prev.isinf().float()
    if "routed_experts" in data:
        data["routes_differ"] = differ
    if entropy:
        data["entropy"] = entropies
    if reference is not None:
        data["reference_policy_logprobs"] = engine.scores(reference, data, micro_batch)[0]
    if recipe.policy.generation.logprobs == "trainer":
        _control(data, versions, engine, micro_batch)
    data["advantages"] = token_advantages(data, recipe.grpo, loss or LossConfig())
    return Rollout(data)


def _control(
    data: dict[str, Tensor], versions: Sequence[PreTrainedModel], engine: TrainEngine, micro_batch: int
) -> None:
    """Put what the training engine says of each token, by the weights that sampled it, where the generation's was."""
    for age, policy in enumerate(reversed(versions)):
        here = (data["token_mask"] != 0) & (data["weight_age"] == age)
        # On all ranks, or on none.
        if here.any():
            found = drawable(engine.scores(policy, data, micro_batch)[0]) if age else data["prev_logprobs"]
            data["generation_logprobs"] = torch.where(here, found, data["generation_logprobs"])


def _sample(
    versions: Sequence[PreTrainedModel],
    recipe: LabRecipe,
    task: Task,
    generators: tuple[torch.Generator, torch.Generator],
    sampler: Sampler,
) -> dict[str, Tensor]:
    """A rollout batch but for the log-probs of the training engine and what is made of them."""
    of_prompts, of_sampling = generators
    drawn = draw_prompts(
        task, recipe.grpo.num_prompts_per_step, of_prompts, held_out=False if recipe.grpo.val_period else None
    )
    repeats = recipe.grpo.num_generations_per_prompt
    prompts = Prompts(drawn.token_ids.repeat_interleave(repeats, 0), drawn.terms.repeat_interleave(repeats, 0))
    in_flight = recipe.grpo.async_grpo.in_flight_weight_updates
    sampled = sampler.sample(versions if in_flight else versions[:1], prompts, of_sampling)

    known = {} if sampled.routes is None else {"routed_experts": sampled.routes}
    return {
        **known,
        "input_ids": sampled.input_ids,
        "input_lengths": sampled.input_lengths,
        "generation_logprobs": sampled.logprobs,
        "token_mask": sampled.token_mask,
        "sample_mask": torch.ones(len(prompts.terms), dtype=torch.float32),
        "rewards": score(task, prompts, sampled),
        "weight_age": torch.where(sampled.token_mask != 0, len(versions) - 1 - sampled.engine, 0),
    }


def score(task: Task, prompts: Prompts, sampled: Generated) -> Tensor:
    """Rewards [B] of responses."""
    width = task.prompt_width
    rows = zip(sampled.input_ids.tolist(), sampled.input_lengths.tolist(), prompts.terms.tolist(), strict=True)
    found = [task.reward(ids[:width], ids[width:length], terms) for ids, length, terms in rows]
    return torch.tensor(found, dtype=torch.float32)
