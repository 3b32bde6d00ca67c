"""Facts about a recipe that the rules read: its settings, its loss, and what the user states about the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.errors import Problem
from nemo_geomask.hosts.nemo_rl.start_run import StartRefusal, start_refusals
from nemo_geomask.objectives.resolved_loss import ResolvedLoss
from nemo_geomask.objectives.variant import Variant
from nemo_geomask.plugin_imports import NOT_IMPORTED
from nemo_geomask.recipe import Origins, Recipe
from nemo_geomask.tools.check.model_shapes import has_experts
from nemo_geomask.tools.check.recipe_loss import (
    OTHER_ALGORITHMS,
    build_recipe_loss,
    other_algorithm,
    trains_nemo_rl_loss,
)
from nemo_geomask.tools.shared.usual_mismatch import usual_kl

MISMATCH_KL = 1e-3
"""Mean KL from the generation to the training engine that is usual for a dense model in bfloat16, in nats per token."""

# No setting of a recipe is that large; integers beyond the range of floats are among those left out.
_LARGEST_NUMBER = 10**30


@dataclass(frozen=True)
class RecipeFacts:
    """Recipe, the loss that it trains, and what follows from its settings.

    Attributes:
        loss: the loss that it trains; None if ``loss_fn`` is invalid or the recipe trains no policy loss.
        provisional_loss: if ``loss_fn`` is invalid, a loss without the invalid settings; else None.
        unsettled: keys and sections whose value in the provisional loss is not what the user meant.
    """

    recipe: Recipe  # the recipe
    loss: ResolvedLoss | None
    problems: tuple[Problem, ...] = ()  # reasons why ``loss_fn`` is invalid
    warnings: tuple[Problem, ...] = ()  # settings that are valid, but probably not what the user intended
    mismatch_kl: float = MISMATCH_KL  # expected mean KL from the generation to the training engine, in nats per token
    gpu: str | None = None  # name of the GPU that samples, such as A100; None if unknown
    measured_tokens: int | None = None  # mean number of tokens of a response in a similar run; None if not measured
    provisional_loss: ResolvedLoss | None = None
    unsettled: frozenset[str] = frozenset()
    not_imported: tuple[Problem, ...] = ()  # settings that name a plugin, which ``--no-import`` did not import

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, mismatch_kl: float | None = None, gpu: str | None = None) -> RecipeFacts:
        """Build the recipe's loss and return the facts about both; without a mismatch KL, its precisions' usual one."""
        built = build_recipe_loss(recipe)
        facts = cls(
            recipe,
            built.loss,
            tuple(problem for problem in built.problems if NOT_IMPORTED not in problem.message),
            built.warnings,
            mismatch_kl or MISMATCH_KL,
            gpu,
            provisional_loss=built.provisional,
            unsettled=built.unsettled,
            not_imported=tuple(problem for problem in built.problems if NOT_IMPORTED in problem.message),
        )
        if mismatch_kl is None:
            facts = replace(facts, mismatch_kl=usual_kl(facts.get, experts=facts.moe_key is not None)[0])
        return facts

    def with_setting(self, key: str, value: Any) -> RecipeFacts:
        """Return the facts about the recipe with another value at a dotted key."""
        data: dict[str, Any] = {**self.recipe.data}
        section, (*names, last) = data, key.split(".")
        for name in names:
            section[name] = {**section[name]} if isinstance(section.get(name), Mapping) else {}
            section = section[name]
        section[last] = value
        recipe = replace(self.recipe, data=data)
        facts = self.from_recipe(recipe, mismatch_kl=self.mismatch_kl, gpu=self.gpu)
        return replace(facts, measured_tokens=self.measured_tokens)

    @cached_property
    def of_models(self) -> Mapping[str, RecipeFacts]:
        """Facts about the recipe with PPO's critic, or a teacher, in the place of the policy, by their section."""
        models = [section for section in ("value", "teacher") if isinstance(self.get(section), Mapping)]
        return {section: self._of_model(section) for section in models}

    def _of_model(self, section: str) -> RecipeFacts:
        generation, entries = "policy.generation", self.recipe.origins.entries
        kept = {key: entry for key, entry in entries.items() if not key.startswith("policy") or generation in key}
        as_policy = {re.sub(rf"^{section}\b", "policy", key): entry for key, entry in kept.items()}
        data = {**self.recipe.data, "policy": {**self.get(section), "generation": self.get(generation)}}
        return replace(self, recipe=replace(self.recipe, data=data, origins=Origins(as_policy)))

    @property
    def config(self) -> LossConfig:
        """Settings of the loss, or of the provisional loss, with the variant's defaults applied.

        Raises:
            LookupError: the recipe trains no policy loss.
        """
        return self._resolved_loss.config

    @property
    def objective(self) -> Variant:
        """The objective of the loss, or of the provisional loss.

        Raises:
            LookupError: the recipe trains no policy loss.
        """
        return self._resolved_loss.variant

    @property
    def _resolved_loss(self) -> ResolvedLoss:
        loss = self.loss or self.provisional_loss
        if loss is None:
            raise LookupError("the recipe trains no policy loss")
        return loss

    @property
    def has_config(self) -> bool:
        """True if :attr:`config` can be read."""
        return (self.loss or self.provisional_loss) is not None

    def is_unsettled(self, key: str, message: str) -> bool:
        """Return True if the key or the message of a finding names an unsettled setting."""
        is_inside = any(key == section or key.startswith((f"{section}.", f"{section}[")) for section in self.unsettled)
        return is_inside or any(section in message for section in self.unsettled)

    @property
    def trains_nemo_rl_loss(self) -> bool:
        """True if NeMo-RL's own loss trains, since ``loss_fn`` has no name."""
        return trains_nemo_rl_loss(self.recipe)

    @property
    def other_algorithm(self) -> str | None:
        """Name of the recipe's algorithm if that trains no policy loss, such as DPO; else None."""
        return OTHER_ALGORITHMS.get(other_algorithm(self.recipe) or "")

    @property
    def nemo_rl(self) -> Path | None:
        """NeMo-RL checkout that the recipe belongs to; None if there is none on this machine."""
        return self.recipe.nemo_rl

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a key such as ``a.b[0].c``; ``default`` if it or what is around it is missing or null."""
        value: Any = self.recipe.data
        for part in key.replace("[", ".[").split("."):
            if isinstance(value, list) and part[1:-1].isdecimal():
                value = next(iter(value[int(part[1:-1]) :]), None)
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """Return the value at a dotted key if it is a finite number, else None."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST_NUMBER:
            return None
        return float(value)

    def size(self, key: str) -> int:
        """Return the whole number at a dotted key; 1 if there is none, or 0."""
        return int(self.number(key) or 1)

    def is_true(self, key: str) -> bool:
        """Return True if the value at a dotted key is ``true``."""
        return self.get(key) is True

    @property
    def is_uncorrected(self) -> bool:
        """True if neither a weight nor a mask acts on the mismatch."""
        return not (self.config.corrects_mismatch or self.config.masks)

    @property
    def loss_block(self) -> Mapping[str, Any]:
        """``loss_fn`` block as it is written; empty if it is not a mapping."""
        block = self.get("loss_fn", {})
        return block if isinstance(block, Mapping) else {}

    # --- values that several rules need

    @property
    def algorithm(self) -> str:
        """Section of the training algorithm: ``grpo``, ``ppo``, or another, such as ``sft``."""
        return "ppo" if self.get("ppo") is not None else other_algorithm(self.recipe) or "grpo"

    @property
    def is_lab(self) -> bool:
        """True if the recipe trains in ``nemo-geomask lab``, not in NeMo-RL."""
        return "lab" in self.recipe.data

    @property
    def has_rewards(self) -> bool:
        """True if the loss gets the rewards of its batch: NeMo-RL passes them in PPO alone, the lab always."""
        return self.algorithm == "ppo" or self.is_lab

    @property
    def validates(self) -> bool:
        """True if NeMo-RL validates on batches of its own; NeMo-Gym validates on all its prompts."""
        switches = (f"{self.algorithm}.val_at_start", f"{self.algorithm}.val_at_end")
        is_wanted = (self.number(f"{self.algorithm}.val_period") or 0) > 0 or any(map(self.is_true, switches))
        return is_wanted and not self.is_true("env.should_use_nemo_gym")

    @property
    def rollout_size(self) -> int | None:
        """Number of responses in a rollout batch."""
        prompts = self.number(f"{self.algorithm}.num_prompts_per_step")
        responses_per_prompt = self.number(f"{self.algorithm}.num_generations_per_prompt")
        return int(prompts * responses_per_prompt) if prompts and responses_per_prompt else None

    @property
    def steps_per_rollout(self) -> float | None:
        """Number of optimiser steps on a rollout batch."""
        batch = self.number("policy.train_global_batch_size")
        if not batch or self.rollout_size is None:
            return None
        return self.rollout_size / batch * (self.number("ppo.ppo_epochs") or 1)

    @property
    def response_tokens(self) -> int | None:
        """Expected number of tokens of a response: as measured, else the largest number that the recipe allows."""
        if self.measured_tokens is not None:
            return self.measured_tokens
        keys = ("policy.generation.max_new_tokens", "policy.max_total_sequence_length")
        limits = [limit for key in keys if (limit := self.number(key))]
        return int(min(limits)) if limits else None

    @property
    def is_async(self) -> bool:
        """True if ``async_grpo`` or ``async_ppo`` is enabled; ``async_rl``, the single controller, does not count."""
        return self.is_true(f"{self.algorithm}.async_{self.algorithm}.enabled")

    @property
    def largest_lag(self) -> int | None:
        """Largest number of weight updates by which a sample may be older than the policy; None if it is not set."""
        sampler = "async_rl.sampler"
        keys = [f"{sampler}.max_staleness_versions", f"{sampler}.max_lookahead_versions"]
        keys += [f"{self.algorithm}.async_{self.algorithm}.max_trajectory_age_steps"] if self.is_async else []
        ages = [int(age) for key in keys if (age := self.number(key)) is not None]
        return max(ages, default=None)

    @property
    def buffered_groups(self) -> int | None:
        """Number of prompts whose responses the single controller's sampler buffers at most; None if it is not set."""
        window = "lookahead" if self.get("async_rl.sampler.name") == "in_order" else "staleness"
        lag, prompts = self.number(f"async_rl.sampler.max_{window}_versions"), self.number("grpo.num_prompts_per_step")
        return None if prompts is None or lag is None else int(prompts * (lag + 1))

    @property
    def cluster_gpus(self) -> int | None:
        """Number of GPUs of the cluster; None if the recipe does not determine it."""
        gpus, nodes = self.number("cluster.gpus_per_node"), self.number("cluster.num_nodes")
        return int(gpus * nodes) if gpus and nodes and (gpus * nodes).is_integer() else None

    @property
    def policy_nodes(self) -> int | None:
        """Number of nodes that neither a reward model nor teachers of on-policy distillation take; None if unknown."""
        nodes, distillation = self.number("cluster.num_nodes"), "on_policy_distillation"
        if not nodes or not nodes.is_integer():
            return None
        reserved = self.size("env.reward_model.resources.num_nodes") if self.scores_by_model and nodes > 1 else 0
        aliases = self.get(f"{distillation}.teacher_model_by_agent_name")
        if self.is_true(f"{distillation}.non_colocated_teachers.enabled") and isinstance(aliases, Mapping):
            # By default, agents that share a teacher's checkpoint share the teacher.
            shared = self.get(f"{distillation}.deduplicate_shared_teacher_checkpoints") is not False
            aliases = {str(model): alias for alias, model in [*aliases.items()][::-1]}.values() if shared else aliases
            section = f"{distillation}.non_colocated_teachers"
            default = self.size(f"{section}.default_teacher_cfg.num_nodes")
            reserved += sum(
                int(self.number(f"{section}.teacher_overrides.{alias}.num_nodes") or default) for alias in aliases
            )
        return int(nodes) - reserved

    @property
    def scores_by_model(self) -> bool:
        """True if a reward model on GPUs of its own gives rewards."""
        return bool(self.get("data.default.env_name") == "reward_model")

    @property
    def uses_single_controller(self) -> bool:
        """True if NeMo-RL's single controller trains; only it reads ``async_rl``."""
        return self.get("async_rl") is not None

    @property
    def uses_vllm(self) -> bool:
        """True if vLLM samples."""
        return bool(self.get("policy.generation.backend") == "vllm")

    @property
    def uses_megatron(self) -> bool:
        """True if Megatron trains."""
        return self.is_true("policy.megatron_cfg.enabled")

    @property
    def uses_dtensor(self) -> bool:
        """True if DTensor trains."""
        return self.is_true("policy.dtensor_cfg.enabled")

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel size of the trainer."""
        key = "megatron_cfg.tensor_model_parallel_size" if self.uses_megatron else "dtensor_cfg.tensor_parallel_size"
        return self.size(f"policy.{key}")

    @cached_property
    def start_refusals(self) -> tuple[StartRefusal, ...]:
        """Errors with which NeMo-RL is certain to end a run of the recipe before its first step."""
        return () if self.nemo_rl is None else start_refusals(self.nemo_rl, self.recipe.data, self.algorithm)

    @cached_property
    def moe_key(self) -> str | None:
        """Key whose value shows that the model is a mixture of experts; None if nothing shows it, or it is dense."""
        is_mixture = has_experts(str(self.get("policy.model_name", "")), self.get("policy.hf_config_overrides"))
        if is_mixture is not None:
            return "policy.model_name" if is_mixture else None
        expert_parallel_keys = ["policy.generation.vllm_cfg.expert_parallel_size"]
        if self.uses_dtensor:
            expert_parallel_keys.insert(0, "policy.dtensor_cfg.expert_parallel_size")
        if self.uses_megatron:
            expert_parallel_keys.insert(0, "policy.megatron_cfg.expert_model_parallel_size")
        for key in expert_parallel_keys:
            if (self.number(key) or 1) > 1:
                return key
        return None

    @property
    def filter_key(self) -> str | None:
        """Key that truncates the sampling distribution, that of top-p or top-k; None if neither does."""
        if (self.number("policy.generation.top_p") or 1.0) != 1.0:
            return "policy.generation.top_p"
        return "policy.generation.top_k" if (self.number("policy.generation.top_k") or 0) > 0 else None

    @property
    def temperature(self) -> float:
        """Sampling temperature."""
        value = self.number("policy.generation.temperature")
        return 1.0 if value is None else value
