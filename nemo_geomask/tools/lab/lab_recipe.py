"""The schema of a lab recipe, which is strict; sections and keys have NeMo-RL's names where NeMo-RL has them.

``loss_fn:`` has the same form as in a NeMo-RL recipe; :func:`nemo_geomask.build_loss` validates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nemo_geomask.config import StrictModel, nearest, parse
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.presets import PRESET_GROUP, PUBLISHED_SETTINGS
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.policy_config import PolicyConfig

SEEDS = 2**32
"""Number of valid seeds, which begin at 0, in NumPy and therefore in NeMo-RL."""

TASKS: PluginGroup[Any] = PluginGroup(
    group="nemo_geomask.lab_tasks",
    noun="task",
    key="env.name",
    requirement="a class whose of(env) returns a nemo_geomask.tools.lab.tasks.Task (see "
    "docs/how_to/plugin_corrections.md)",
    accepts=lambda task: isinstance(task, type) and callable(getattr(task, "of", None)),
    built_in={
        "progressions": "nemo_geomask.tools.lab.tasks:Progressions",
        "lookups": "nemo_geomask.tools.lab.tasks:Lookups",
        "searches": "nemo_geomask.tools.lab.tasks:Searches",
    },
)
_PRESET_BOUNDS: Mapping[str, Mapping[str, Any]] = {
    name: published.settings for name, published in PUBLISHED_SETTINGS.items()
} | {
    # The usual bounds are for models whose engines differ more. The lab's mismatch is mostly rounding, about 1 % per
    # token. These bounds remove nothing from a healthy run of the lab, and start to remove sequences when its engines
    # drift apart.
    "geometric": {"min": 0.98, "max": 1.02},
    "opsm": {"delta": 0.05},
    "veto": {"min": 0.5, "max": 2.0},
    "trust_region": {"statistic": "k3", "level": "sequence_mean", "max": 0.001},
}
"""Bounds of each ``+preset``, unless ``lab.presets`` replaces them."""


class EstimatorConfig(StrictModel):
    """``grpo.adv_estimator:`` of NeMo-RL; only the keys that the lab supports."""

    name: Literal["grpo", "reinforce_plus_plus"] = Field(
        "grpo",
        description="grpo: the reward minus the group's baseline; reinforce_plus_plus: the same minus each token's KL "
        "under loss_fn.use_kl_in_reward, normalised over the batch's tokens.",
    )
    minus_baseline: bool = Field(
        True, description="Subtract the group's mean reward; only reinforce_plus_plus reads this key."
    )
    reply_baseline: bool = Field(
        False,
        description="Compare each token only with the group's responses that have had the same replies of the "
        "environment up to it; only grpo reads this key. The lab's own.",
    )


class AsyncGrpoConfig(StrictModel):
    """``grpo.async_grpo:`` of NeMo-RL; only the keys that the lab supports."""

    enabled: bool = Field(
        False, description="Sample each rollout batch with earlier weights, as asynchronous training does."
    )
    max_trajectory_age_steps: int = Field(
        1,
        gt=0,
        description="Weight updates between the weights that begin a rollout batch and the weights that are trained on "
        "it. The first steps have fewer. Generation is always as far ahead as this allows.",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Continue responses with new weights at each update. The updates are spread evenly over the "
        "longest response; the last one brings the weights that are trained on the batch.",
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="Recompute the keys and values of earlier tokens with the new weights after each update."
    )

    @property
    def lag(self) -> int:
        """Largest number of weight updates that the engine is behind."""
        return self.max_trajectory_age_steps if self.enabled else 0

    @model_validator(mode="after")
    def _check_switches(self) -> AsyncGrpoConfig:
        needs = {
            "in_flight_weight_updates": "enabled",
            "recompute_kv_cache_after_weight_updates": "in_flight_weight_updates",
        }
        for name, other in needs.items():
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} has no effect without {other}; set {other}: true, or {name}: false")
        return self


class GrpoConfig(StrictModel):
    """``grpo:`` of NeMo-RL; only the keys that the lab supports."""

    num_prompts_per_step: int = Field(16, gt=0, description="Number of prompts in a rollout batch.")
    num_generations_per_prompt: int = Field(
        16, gt=1, description="Responses per prompt; they form the group over which the baseline is computed."
    )
    max_num_steps: int = Field(60, gt=0, description="Number of rollout batches to train on.")
    normalize_rewards: bool = Field(True, description="Divide the advantage by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="Baseline: mean of the other responses (RLOO).")
    adv_estimator: EstimatorConfig = EstimatorConfig()
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    advantage_clip_low: float | None = Field(None, description="Lower bound of the advantage; null: none.")
    advantage_clip_high: float | None = Field(None, description="Upper bound of the advantage; null: none.")
    val_period: int = Field(
        0,
        ge=0,
        description="Steps between validations, on prompts that are never trained on; the last step is followed by "
        "one, too. 0: no validation.",
    )
    max_val_samples: int = Field(256, gt=0, description="Responses in a validation, one for each prompt.")
    seed: int = Field(42, ge=0, lt=SEEDS, description="Seed of the weights, the prompts and the sampling.")

    @model_validator(mode="after")
    def _check_clip(self) -> GrpoConfig:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"advantage_clip_low ({low}) exceeds advantage_clip_high ({high}); swap them")
        return self


class EnvConfig(StrictModel):
    """``env:``, the task; see :mod:`nemo_geomask.tools.lab.tasks`."""

    name: Annotated[str, TASKS] = Field(
        "progressions",
        description="progressions: continue an arithmetic progression modulo a number; lookups: call a tool and repeat "
        "its answer; searches: a tool call that finds something or not by luck, then a long answer. Otherwise a name "
        "in the group nemo_geomask.lab_tasks, or module:attribute.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of a task from a plugin, which validates them."
    )
    modulus: int = Field(
        10, gt=2, description="Numbers are 0 to modulus - 1; uniformly random answers earn a reward of 1/modulus."
    )
    min_terms: int = Field(8, gt=0, description="Smallest number of terms that a prompt requests.")
    max_terms: int = Field(48, gt=0, description="Largest number of terms that a prompt requests.")
    luck: float = Field(0.5, gt=0, le=1, description="searches: probability that the tool finds something.")

    @model_validator(mode="after")
    def _check(self) -> EnvConfig:
        if self.options and TASKS.is_built_in(self.name):
            raise ValueError(
                f"options ({', '.join(self.options)}) are for tasks from plugins, and {self.name} is built in; remove "
                "them"
            )
        if self.min_terms > self.max_terms:
            raise ValueError(
                f"min_terms ({self.min_terms}) exceeds max_terms ({self.max_terms}); lower min_terms or raise max_terms"
            )
        return self


class LabConfig(StrictModel):
    """``lab:``, settings that NeMo-RL does not have."""

    tp: Literal[1, 2, 4] = Field(1, description="Tensor-parallel ranks, which split the output layer's vocabulary.")
    cp: Literal[1, 2, 4] = Field(1, description="Context-parallel ranks, which split every sequence.")
    dp: Literal[1, 2, 4] = Field(
        1, description="Data-parallel ranks, which split the microbatches of an optimiser step."
    )
    num_threads: int = Field(
        1,
        gt=0,
        description="CPU threads, divided among the processes, each of which has at least one. Another number can "
        "change a run's numbers by rounding.",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="Device of both engines, the loss and the optimiser; CUDA_VISIBLE_DEVICES chooses the GPU. Initial "
        "weights, prompts and random numbers are the same on both; other results differ by rounding.",
    )
    filter_logprobs: bool = Field(
        True,
        description="true: the trainer's log-probs are normalised over the tokens that top_p and top_k keep, as in "
        "NeMo-RL; false: over all tokens.",
    )
    rollouts_every: int = Field(10, gt=0, description="Steps between two files train_data_step{N}.jsonl.")
    compare: tuple[str, ...] = Field(
        (), description="SPECs, in the form of --compare, of the variants to train if --compare is not set."
    )
    presets: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Bounds of the masks that `+preset` in --compare adds. Each key replaces the built-in value; null "
        "removes it.",
    )

    @property
    def processes(self) -> int:
        """Number of processes of a run."""
        return self.tp * self.cp * self.dp

    @property
    def preset_bounds(self) -> dict[str, dict[str, Any]]:
        """Bounds of mask presets that a SPEC may name; others have none."""
        merged = {
            name: {**_PRESET_BOUNDS.get(name, {}), **self.presets.get(name, {})}
            for name in (*_PRESET_BOUNDS, *self.presets)
        }
        return {
            name: {key: value for key, value in bounds.items() if value is not None} for name, bounds in merged.items()
        }

    @model_validator(mode="after")
    def _check_presets(self) -> LabConfig:
        for name in self.presets:
            if name not in PRESET_GROUP.names():
                guess = nearest(name, PRESET_GROUP.names())
                hint = f"did you mean '{guess}'?" if guess else f"known: {', '.join(PRESET_GROUP.names())}"
                raise ValueError(f"presets: unknown mask preset '{name}'; {hint}")
        return self


class LabRecipe(StrictModel):
    """A lab recipe."""

    grpo: GrpoConfig = GrpoConfig()
    policy: PolicyConfig = PolicyConfig()
    env: EnvConfig = EnvConfig()
    loss_fn: dict[str, Any] = Field(default_factory=dict, description="The loss, as in a NeMo-RL recipe.")
    lab: LabConfig = LabConfig()

    @model_validator(mode="after")
    def _check_engines(self) -> LabRecipe:
        generation, lab = self.policy.generation, self.lab
        ranks = f"lab.tp, lab.cp and lab.dp ({lab.tp}, {lab.cp}, {lab.dp})"
        is_vllm, has_ranks, is_cuda = generation.backend == "vllm", lab.processes > 1, lab.device == "cuda"
        for is_wrong, message in (
            (
                is_vllm and self.grpo.async_grpo.in_flight_weight_updates,
                "grpo.async_grpo.in_flight_weight_updates needs policy.generation.backend: copy. The lab calls vLLM "
                "once for a rollout batch and can't load new weights in between",
            ),
            (
                is_vllm and self.policy.router_replay.enabled,
                "policy.router_replay.enabled needs policy.generation.backend: copy. The lab does not read the experts "
                "that vLLM selects",
            ),
            (
                generation.has_filters and lab.filter_logprobs and lab.tp > 1,
                f"policy.generation.top_p and top_k need all logits of a token, and lab.tp ({lab.tp}) splits them over "
                "ranks; set lab.tp: 1, or lab.filter_logprobs: false",
            ),
            (
                is_vllm and has_ranks,
                "policy.generation.backend: vllm initialises torch.distributed in the training process for its own "
                f"use, but {ranks} need it too; set these to 1, or the backend to copy",
            ),
            (
                is_cuda and is_vllm,
                "lab.device: cuda is not supported with policy.generation.backend: vllm; set the backend to copy, or "
                "lab.device: cpu",
            ),
            (
                is_cuda and has_ranks,
                f"lab.device: cuda needs a single process, but {ranks} start several, which exchange tensors over "
                "gloo, on the CPU; set these to 1, or lab.device: cpu",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> LabRecipe:
        rollouts = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        batch, documents = self.policy.train_global_batch_size, self.policy.docs_per_step
        micro, dp = self.policy.train_micro_batch_size, self.lab.dp
        if documents is not None and documents > rollouts:
            raise ValueError(
                f"policy.docs_per_step ({documents}) exceeds grpo.num_prompts_per_step x "
                f"grpo.num_generations_per_prompt ({rollouts}), so no optimiser step would be complete; lower "
                "docs_per_step"
            )
        if batch is not None and rollouts % batch:
            raise ValueError(
                f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt ({rollouts}) must be a multiple of "
                f"policy.train_global_batch_size ({batch}); change one of them, or set policy.docs_per_step, which "
                "has no such rule"
            )
        if batch is not None and batch % (micro * dp):
            raise ValueError(
                f"policy.train_global_batch_size ({batch}) must be a multiple of policy.train_micro_batch_size x "
                f"lab.dp ({micro} x {dp}); change one of them, or set policy.docs_per_step, which has no such rule"
            )
        return self

    @classmethod
    def read(cls, data: Mapping[str, Any], *, source: str) -> LabRecipe:
        """Validate a mapping that was read from ``source``.

        Raises:
            ConfigError: a setting is invalid; each problem has its dotted key, and the nearest valid name if the key is
                unknown.
        """
        try:
            return parse(cls, data, prefix="")
        except ConfigError as error:
            raise ConfigError(*(replace(problem, where=source) for problem in error.problems)) from None
