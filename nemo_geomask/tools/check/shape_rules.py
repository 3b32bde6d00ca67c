"""Parallel sizes that the model's heads and layers, or its backend, do not allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.tools.check.model_shapes import ModelShape, shape_of
from nemo_geomask.tools.check.parallel_layout import layout_keys, trained_sections
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_FP8_BLOCK = 128  # rows and columns of a block of weights that share a scale


def _shape(section: str, facts: RecipeFacts) -> ModelShape | None:
    return shape_of(str(facts.get(f"{section}.model_name", "")))


@rule(
    "GM335",
    "error",
    "Megatron-LM `TransformerConfig`; NeMo-RL `_parallelize_model` (dtensor/parallelize.py)",
    needs_loss=False,
)
def _heads(facts: RecipeFacts) -> Iterator[Hit]:
    """Tensor-parallel size that does not divide the attention heads."""
    for section in trained_sections(facts):
        shape, key = _shape(section, facts), layout_keys(facts, section)["tp"]
        tp = facts.size(key)
        if shape is None or not shape.heads or tp < 1:
            continue
        name, is_megatron = facts.get(f"{section}.model_name"), facts.is_true(f"{section}.megatron_cfg.enabled")
        if shape.heads % tp:
            yield Hit(key, f"{tp} does not divide the {shape.heads} attention heads of {name}; set a divisor")
        # Megatron repeats a key-value head on several ranks.
        elif shape.kv_heads % tp and (not is_megatron or tp % shape.kv_heads):
            fault = "is neither a divisor nor a multiple of" if is_megatron else "does not divide"
            yield Hit(key, f"{tp} {fault} the {shape.kv_heads} key-value heads of {name}; set a divisor")


@rule("GM336", "error", "Megatron-LM `TransformerConfig`, `get_num_layers_to_build`", needs_loss=False)
def _layers(facts: RecipeFacts) -> Iterator[Hit]:
    """Pipeline-parallel size that does not divide the layers."""
    for section in trained_sections(facts):
        shape, key = _shape(section, facts), f"{section}.megatron_cfg.pipeline_model_parallel_size"
        if shape is None or not facts.is_true(f"{section}.megatron_cfg.enabled"):
            continue
        stages, layers = facts.size(key), shape.layers
        names = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
        stated = {name: int(count) for name in names if (count := facts.number(f"{section}.megatron_cfg.{name}"))}
        middle_stages, middle_layers = stages - len(stated), layers - sum(stated.values())
        is_even = middle_layers % middle_stages == 0 if middle_stages else middle_layers == 0
        if stages > 1 and (middle_layers < 0 or bool(middle_layers) != bool(middle_stages) or not is_even):
            counts = ", ".join(f"{name}: {count}" for name, count in stated.items())
            yield Hit(
                key,
                f"{stages}{f' with {counts}' if counts else ''} leaves {middle_layers} of the {layers} layers of "
                f"{facts.get(f'{section}.model_name')} to {middle_stages} stages, which does not divide; set a "
                f"divisor, or {' and '.join(names)}",
            )


@rule(
    "GM358",
    "error",
    "vLLM `Fp8MoEMethod`, `Fp8LinearMethod` (not divisible by weight quantization block_n), issue 25292; NeMo-RL "
    "`FP8_BLOCK_QUANT_KWARGS`",
    refusals=('"weight_block_size": [128, 128]',),
    applies_to_lab=False,
)
def _fp8_blocks(facts: RecipeFacts) -> Iterator[Hit]:
    """vLLM's tensor-parallel size that splits a block of fp8 weights."""
    vllm = "policy.generation.vllm_cfg"
    shape, key = _shape("policy", facts), f"{vllm}.tensor_parallel_size"
    has_experts, tp = facts.moe_key is not None, facts.size(key)
    is_blocked = facts.uses_vllm and facts.get(f"{vllm}.precision") == "fp8" and not facts.is_true(f"{vllm}.is_mx")
    # Experts on ranks of their own are not split.
    is_split = tp > 1 and not (has_experts and facts.size(f"{vllm}.expert_parallel_size") > 1)
    if shape is None or not is_blocked or not is_split or shape.mlp % _FP8_BLOCK or shape.mlp % (tp * _FP8_BLOCK) == 0:
        return
    yield Hit(
        key,
        f"{tp} leaves {shape.mlp / tp:g} of the {shape.mlp} columns of each {'expert' if has_experts else 'MLP'} of "
        f"{facts.get('policy.model_name')} to a rank, which is no multiple of {_FP8_BLOCK}, the size of fp8's blocks, "
        f"and vLLM does not start; {{fix}}{', or an expert_parallel_size' if has_experts else ''}",
        fix={key: math.gcd(shape.mlp // _FP8_BLOCK, tp)},
    )
