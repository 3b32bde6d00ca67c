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
from nemo_geomask.errors import ConfigError

__all__ = [
    "SEEDS",
    "TASKS",
    "AsyncGrpoConfig",
    "EnvConfig",
    "GenerationConfig",
    "GrpoConfig",
    "LabConfig",
    "LabRecipe",
    "ModelConfig",
    "PolicyConfig",
    "QuantizationConfig",
    "RouterReplayConfig",
]

SEEDS = 2**32
"""How many seeds there are, from 0: as many as NumPy, and with it NeMo-RL, takes."""

TASKS: PluginGroup[Any] = PluginGroup(
    group="nemo_geomask.lab_tasks",
    what="task",
    key="env.name",
    must_be="a class whose of(env) makes a nemo_geomask.lab.task.Task (see docs/plugins.md)",
    fits=lambda found: isinstance(found, type) and callable(getattr(found, "of", None)),
    built_in={
        "progressions": "nemo_geomask.lab.task:Progressions",
        "lookups": "nemo_geomask.lab.lookups:Lookups",
        "answers": "nemo_geomask.lab.answers:Answers",
    },
)
_PRESET_BOUNDS: dict[str, dict[str, Any]] = {
    # Wide enough to leave a healthy run alone, narrow enough to act once the engines part.
    "geometric": {"min": 0.98, "max": 1.02},
    "product": {"min": 0.5, "max": 2.0},
    "icepop": {"min": 0.5, "max": 5.0},
    "opsm": {"delta": 0.05},
    "veto": {"min": 0.5, "max": 2.0},
    "trust_region": {"statistic": "k3", "level": "sequence_mean", "max": 0.001},
    # As in use.
    "dppo_tv": {"delta": 0.15},
    "dppo_kl": {"delta": 0.05},
    "kpop": {"max": 0.1},
    "cppo": {"delta": 0.15},
    "m2po": {"tau": 0.04},
}


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


class ModelConfig(StrictModel):
    """Size of the Qwen3-MoE that is trained; names as in ``transformers.Qwen3MoeConfig``."""

    hidden_size: int = Field(64, gt=0, description="Width of the residual stream.")
    num_hidden_layers: int = Field(2, gt=0, description="Decoder layers, each with a mixture of experts.")
    num_attention_heads: int = Field(4, gt=0, description="Query heads.")
    num_key_value_heads: int = Field(2, gt=0, description="Key and value heads.")
    moe_intermediate_size: int = Field(64, gt=0, description="Width of one expert.")
    num_experts: int = Field(8, gt=1, description="Experts in a layer.")
    num_experts_per_tok: int = Field(2, gt=0, description="Experts that each token is routed to.")
    initializer_range: float = Field(0.05, gt=0, description="Standard deviation of the initial weights.")

    @model_validator(mode="after")
    def _check_shape(self) -> ModelConfig:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be an even multiple of num_attention_heads ({heads}), since "
                "rotary embeddings need heads of even width"
            )
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts ({self.num_experts})"
            )
        return self


class QuantizationConfig(StrictModel):
    """``policy.generation.quantization:``, weights of the generation engine in fewer bits, anew at each refit."""

    weights: Literal["int8", "int4", "float8_e4m3"] = Field(description="What the weights are rounded to.")
    block_size: int | None = Field(
        None, gt=0, description="Weights along the input that share a scale; null: a scale for each output channel."
    )
    layers: Literal["experts", "linears"] = Field(
        "experts",
        description="experts: their projections; linears: the attention's too. Router, embedding and output layer stay "
        "as they are.",
    )


class GenerationConfig(StrictModel):
    """``policy.generation:``, the engine that samples."""

    backend: Literal["copy", "vllm"] = Field(
        "copy",
        description="copy: the policy itself, decoding with a KV cache; vllm: the vLLM that is installed, with the "
        "policy's weights loaded into it for each rollout batch.",
    )
    precision: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Of weights, activations and KV cache."
    )
    temperature: float = Field(1.0, gt=0, description="Divides the logits, of both engines.")
    top_p: float = Field(1.0, gt=0, le=1, description="Probability that the tokens to draw from hold; 1: all.")
    top_k: int | None = Field(None, gt=0, description="How many tokens to draw from; null: all.")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        "processed_logprobs",
        description="What the engine reports, by vLLM's names: log-probs of the distribution that it drew from, or of "
        "the one before temperature, top_p and top_k.",
    )
    ignore_eos: bool = Field(
        False,
        description="Of vLLM: EOS is a token like any other, and all responses have the length that is asked for.",
    )
    quantization: QuantizationConfig | None = Field(
        None, description="Weights in fewer bits, computed with in `precision`; null: none."
    )
    logprobs: Literal["engine", "trainer"] = Field(
        "engine",
        description="Whose log-probs of the sampled tokens the loss gets as the generation's. trainer: the training "
        "engine's, by the weights that sampled: a control without mismatch, in which all else stays as it is.",
    )
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Of NeMo-RL: further arguments of vLLM's engine, with backend: vllm."
    )

    @property
    def filters(self) -> bool:
        """Whether some tokens can't be drawn."""
        return self.top_p < 1 or self.top_k is not None

    @model_validator(mode="after")
    def _check_backend(self) -> GenerationConfig:
        if self.backend == "vllm" and self.logprobs_mode == "raw_logprobs":
            raise ValueError("logprobs_mode: raw_logprobs needs backend: copy; set it, or processed_logprobs")
        if self.vllm_kwargs and self.backend != "vllm":
            raise ValueError(
                f"vllm_kwargs ({', '.join(self.vllm_kwargs)}) are vLLM's, and backend is {self.backend}; set backend: "
                "vllm, or remove them"
            )
        if own := sorted({"model", "load_format", "skip_tokenizer_init"} & set(self.vllm_kwargs)):
            raise ValueError(f"vllm_kwargs ({', '.join(own)}): the lab sets it itself; remove it")
        return self


class RouterReplayConfig(StrictModel):
    """``policy.router_replay:`` of NeMo-RL."""

    enabled: bool = Field(
        False, description="Whether training sends each token through the experts that the generation engine chose."
    )


class PolicyConfig(StrictModel):
    """``policy:`` of NeMo-RL, the keys that the lab honours."""

    model: ModelConfig = ModelConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of the training forward and backward pass; bfloat16 by autocast, as in NeMo-RL's DTensor worker. "
        "The weights that the optimiser updates are float32 in both.",
    )
    generation: GenerationConfig = GenerationConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    train_global_batch_size: int | None = Field(
        64, gt=0, description="Responses in one optimiser step; null where docs_per_step says it."
    )
    docs_per_step: int | None = Field(
        None,
        gt=0,
        description="Draw microbatches for an optimiser step until it has this many responses, over all data-parallel "
        "ranks; in place of train_global_batch_size, and without its rules of divisibility.",
    )
    train_micro_batch_size: int = Field(64, gt=0, description="Responses in one forward pass of a data-parallel rank.")
    lr: float = Field(2.0e-3, gt=0, description="AdamW's learning rate, constant after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps over which the rate rises linearly.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")

    @property
    def documents(self) -> int:
        """Responses that an optimiser step is to have."""
        wanted = self.docs_per_step or self.train_global_batch_size
        assert wanted is not None  # By _check_step.
        return wanted

    @model_validator(mode="before")
    @classmethod
    def _replace_default(cls, data: Any) -> Any:
        # docs_per_step alone is no conflict with a default that nobody wrote.
        if isinstance(data, Mapping) and data.get("docs_per_step") is not None:
            return {"train_global_batch_size": None, **data}
        return data

    @model_validator(mode="after")
    def _check_heads(self) -> PolicyConfig:
        hidden, heads = self.model.hidden_size, self.model.num_attention_heads
        if self.generation.backend == "vllm" and (hidden // heads) % 32:
            raise ValueError(
                f"generation.backend: vllm needs attention heads whose width is a multiple of 32; model.hidden_size / "
                f"model.num_attention_heads is {hidden} / {heads} = {hidden // heads}. Change one of them, or start "
                "from recipes/lab/vllm.yaml"
            )
        return self

    @model_validator(mode="after")
    def _check_blocks(self) -> PolicyConfig:
        block = self.generation.quantization and self.generation.quantization.block_size
        widths = {"hidden_size": self.model.hidden_size, "moe_intermediate_size": self.model.moe_intermediate_size}
        for name, width in widths.items():
            if block and width % block:
                raise ValueError(
                    f"model.{name} ({width}) must be a multiple of generation.quantization.block_size ({block}); "
                    "block_size: null has one scale for a channel"
                )
        return self

    @model_validator(mode="after")
    def _check_step(self) -> PolicyConfig:
        batch, documents = self.train_global_batch_size, self.docs_per_step
        if batch is not None and documents is not None:
            raise ValueError(
                f"train_global_batch_size ({batch}) and docs_per_step ({documents}) both say how large an optimiser "
                "step is; set one of them to null"
            )
        if batch is None and documents is None:
            raise ValueError("train_global_batch_size and docs_per_step are both null; set one of them")
        return self


class EnvConfig(StrictModel):
    """``env:``, the task; see :mod:`nemo_geomask.lab.task`."""

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
        if self.options and TASKS.is_own(self.name):
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
        if self.policy.generation.filters and self.lab.filter_logprobs and self.lab.tp > 1:
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
