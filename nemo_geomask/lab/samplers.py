"""The engines that can sample a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.lab.generation import Generated, generate
from nemo_geomask.lab.model import generation_copy
from nemo_geomask.lab.quantization import numerics
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.task import Prompts, Task, task_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CopySampler", "Sampler", "build_sampler"]


class Sampler(Protocol):
    """Samples from the weights that it is given."""

    @property
    def name(self) -> str:
        """What it is, for the report."""

    def sample(self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator) -> Generated:
        """One response a prompt.

        Args:
            versions: the policy, float32; of several, the oldest begins and the others land while it writes.
            prompts: B prompts.
            generator: the source of all randomness.
        """


@dataclass(frozen=True)
class CopySampler:
    """A copy of the policy in the generation engine's precision; see :mod:`nemo_geomask.lab.generation`.

    Attributes:
        recipe: numerics, what is drawn from, and what becomes of the cache at a weight update.
        task: supplies EOS and PAD.
    """

    recipe: LabRecipe
    task: Task

    @property
    def name(self) -> str:
        """See :class:`Sampler`."""
        return f"decoding in {numerics(self.recipe)}"

    def sample(self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator) -> Generated:
        """See :class:`Sampler`."""
        config = self.recipe.policy.generation
        recompute = self.recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates
        engines = [generation_copy(policy, config) for policy in versions]
        return generate(engines, prompts, self.task, config, generator, recompute_cache=recompute)


def build_sampler(recipe: LabRecipe) -> Sampler:
    """The engine of ``policy.generation.backend``, started.

    Raises:
        MissingDependencyError: vLLM is asked for and not installed.
    """
    task = task_of(recipe.env)
    if recipe.policy.generation.backend == "vllm":
        # Imported here, since it starts by importing vLLM.
        from nemo_geomask.lab.vllm import VllmSampler

        if hasattr(task, "call_id"):
            text = (
                "the lab calls vLLM for whole responses, so nothing can reply to a call within one; set backend: copy"
            )
            raise ConfigError(Problem(("policy.generation.backend", "env.name"), text))
        return VllmSampler(recipe, task)
    return CopySampler(recipe, task)
