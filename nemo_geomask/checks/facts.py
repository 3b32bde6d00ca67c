"""What the rules look at: the recipe, the loss's settings in force, and what the user says of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_geomask.checks.loss import loss_of, nameless, other_algorithm
from nemo_geomask.config.loss import LossConfig
from nemo_geomask.errors import Problem
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.recipe import Recipe

__all__ = ["MISMATCH_KL", "RecipeFacts"]

MISMATCH_KL = 1e-3
"""Mean KL from the generation to the training engine assumed where nothing is known, in nats per token."""

# Mixtures of experts, by how their names are written.
_MOE_NAMES = re.compile(
    r"\bA\d+(\.\d+)?B|\d+BA\d+|mixtral|deepseek-(v[23]|r1(?!-distill))|moonlight|gpt-oss|minimax-m|kimi-k|"
    r"glm-?(4\.[5-9]|5)|\bmoe\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RecipeFacts:
    """A recipe and what follows from it.

    Attributes:
        recipe: the recipe.
        loss: what it trains; None where ``loss_fn`` is invalid.
        problems: why it is.
        doubts: what the loss accepts and warns of.
        mismatch_kl: mean mismatch KL to reckon with, nats per token.
        gpu: name of the GPU that samples, such as A100.
        measured_tokens: mean length of the responses of a run like it; None: nobody measured.
    """

    recipe: Recipe
    loss: PolicyLoss | None
    problems: tuple[Problem, ...] = ()
    doubts: tuple[Problem, ...] = ()
    mismatch_kl: float = MISMATCH_KL
    gpu: str | None = None
    measured_tokens: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, *, mismatch_kl: float = MISMATCH_KL, gpu: str | None = None) -> RecipeFacts:
        """Those of a recipe, its loss built."""
        return cls(recipe, *loss_of(recipe), mismatch_kl=mismatch_kl, gpu=gpu)

    @property
    def config(self) -> LossConfig:
        """The settings in force, the variant's defaults applied, where ``loss_fn`` is known to be valid."""
        if self.loss is None:
            raise LookupError("the loss is invalid")
        return self.loss.config

    @property
    def nameless(self) -> bool:
        """Whether NeMo-RL's own loss trains."""
        return nameless(self.recipe)

    @property
    def other_algorithm(self) -> str | None:
        """What the recipe does, if that has no policy loss: supervised fine-tuning, DPO and the like."""
        return other_algorithm(self.recipe)

    @property
    def nemo_rl(self) -> Path | None:
        """The NeMo-RL checkout concerned."""
        return self.recipe.nemo_rl

    def get(self, key: str, default: Any = None) -> Any:
        """Value at a dotted key; ``default`` where it or a section around it is missing or null."""
        value: Any = self.recipe.data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """Value at a dotted key if it is a number."""
        value = self.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def on(self, key: str) -> bool:
        """Whether the value at a dotted key is ``true``."""
        return self.get(key) is True

    @property
    def given(self) -> Mapping[str, Any]:
        """The ``loss_fn`` block as written."""
        block = self.get("loss_fn", {})
        return block if isinstance(block, Mapping) else {}

    # --- what several rules ask

    @property
    def algorithm(self) -> str:
        """The section of the training algorithm: ``grpo`` or ``ppo``."""
        return "ppo" if "ppo" in self.recipe.data else "grpo"

    @property
    def rollouts(self) -> int | None:
        """Responses in a rollout batch."""
        prompts = self.number(f"{self.algorithm}.num_prompts_per_step")
        each = self.number(f"{self.algorithm}.num_generations_per_prompt")
        return int(prompts * each) if prompts and each else None

    @property
    def updates(self) -> float | None:
        """Optimiser steps on a rollout batch."""
        batch = self.number("policy.train_global_batch_size")
        if not batch or self.rollouts is None:
            return None
        return self.rollouts / batch * (self.number("ppo.ppo_epochs") or 1)

    @property
    def response_tokens(self) -> int | None:
        """Length to reckon with: that of a run like it, else the longest response allowed."""
        if self.measured_tokens is not None:
            return self.measured_tokens
        limits = [self.number("policy.generation.max_new_tokens"), self.number("policy.max_total_sequence_length")]
        known = [limit for limit in limits if limit]
        return int(min(known)) if known else None

    @property
    def asynchronous(self) -> bool:
        """Whether NeMo-RL's asynchronous trainer is chosen (not its single controller, which has gates of its own)."""
        return self.on(f"{self.algorithm}.async_{self.algorithm}.enabled")

    @property
    def vllm(self) -> bool:
        """Whether vLLM samples."""
        return bool(self.get("policy.generation.backend") == "vllm")

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return self.on("policy.megatron_cfg.enabled")

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel size of the trainer."""
        key = "megatron_cfg.tensor_model_parallel_size" if self.megatron else "dtensor_cfg.tensor_parallel_size"
        return int(self.number(f"policy.{key}") or 1)

    @cached_property
    def mixture_of_experts(self) -> str | None:
        """The key whose value says that the model is a mixture of experts."""
        sizes = (
            "policy.megatron_cfg.expert_model_parallel_size",
            "policy.dtensor_cfg.expert_parallel_size",
            "policy.generation.vllm_cfg.expert_parallel_size",
        )
        backend = {"megatron_cfg": self.megatron, "dtensor_cfg": self.on("policy.dtensor_cfg.enabled")}
        for key in sizes:
            if backend.get(key.split(".")[1], True) and (self.number(key) or 1) > 1:
                return key
        return "policy.model_name" if _MOE_NAMES.search(str(self.get("policy.model_name", ""))) else None

    @property
    def filtered(self) -> str | None:
        """The key that truncates the sampling distribution: top-p or top-k."""
        if (self.number("policy.generation.top_p") or 1.0) != 1.0:
            return "policy.generation.top_p"
        return "policy.generation.top_k" if (self.number("policy.generation.top_k") or 0) > 0 else None

    @property
    def temperature(self) -> float:
        """Sampling temperature."""
        value = self.number("policy.generation.temperature")
        return 1.0 if value is None else value
