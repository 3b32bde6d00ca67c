"""``policy:`` of a lab recipe: the model, its generation engine and its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_geomask.config import StrictModel


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
    """``policy.generation.quantization:``, by which the generation engine's weights are rounded at each refit."""

    weights: Literal["int8", "int4", "float8_e4m3"] = Field(description="Format that the weights are rounded to.")
    block_size: int | None = Field(
        None,
        gt=0,
        description="Number of successive inputs whose weights share a scale; null: one scale for each output channel.",
    )
    layers: Literal["experts", "linears"] = Field(
        "experts",
        description="experts: the experts' projections; linears: also those of the attention. Router, embedding and "
        "output layer are not rounded.",
    )


class GenerationConfig(StrictModel):
    """``policy.generation:``, the engine that samples."""

    backend: Literal["copy", "vllm"] = Field(
        "copy",
        description="copy: a copy of the policy that decodes with a KV cache; vllm: the installed vLLM, into which the "
        "policy's weights are loaded for each rollout batch.",
    )
    precision: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Precision of weights, activations and KV cache."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature that the logits of both engines are divided by.")
    unknown_temperature: float = Field(
        1.0,
        gt=0,
        description="Temperature that the engine divides its logits by, too, and the trainer does not know of.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens that together have this probability; 1: from all tokens.",
    )
    top_k: int | None = Field(
        None, gt=0, description="Sample from this many most likely tokens; null: from all tokens."
    )
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        "processed_logprobs",
        description="Log-probs that the engine reports, by vLLM's names. processed_logprobs: of the distribution that "
        "it sampled from; raw_logprobs: of the distribution before temperature, top_p and top_k.",
    )
    ignore_eos: bool = Field(
        False,
        description="vLLM's option: EOS does not end a response, so all responses have the requested length.",
    )
    quantization: QuantizationConfig | None = Field(
        None,
        description="Rounding of the weights; products with the rounded weights are in `precision`. null: no rounding.",
    )
    logprobs: Literal["engine", "trainer"] = Field(
        "engine",
        description="Engine that computes the generation_logprobs of the loss. engine: the generation engine; trainer: "
        "the training engine, with the weights that sampled, as a control without numerical mismatch.",
    )
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="NeMo-RL's key: further arguments of vLLM's engine, for backend: vllm."
    )

    @property
    def has_filters(self) -> bool:
        """True if top_p or top_k excludes tokens from sampling."""
        return self.top_p < 1 or self.top_k is not None

    @model_validator(mode="after")
    def _check_backend(self) -> GenerationConfig:
        if self.backend == "vllm" and self.logprobs_mode == "raw_logprobs":
            raise ValueError(
                "logprobs_mode: raw_logprobs needs backend: copy; set backend: copy, or logprobs_mode: "
                "processed_logprobs"
            )
        if self.vllm_kwargs and self.backend != "vllm":
            raise ValueError(
                f"vllm_kwargs ({', '.join(self.vllm_kwargs)}) are vLLM's, and backend is {self.backend}; set backend: "
                "vllm, or remove them"
            )
        if reserved := sorted({"model", "load_format", "skip_tokenizer_init"} & set(self.vllm_kwargs)):
            raise ValueError(f"vllm_kwargs ({', '.join(reserved)}): the lab sets these arguments; remove them")
        return self


class RouterReplayConfig(StrictModel):
    """``policy.router_replay:`` of NeMo-RL."""

    enabled: bool = Field(
        False, description="Send each token, in training, through the experts that the generation engine chose."
    )


class PolicyConfig(StrictModel):
    """``policy:`` of NeMo-RL; only the keys that the lab supports."""

    model: ModelConfig = ModelConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Precision of the training forward and backward pass; bfloat16 by autocast, as in NeMo-RL's "
        "DTensor worker. The weights that the optimiser updates are always float32.",
    )
    generation: GenerationConfig = GenerationConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    train_global_batch_size: int | None = Field(
        64, gt=0, description="Responses in one optimiser step; null if docs_per_step is set."
    )
    docs_per_step: int | None = Field(
        None,
        gt=0,
        description="Draw microbatches for an optimiser step until it has this many responses over all data-parallel "
        "ranks. It replaces train_global_batch_size and has no rules of divisibility.",
    )
    train_micro_batch_size: int = Field(64, gt=0, description="Responses in one forward pass of a data-parallel rank.")
    lr: float = Field(2.0e-3, gt=0, description="AdamW's learning rate, constant after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps over which the learning rate rises linearly.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")

    @property
    def documents(self) -> int:
        """Number of responses in an optimiser step."""
        documents = self.docs_per_step or self.train_global_batch_size
        assert documents is not None  # guaranteed by _check
        return documents

    @model_validator(mode="before")
    @classmethod
    def _replace_default(cls, data: Any) -> Any:
        # A recipe that sets only docs_per_step does not conflict with the default batch size.
        if isinstance(data, Mapping) and data.get("docs_per_step") is not None:
            return {"train_global_batch_size": None, **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        hidden, heads = self.model.hidden_size, self.model.num_attention_heads
        if self.generation.backend == "vllm" and (hidden // heads) % 32:
            raise ValueError(
                f"generation.backend: vllm needs attention heads whose width is a multiple of 32; model.hidden_size / "
                f"model.num_attention_heads is {hidden} / {heads} = {hidden // heads}. Change one of them, or start "
                "from recipes/lab/vllm.yaml"
            )
        block = self.generation.quantization and self.generation.quantization.block_size
        widths = {"hidden_size": self.model.hidden_size, "moe_intermediate_size": self.model.moe_intermediate_size}
        for name, width in widths.items():
            if block and width % block:
                raise ValueError(
                    f"model.{name} ({width}) must be a multiple of generation.quantization.block_size ({block}); "
                    "block_size: null uses one scale for each output channel"
                )
        batch, documents = self.train_global_batch_size, self.docs_per_step
        if batch is not None and documents is not None:
            raise ValueError(
                f"train_global_batch_size ({batch}) and docs_per_step ({documents}) both set the size of an optimiser "
                "step; set one of them to null"
            )
        if batch is None and documents is None:
            raise ValueError("train_global_batch_size and docs_per_step are both null; set one of them")
        return self
