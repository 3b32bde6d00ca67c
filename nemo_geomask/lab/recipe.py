"""The lab recipe: NeMo-RL's section and key names where NeMo-RL has them, checked strictly.

``loss_fn:`` is the very block of a NeMo-RL recipe; :func:`nemo_geomask.build_loss` validates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_geomask.config import StrictModel, nearest, parse
from nemo_geomask.errors import ConfigError

__all__ = ["EnvConfig", "GenerationConfig", "GrpoConfig", "LabConfig", "LabRecipe", "ModelConfig", "PolicyConfig"]

_PRESET_BOUNDS: dict[str, dict[str, Any]] = {
    # Wide enough to leave a healthy run alone, narrow enough to act once the engines part.
    "geometric": {"min": 0.98, "max": 1.02},
    "product": {"min": 0.5, "max": 2.0},
    "icepop": {"min": 0.5, "max": 5.0},
    "opsm": {"delta": 0.05},
    "veto": {"min": 0.5, "max": 2.0},
    "trust_region": {"statistic": "k3", "level": "sequence_mean", "max": 0.001},
}


class GrpoConfig(StrictModel):
    """``grpo:`` of NeMo-RL, the keys that the lab honours."""

    num_prompts_per_step: int = Field(16, gt=0, description="Different prompts in a rollout batch.")
    num_generations_per_prompt: int = Field(16, gt=1, description="Responses per prompt: the group of the baseline.")
    max_num_steps: int = Field(60, gt=0, description="Rollout batches to train on.")
    normalize_rewards: bool = Field(True, description="Divide the advantage by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="Baseline: mean of the other responses (RLOO).")
    advantage_clip_low: float | None = Field(None, description="Lower bound of the advantage; null: none.")
    advantage_clip_high: float | None = Field(None, description="Upper bound of the advantage; null: none.")
    seed: int = Field(42, ge=0, description="Seeds the weights, the prompts and the sampling.")

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


class GenerationConfig(StrictModel):
    """``policy.generation:``, the engine that samples."""

    precision: Literal["bfloat16", "float32"] = Field("bfloat16", description="Of weights, activations and KV cache.")
    mismatch: float = Field(0.0, ge=0, description="Scale of Gaussian noise added for study; 0: only real mismatch.")
    mismatch_on: Literal["logits", "weights"] = Field(
        "logits",
        description="logits: fresh noise of this standard deviation at every token; weights: noise of this size "
        "relative to each weight tensor's own standard deviation, drawn anew for each rollout batch.",
    )


class PolicyConfig(StrictModel):
    """``policy:`` of NeMo-RL, the keys that the lab honours."""

    model: ModelConfig = ModelConfig()
    generation: GenerationConfig = GenerationConfig()
    train_global_batch_size: int = Field(64, gt=0, description="Responses in one optimiser step.")
    train_micro_batch_size: int = Field(64, gt=0, description="Responses in one forward pass.")
    lr: float = Field(2.0e-3, gt=0, description="AdamW's learning rate, constant after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps over which the rate rises linearly.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")


class EnvConfig(StrictModel):
    """``env:``, the task; see :mod:`nemo_geomask.lab.task`."""

    name: Literal["progressions"] = Field("progressions", description="Continue a progression modulo a number.")
    modulus: int = Field(10, gt=2, description="Numbers there are; random ones earn 1/modulus.")
    min_terms: int = Field(8, gt=0, description="Fewest terms a prompt asks for.")
    max_terms: int = Field(48, gt=0, description="Most terms a prompt asks for.")

    @model_validator(mode="after")
    def _check_terms(self) -> EnvConfig:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) exceeds max_terms ({self.max_terms}); swap them")
        return self


class LabConfig(StrictModel):
    """``lab:``, what only the lab has."""

    num_threads: int = Field(2, gt=0, description="CPU threads; part of what makes a run repeatable.")
    rollouts_every: int = Field(10, gt=0, description="Write train_data_step{N}.jsonl every so many steps.")
    compare: tuple[str, ...] = Field((), description="Variants to train when --compare is not given.")
    presets: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Bounds that `+preset` in --compare stands for, key by key over the built-in; null removes one.",
    )

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
    def _check_batches(self) -> LabRecipe:
        rollouts = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        batch, micro = self.policy.train_global_batch_size, self.policy.train_micro_batch_size
        if rollouts % batch:
            raise ValueError(
                f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt ({rollouts}) must be a multiple of "
                f"policy.train_global_batch_size ({batch})"
            )
        if batch % micro:
            raise ValueError(
                f"policy.train_global_batch_size ({batch}) must be a multiple of policy.train_micro_batch_size "
                f"({micro})"
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
            # Problems between sections have no key of their own.
            lines = [line.removeprefix(": ") for line in str(error).splitlines()]
            raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None
