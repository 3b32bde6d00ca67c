"""The policy, a small Qwen3-MoE from ``transformers`` with random initial weights, and its quantised copies.

Quantisation rounds the weights and scales them back. An engine that stores quantised weights and computes in a wider
format has the same arithmetic. Activations are not quantised.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.optional import require
from nemo_geomask.tools.lab.arithmetic import install_arithmetic
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_config import GenerationConfig, ModelConfig, QuantizationConfig
from nemo_geomask.tools.lab.tasks import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# The largest code of each format; a block's largest weight is scaled to it. Integer formats are symmetric.
_LARGEST_CODE = {"int8": 127.0, "int4": 7.0, "float8_e4m3": 448.0}
_QUANTIZED_NAMES = {"experts": (".experts.",), "linears": (".experts.", "_proj.")}


def round_to_format(weight: Tensor, number_format: str, block_size: int | None) -> Tensor:
    r"""Round a weight to a format with fewer bits.

    .. math:: s = \max_{j \in block} |w_j| / c_{max}, \qquad \hat w_j = s \cdot \mathrm{round}(w_j / s)

    ``block_size`` inputs of a weight [..., inputs] share a scale; None: all inputs of an output channel.

    Returns: the rounded weight in the same shape, float32.
    """
    blocks = weight.float().reshape(-1, block_size or weight.shape[-1])
    scale = blocks.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE[number_format]
    codes = blocks / torch.where(scale == 0, 1.0, scale)
    # The division may miss the largest code by one bit; the rounding corrects that.
    codes = codes.to(torch.float8_e4m3fn).float() if number_format == "float8_e4m3" else codes.round()
    return (codes * scale).view_as(weight)


@torch.no_grad()
def quantize(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """Round the weights of a model in place."""
    for name, weight in model.named_parameters():
        if any(part in name for part in _QUANTIZED_NAMES[config.layers]):
            weight.copy_(round_to_format(weight, config.weights, config.block_size))


def describe_engine(recipe: LabRecipe) -> str:
    """Describe the generation engine: ``bfloat16 with int4 experts in blocks of 32 (2 weight updates behind)``."""
    config, lag = recipe.policy.generation, recipe.grpo.async_grpo.lag
    parts: list[str] = [config.precision]
    if quantization := config.quantization:
        blocks = f" in blocks of {quantization.block_size}" if quantization.block_size else ""
        parts.append(f" with {quantization.weights} {quantization.layers}{blocks}")
    if lag:
        parts.append(f" ({lag} weight update{'s' * (lag > 1)} behind)")
    return "".join(parts)


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


@contextlib.contextmanager
def hook_routers(model: PreTrainedModel, replayed_routes: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Read the routes of forward passes within the block, or replace them.

    Args:
        model: a model with a router, ``mlp.gate``, in every layer.
        replayed_routes: [N, L, K] experts of N tokens in each layer, which replace the router's choice; -1 keeps it.
            They are weighted by the router's probabilities, so that the router still gets gradients.

    Yields: A list to which each layer appends the router's choice, [N, K].
    """
    chosen: list[Tensor] = []

    def read_or_replace(
        router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, router_choice = output
        chosen.append(router_choice)
        if replayed_routes is None:
            return None
        layer_routes = replayed_routes[:, (len(chosen) - 1) % replayed_routes.shape[1]].to(router_choice.dtype)
        route = torch.where(layer_routes < 0, router_choice, layer_routes)
        route_weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, route)
        if router.norm_topk_prob:
            route_weights = route_weights / route_weights.sum(dim=-1, keepdim=True)
        return logits, route_weights.to(weights.dtype), route

    layers: Any = model.model.layers
    handles = [layer.mlp.gate.register_forward_hook(read_or_replace) for layer in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def routes_differ(routes: Tensor, other_routes: Tensor) -> Tensor:
    """Compare routes [..., L, K]; return [...] bool, True if the sets of experts differ in at least one layer."""
    return (routes.sort(dim=-1).values != other_routes.sort(dim=-1).values).flatten(-2).any(dim=-1)
