"""The lab recipe: NeMo-RL's section and key names where NeMo-RL has them, checked strictly.

``loss_fn:`` is the very block of a NeMo-RL recipe; :func:`nemo_geomask.build_loss` validates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nemo_geomask.config import StrictModel, nearest, parse
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.presets import DEFAULTS
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.policy_config import PolicyConfig

__all__ = [
    "SEEDS",
    "TASKS",
    "AsyncGrpoConfig",
    "EnvConfig",
    "GrpoConfig",
    "LabConfig",
    "LabRecipe",
]

SEEDS = 2**32
"""How many seeds there are, from 0: as many as NumPy, and with it NeMo-RL, takes."""

TASKS: PluginGroup[Any] = PluginGroup(
    group="nemo_geomask.lab_tasks",
    noun="task",
    key="env.name",
    requirement="a class whose of(env) makes a nemo_geomask.tools.lab.progression_task.Task (see docs/plugins.md)",
    accepts=lambda task: isinstance(task, type) and callable(getattr(task, "of", None)),
    built_in={
        "progressions": "nemo_geomask.tools.lab.progression_task:Progressions",
        "lookups": "nemo_geomask.tools.lab.lookup_task:Lookups",
        "answers": "nemo_geomask.tools.lab.progression_task:Answers",
    },
)
_PRESET_BOUNDS: Mapping[str, Mapping[str, Any]] = {name: defaults.settings for name, defaults in DEFAULTS.items()} | {
    # The bounds in use are for models whose engines differ more. The lab's mismatch is mostly rounding, about 1 % per
    # token; these bounds leave a healthy run of the lab alone and remove something once its engines drift apart.
    "geometric": {"min": 0.98, "max": 1.02},
    "opsm": {"delta": 0.05},
    "veto": {"min": 0.5, "max": 2.0},
    "trust_region": {"statistic": "k3", "level": "sequence_mean", "max": 0.001},
}
"""Bounds that ``+preset`` stands for unless ``lab.presets`` replaces them."""


class EstimatorConfig(StrictModel):
    """``grpo.adv_estimator:`` of NeMo-RL, the keys that the lab honours."""

    name: Literal["grpo", "reinforce_plus_plus"] = Field(
        "grpo",
        description="grpo: the reward against the group's baseline; reinforce_plus_plus: the same, less the KL of each "
        "token under loss_fn.use_kl_in_reward, normalised over the batch's tokens.",
    )
    minus_baseline: bool = Field(True, description="Of reinforce_plus_plus: subtract the group's mean reward.")


class AsyncGrpoConfig(StrictModel):
    """``grpo.async_grpo:`` of NeMo-RL, the keys that the lab honours."""

    enabled: bool = Field(False, description="Whether a rollout batch is sampled while earlier ones are trained on.")
    max_trajectory_age_steps: int = Field(
        1,
        gt=0,
        description="Weight updates between the weights that begin a rollout batch and those that train on it, fewer "
        "in the first steps only: the engine is always as far ahead as it may be.",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Whether responses go on with each update's weights as it lands: spread evenly over the longest "
        "response, the last of them on the weights that train on it.",
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="Whether the keys and values of what is already written are then those of the new weights."
    )

    @property
    def lag(self) -> int:
        """Weight updates that the engine is behind, at most."""
        return self.max_trajectory_age_steps if self.enabled else 0

    @model_validator(mode="after")
    def _check_switches(self) -> AsyncGrpoConfig:
        needs = {
            "in_flight_weight_updates": "enabled",
            "recompute_kv_cache_after_weight_updates": "in_flight_weight_updates",
        }
        for name, other in needs.items():
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} does nothing without {other}; set {other}: true, or {name}: false")
        return self


class GrpoConfig(StrictModel):
    """``grpo:`` of NeMo-RL, the keys that the lab honours."""

    num_prompts_per_step: int = Field(16, gt=0, description="Different prompts in a rollout batch.")
    num_generations_per_prompt: int = Field(16, gt=1, description="Responses per prompt: the group of the baseline.")
    max_num_steps: int = Field(60, gt=0, description="Rollout batches to train on.")
    normalize_rewards: bool = Field(True, description="Divide the advantage by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="Baseline: mean of the other responses (RLOO).")
    adv_estimator: EstimatorConfig = EstimatorConfig()
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    advantage_clip_low: float | None = Field(None, description="Lower bound of the advantage; null: none.")
    advantage_clip_high: float | None = Field(None, description="Upper bound of the advantage; null: none.")
    val_period: int = Field(
        0,
        ge=0,
        description="Steps between validations, on prompts that are never trained on; one follows the last. 0: none.",
    )
    max_val_samples: int = Field(256, gt=0, description="Responses of a validation, one a prompt.")
    seed: int = Field(42, ge=0, lt=SEEDS, description="Seeds the weights, the prompts and the sampling.")

    @model_validator(mode="after")
    def _check_clip(self) -> GrpoConfig:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"advantage_clip_low ({low}) exceeds advantage_clip_high ({high}); swap them")
        return self


class EnvConfig(StrictModel):
    """``env:``, the task; see :mod:`nemo_geomask.tools.lab.progression_task`."""

    name: Annotated[str, TASKS] = Field(
        "progressions",
        description="progressions: continue one modulo a number; lookups: ask a tool, repeat its answer; answers: 0 "
        "or 1 for the last token of a long response; else a name in group nemo_geomask.lab_tasks, or module:attribute.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of another distribution's task, validated by it."
    )
    modulus: int = Field(10, gt=2, description="Numbers there are; random ones earn 1/modulus.")
    min_terms: int = Field(8, gt=0, description="Fewest terms a prompt asks for.")
    max_terms: int = Field(48, gt=0, description="Most terms a prompt asks for.")

    @model_validator(mode="after")
    def _check_options(self) -> EnvConfig:
        if self.options and TASKS.is_built_in(self.name):
            raise ValueError(f"options ({', '.join(self.options)}) are those of a plugin, which {self.name} is not")
        return self

    @model_validator(mode="after")
    def _check_terms(self) -> EnvConfig:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) exceeds max_terms ({self.max_terms}); set both")
        return self


class LabConfig(StrictModel):
    """``lab:``, what only the lab has."""

    tp: Literal[1, 2, 4] = Field(1, description="Tensor-parallel ranks: shards of the output layer's vocabulary.")
    cp: Literal[1, 2, 4] = Field(1, description="Context-parallel ranks: shares of every sequence.")
    dp: Literal[1, 2, 4] = Field(1, description="Data-parallel ranks: different microbatches of an optimiser step.")
    num_threads: int = Field(
        1,
        gt=0,
        description="CPU threads, shared out among the processes, at least one each; part of what makes a run "
        "repeatable.",
    )
    filter_logprobs: bool = Field(
        True,
        description="Whether the trainer's log-probs are those of the tokens that top_p and top_k leave, as NeMo-RL's "
        "are; false: of all tokens.",
    )
    rollouts_every: int = Field(10, gt=0, description="Write train_data_step{N}.jsonl every so many steps.")
    compare: tuple[str, ...] = Field((), description="Variants to train when --compare is not given.")
    presets: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Bounds that `+preset` in --compare stands for, key by key over the built-in; null removes one.",
    )

    @property
    def processes(self) -> int:
        """Processes of a run."""
        return self.tp * self.cp * self.dp

    @property
    def preset_bounds(self) -> dict[str, dict[str, Any]]:
        """Bounds of every mask preset that a SPEC may name."""
        merged = {name: {**bounds, **self.presets.get(name, {})} for name, bounds in _PRESET_BOUNDS.items()}
        return {
            name: {key: value for key, value in bounds.items() if value is not None} for name, bounds in merged.items()
        }

    @model_validator(mode="after")
    def _check_presets(self) -> LabConfig:
        for name in self.presets:
            if name not in _PRESET_BOUNDS:
                guess = nearest(name, _PRESET_BOUNDS)
                hint = f"did you mean '{guess}'?" if guess else f"known: {', '.join(_PRESET_BOUNDS)}"
                raise ValueError(f"presets: unknown mask preset '{name}'; {hint}")
        return self


class LabRecipe(StrictModel):
    """A whole lab recipe."""

    grpo: GrpoConfig = GrpoConfig()
    policy: PolicyConfig = PolicyConfig()
    env: EnvConfig = EnvConfig()
    loss_fn: dict[str, Any] = Field(default_factory=dict, description="The block that NeMo-RL reads.")
    lab: LabConfig = LabConfig()

    @model_validator(mode="after")
    def _check_in_flight(self) -> LabRecipe:
        if self.policy.generation.backend == "vllm" and self.grpo.async_grpo.in_flight_weight_updates:
            raise ValueError(
                "grpo.async_grpo.in_flight_weight_updates needs policy.generation.backend: copy: the lab calls "
                "vLLM for a whole rollout batch, and no weights reach it in between"
            )
        return self

    @model_validator(mode="after")
    def _check_routes(self) -> LabRecipe:
        if self.policy.generation.backend == "vllm" and self.policy.router_replay.enabled:
            raise ValueError(
                "policy.router_replay.enabled needs policy.generation.backend: copy: the lab does not get vLLM's routes"
            )
        return self

    @model_validator(mode="after")
    def _check_filter(self) -> LabRecipe:
        if self.policy.generation.has_filters and self.lab.filter_logprobs and self.lab.tp > 1:
            raise ValueError(
                f"policy.generation.top_p and top_k need all logits of a token, and lab.tp ({self.lab.tp}) shares them "
                "out; set lab.tp: 1, or lab.filter_logprobs: false"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> LabRecipe:
        if self.policy.generation.backend == "vllm" and self.lab.processes > 1:
            raise ValueError(
                "policy.generation.backend: vllm sets up torch.distributed for itself in the training process, which "
                f"lab.tp, lab.cp and lab.dp ({self.lab.tp}, {self.lab.cp}, {self.lab.dp}) need too; set these to 1, or "
                "the backend to copy"
            )
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> LabRecipe:
        rollouts = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        batch, documents = self.policy.train_global_batch_size, self.policy.docs_per_step
        micro, dp = self.policy.train_micro_batch_size, self.lab.dp
        if documents is not None and documents > rollouts:
            raise ValueError(
                f"policy.docs_per_step ({documents}) exceeds grpo.num_prompts_per_step x "
                f"grpo.num_generations_per_prompt ({rollouts}), so that no optimiser step would be complete"
            )
        if batch is not None and rollouts % batch:
            raise ValueError(
                f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt ({rollouts}) must be a multiple of "
                f"policy.train_global_batch_size ({batch}); policy.docs_per_step has no such rule"
            )
        if batch is not None and batch % (micro * dp):
            raise ValueError(
                f"policy.train_global_batch_size ({batch}) must be a multiple of policy.train_micro_batch_size x "
                f"lab.dp ({micro} x {dp}); policy.docs_per_step has no such rule"
            )
        return self

    @classmethod
    def read(cls, data: Mapping[str, Any], *, source: str) -> LabRecipe:
        """Validate a mapping that came from ``source``.

        Raises:
            ConfigError: with the dotted key of every problem, and the nearest valid name of an unknown one.
        """
        try:
            return parse(cls, data, prefix="")
        except ConfigError as error:
            raise ConfigError(*(replace(problem, where=source) for problem in error.problems)) from None
