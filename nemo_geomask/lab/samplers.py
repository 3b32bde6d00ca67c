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
from nemo_geomask.lab.recipe import GenerationConfig, LabRecipe
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
        config: numerics, and what is drawn from.
        task: supplies EOS and PAD.
        recompute_cache: see :func:`~nemo_geomask.lab.generation.generate`.
    """

    config: GenerationConfig
    task: Task
    recompute_cache: bool = False

    @property
    def name(self) -> str:
        """See :class:`Sampler`."""
        return f"decoding in {numerics(self.config)}"

    def sample(self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator) -> Generated:
        """See :class:`Sampler`."""
        engines = [generation_copy(policy, self.config) for policy in versions]
        return generate(engines, prompts, self.task, self.config, generator, recompute_cache=self.recompute_cache)


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
    return CopySampler(recipe.policy.generation, task, recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates)
