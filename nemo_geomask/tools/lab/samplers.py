"""The lab's generation engines by their names in a recipe: a copy of the policy, or vLLM with its current weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, EngineError, MissingDependencyError, Problem
from nemo_geomask.hosts.vllm import load_weights, rollout_batch
from nemo_geomask.tools.lab.generation_engine import SampledResponses, filter_logits, generate
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_config import GenerationConfig
from nemo_geomask.tools.lab.policy_model import (
    checkpoint_weights,
    describe_engine,
    generation_copy,
    policy_config,
    token_logprobs,
)
from nemo_geomask.tools.lab.tasks import Prompts, Task, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sampler(Protocol):
    """Generation engine that samples responses from the weights that it is called with."""

    @property
    def name(self) -> str:
        """Description of the engine for the report."""

    def sample(
        self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator
    ) -> SampledResponses:
        """Sample one response per prompt.

        The first of the ``versions`` of the policy, oldest first, float32, begins the responses, and the others replace
        it one after another while they are sampled.
        """


@dataclass(frozen=True)
class CopySampler:
    """A copy of the policy in the generation engine's precision; see ``lab.generation_engine``."""

    recipe: LabRecipe  # precision, sampling filters, and the treatment of the KV cache at a weight update
    task: Task  # supplies EOS and PAD

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
        if hasattr(task, "call_id"):
            message = (
                "the lab calls vLLM for complete responses, so the task's environment can't reply within one; set "
                "policy.generation.backend: copy"
            )
            raise ConfigError(Problem(("policy.generation.backend", "env.name"), message))
        return VllmSampler(recipe, task)
    return CopySampler(recipe, task)


def trainer_sampler(recipe: LabRecipe) -> Sampler:
    """Create a sampler from the policy itself: float32, without the engine's rounding, and at the temperature known.

    The trainer's filters stay, since the policy that it trains is the filtered one.
    """
    changes = {"backend": "copy", "precision": "float32", "quantization": None, "unknown_temperature": 1.0}
    if not recipe.lab.filter_logprobs:
        changes |= {"top_p": 1.0, "top_k": None}
    generation = recipe.policy.generation.model_copy(update=changes)
    policy = recipe.policy.model_copy(update={"generation": generation})
    return CopySampler(recipe.model_copy(update={"policy": policy}), load_task(recipe.env))


# vLLM reads these variables when it is imported or an engine starts. Without _FORCED_ENVIRONMENT, vLLM would run in
# another process, where weights can't be loaded from this one. _DEFAULT_ENVIRONMENT does not replace the user's values.
_FORCED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same threads
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CACHE_BYTES = 2**28
# Number of rows of a batch whose log-probs are checked, and the largest mean |log-ratio| that passes. Rounding causes
# about 0.02, and wrong weights about 1.
_CHECKED_ROWS = 16
_MAX_GAP = 0.5


class VllmSampler:
    """vLLM engine in this process; it is kept for the whole run, since starting it takes longer than several steps.

    Raises: MissingDependencyError: vLLM is not installed.
    """

    def __init__(self, recipe: LabRecipe, task: Task) -> None:
        self.recipe, self._task = recipe, task
        os.environ.update(_FORCED_ENVIRONMENT)
        for name, value in _DEFAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        vllm = _import_vllm()
        self._sampling_params_class = vllm.SamplingParams
        generation = recipe.policy.generation
        self.name = f"vLLM {vllm.__version__} in {describe_engine(recipe)}"
        settings = {
            "dtype": generation.precision,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": True,
            "max_num_seqs": recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt,
            "kv_cache_memory_bytes": _CACHE_BYTES,
            "seed": recipe.grpo.seed,
            **generation.vllm_kwargs,
        }
        config = policy_config(recipe.policy.model, task)
        set_num_threads = torch.set_num_threads
        try:
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                self.llm = vllm.LLM(
                    model=folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    **settings,
                )
        finally:
            # vLLM's CPU worker replaces this function in its process, which is also the trainer's.
            torch.set_num_threads = set_num_threads

    def sample(
        self, versions: Sequence[PreTrainedModel], prompts: Prompts, generator: torch.Generator
    ) -> SampledResponses:
        """Load the policy's weights and sample one response per prompt.

        Args:
            versions: the policy, float32; exactly one version.
            prompts: B prompts.
            generator: random number generator that draws a seed for each response.

        Raises: EngineError: vLLM's log-probs do not match the weights that were loaded.
        """
        (policy,) = versions
        weights = generation_copy(policy, self.recipe.policy.generation)
        load_weights(self.llm, checkpoint_weights(weights))
        generation = self.recipe.policy.generation
        seeds = torch.randint(2**31, (len(prompts.terms),), generator=generator)
        params = [
            self._sampling_params_class(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=generation.top_k or 0,
                logprobs=0,
                max_tokens=terms,
                seed=seed,
                stop_token_ids=[] if generation.ignore_eos else [self._task.eos_id],
                detokenize=False,
            )
            for terms, seed in zip(prompts.terms.tolist(), seeds.tolist(), strict=True)
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts.token_ids.tolist()]
        batch = rollout_batch(
            self.llm.generate(requests, params, use_tqdm=False),
            pad_token_id=self._task.pad_id,
            sampling_params=params,
            logprobs_mode=self.llm.model_config.logprobs_mode,
        )
        _check_weights(weights, batch, generation)
        ids = batch["input_ids"]
        return SampledResponses(
            input_ids=ids,
            input_lengths=batch["input_lengths"],
            logprobs=batch[GENERATION_LOGPROBS],
            token_mask=batch[TOKEN_MASK],
            engine_index=torch.zeros_like(ids),
        )


@torch.no_grad()
def _check_weights(weights: PreTrainedModel, batch: dict[str, Tensor], generation: GenerationConfig) -> None:
    """Raise EngineError if vLLM's log-probs do not match the weights that were loaded.

    Some versions of vLLM, on some devices, corrupt weights that are loaded into a running engine, without an error.
    """
    rows = slice(_CHECKED_ROWS)
    # Compare log-probs of the distribution that vLLM samples from; tokens that the filters exclude here don't count.
    expected = token_logprobs(weights, batch["input_ids"][rows], lambda logits: filter_logits(logits, generation))
    counted = batch[TOKEN_MASK][rows, 1:].bool() & expected.isfinite()
    gap = (expected - batch[GENERATION_LOGPROBS][rows, 1:])[counted].abs().mean()
    if not gap <= _MAX_GAP:  # also True for NaN
        raise EngineError(
            f"vLLM {_import_vllm().__version__}'s log-probs differ by {gap:.2f} per token from those of the weights "
            f"that were loaded (rounding gives about 0.02, the limit is {_MAX_GAP}): vLLM does not use these weights. "
            "Set policy.generation.backend: copy, or install another version of vLLM"
        )


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError(
            f"policy.generation.backend: vllm needs vLLM, which could not be imported ({error}); "
            'pip install "nemo-geomask[vllm]", or use backend: copy'
        ) from error
    return vllm
