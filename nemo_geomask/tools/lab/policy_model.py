"""The policy: a small Qwen3-MoE from ``transformers`` with random initial weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.optional import require
from nemo_geomask.tools.lab.arithmetic import install_arithmetic
from nemo_geomask.tools.lab.policy_config import GenerationConfig, ModelConfig
from nemo_geomask.tools.lab.progression_task import Task
from nemo_geomask.tools.lab.quantization import quantize

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["build_policy", "checkpoint_weights", "generation_copy", "policy_config", "token_logprobs"]


def policy_config(config: ModelConfig, task: Task) -> PretrainedConfig:
    """Return the policy's configuration for ``transformers`` and vLLM."""
    transformers: Any = require("transformers", "the lab needs", "demo")
    hf_config: PretrainedConfig = transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=task.vocab_size,
        hidden_size=config.hidden_size,
        # Only dense layers use it, and every layer here is sparse.
        intermediate_size=config.moe_intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        norm_topk_prob=True,
        max_position_embeddings=task.prompt_width + task.max_terms,
        initializer_range=config.initializer_range,
        tie_word_embeddings=False,
        pad_token_id=task.pad_id,
        eos_token_id=task.eos_id,
    )
    return hf_config


def build_policy(config: ModelConfig, task: Task, seed: int, device: str = "cpu") -> PreTrainedModel:
    """Build a ``Qwen3MoeForCausalLM`` in float32; the same seed gives the same weights on every device."""
    transformers: Any = require("transformers", "the lab needs", "demo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            policy_config(config, task), dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
    placed: Any = policy
    placed.to(device)
    install_arithmetic(policy)
    return policy


def generation_copy(policy: PreTrainedModel, config: GenerationConfig) -> PreTrainedModel:
    """Copy the policy for the generation engine: quantised if configured, and cast to the engine's precision."""
    engine: PreTrainedModel = copy.deepcopy(policy).requires_grad_(False).train(False)
    if config.quantization is not None:
        quantize(engine, config.quantization)
    cast: PreTrainedModel = engine.to(getattr(torch, config.precision))
    return cast


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names in a checkpoint, where each expert's projections are separate.

    ``transformers`` stacks the experts of a layer: ``gate_up_proj`` [experts, 2·width, hidden] and
    ``down_proj`` [experts, hidden, width].
    """
    for name, weight in model.state_dict().items():
        layer, dot, stacked = name.partition(".experts.")
        if not dot:
            yield name, weight
            continue
        for expert, projections in enumerate(weight):
            names = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,)
            for part, projection in zip(names, projections.chunk(len(names)), strict=True):
                yield f"{layer}.experts.{expert}.{part}.weight", projection


def token_logprobs(
    model: PreTrainedModel, input_ids: Tensor, transform: Callable[[Tensor], Tensor] = lambda logits: logits
) -> Tensor:
    """Return the float32 log-prob of each next token, [B, T-1], for ids [B, T], after transforming the logits.

    Padding is on the right, where causal attention hides it, so no mask is needed.
    """
    logits = transform(model(input_ids=input_ids, use_cache=False).logits[:, :-1].float())
    return torch.gather(logits.log_softmax(dim=-1), -1, input_ids[:, 1:, None]).squeeze(-1)
