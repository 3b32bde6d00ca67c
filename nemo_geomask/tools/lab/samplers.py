"""Interface of the lab's generation engines, and the engines by their names in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.tools.lab.generation_engine import SampledResponses, generate
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_model import generation_copy
from nemo_geomask.tools.lab.progression_task import Prompts, Task, load_task
from nemo_geomask.tools.lab.quantization import describe_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CopySampler", "Sampler", "build_sampler"]


class Sampler(Protocol):
    """Generation engine that samples responses from the weights that it is called with."""

    @property
    def name(self) -> str:
        """Description of the engine for the report."""

    def sample(
        self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator
    ) -> SampledResponses:
        """Sample one response per prompt.

        Args:
            versions: versions of the policy, oldest first, float32; the first begins the responses, and the others
                replace it one after another while the responses are sampled.
            prompts: B prompts.
            generator: random number generator of the sampling.
        """


@dataclass(frozen=True)
class CopySampler:
    """A copy of the policy in the generation engine's precision; see :mod:`nemo_geomask.tools.lab.generation_engine`.

    Attributes:
        recipe: precision, sampling filters, and the treatment of the KV cache at a weight update.
        task: supplies EOS and PAD.
    """

    recipe: LabRecipe
    task: Task

    @property
    def name(self) -> str:
        """See :class:`Sampler`."""
        return f"decoding in {describe_engine(self.recipe)}"

    def sample(
        self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator
    ) -> SampledResponses:
        """See :class:`Sampler`."""
        config = self.recipe.policy.generation
        recompute = self.recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates
        engines = [generation_copy(policy, config) for policy in versions]
        return generate(engines, prompts, self.task, config, generator, recompute_cache=recompute)


def build_sampler(recipe: LabRecipe) -> Sampler:
    """Create and start the engine of ``policy.generation.backend``.

    Raises:
        MissingDependencyError: the recipe requires vLLM, which is not installed.
        ConfigError: vLLM can't run a task whose environment replies within a response.
    """
    task = load_task(recipe.env)
    if recipe.policy.generation.backend == "vllm":
        # Imported here, because only this backend needs it.
        from nemo_geomask.tools.lab.vllm_sampler import VllmSampler

        if hasattr(task, "call_id"):
            message = (
                "the lab calls vLLM for complete responses, so the task's environment can't reply within one; set "
                "policy.generation.backend: copy"
            )
            raise ConfigError(Problem(("policy.generation.backend", "env.name"), message))
        return VllmSampler(recipe, task)
    return CopySampler(recipe, task)
