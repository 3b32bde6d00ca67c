"""The engines that can sample a rollout batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_geomask.lab.generation import Generated, generate
from nemo_geomask.lab.model import generation_copy
from nemo_geomask.lab.quantization import numerics
from nemo_geomask.lab.recipe import GenerationConfig, LabRecipe
from nemo_geomask.lab.task import Prompts, Task, task_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CopySampler", "Sampler", "build_sampler"]


class Sampler(Protocol):
    """Samples from the weights that the policy has at that moment."""

    @property
    def name(self) -> str:
        """What it is, for the report."""

    def sample(self, policy: PreTrainedModel, prompts: Prompts, generator: torch.Generator) -> Generated:
        """One response a prompt, at temperature 1; ``generator`` is the source of all randomness."""


@dataclass(frozen=True)
class CopySampler:
    """A copy of the policy in the generation engine's precision; see :mod:`nemo_geomask.lab.generation`.

    Attributes:
        config: precision and quantisation.
        task: supplies EOS and PAD.
    """

    config: GenerationConfig
    task: Task

    @property
    def name(self) -> str:
        """See :class:`Sampler`."""
        return f"decoding in {numerics(self.config)}"

    def sample(self, policy: PreTrainedModel, prompts: Prompts, generator: torch.Generator) -> Generated:
        """See :class:`Sampler`."""
        engine = generation_copy(policy, self.config)
        return generate(engine, prompts, self.task, generator)


def build_sampler(recipe: LabRecipe) -> Sampler:
    """The engine of ``policy.generation.backend``, started.

    Raises:
        MissingDependencyError: vLLM is asked for and not installed.
    """
    task = task_of(recipe.env)
    if recipe.policy.generation.backend == "vllm":
        # Imported here, since it starts by importing vLLM.
        from nemo_geomask.lab.vllm import VllmSampler

        return VllmSampler(recipe, task)
    return CopySampler(recipe.policy.generation, task)
