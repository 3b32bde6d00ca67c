"""Parallel sizes that the model's heads and layers, or its backend, do not allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.tools.check.model_shapes import ModelShape, positions_of, shape_of
from nemo_geomask.tools.check.parallel_layout import layout_keys
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_FP8_BLOCK = 128  # rows and columns of a block of weights that share a scale


def _shape(facts: RecipeFacts) -> ModelShape | None:
    return shape_of(str(facts.get("policy.model_name", "")))


@rule(
    "GM335",
    "error",
    "Megatron-LM `TransformerConfig`; NeMo-RL `_parallelize_model` (dtensor/parallelize.py)",
    models=("value", "teacher"),
    needs_loss=False,
)
def _heads(facts: RecipeFacts) -> Iterator[Hit]:
    """Tensor-parallel size that does not divide the attention heads."""
    shape, key = _shape(facts), layout_keys(facts)["tp"]
    tp, name = facts.size(key), facts.get("policy.model_name")
    if shape is None or not shape.heads or tp < 1:
        return
    if shape.heads % tp:
        yield Hit(key, f"{tp} does not divide the {shape.heads} attention heads of {name}; set a divisor")
    # Megatron repeats a key-value head on several ranks.
    elif shape.kv_heads % tp and (not facts.uses_megatron or tp % shape.kv_heads):
        fault = "is neither a divisor nor a multiple of" if facts.uses_megatron else "does not divide"
        yield Hit(key, f"{tp} {fault} the {shape.kv_heads} key-value heads of {name}; set a divisor")


@rule(
    "GM336",
    "error",
    "Megatron-LM `TransformerConfig`, `get_num_layers_to_build`",
    models=("value", "teacher"),
    needs_loss=False,
)
def _layers(facts: RecipeFacts) -> Iterator[Hit]:
    """Pipeline-parallel size that does not divide the layers."""
    shape, key = _shape(facts), "policy.megatron_cfg.pipeline_model_parallel_size"
    if shape is None or not facts.uses_megatron:
        return
    stages, layers = facts.size(key), shape.layers
    names = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    stated = {name: int(count) for name in names if (count := facts.number(f"policy.megatron_cfg.{name}"))}
    middle_stages, middle_layers = stages - len(stated), layers - sum(stated.values())
    is_even = middle_layers % middle_stages == 0 if middle_stages else middle_layers == 0
    if stages > 1 and (middle_layers < 0 or bool(middle_layers) != bool(middle_stages) or not is_even):
        counts = ", ".join(f"{name}: {count}" for name, count in stated.items())
        yield Hit(
            key,
            f"{stages}{f' with {counts}' if counts else ''} leaves {middle_layers} of the {layers} layers of "
            f"{facts.get('policy.model_name')} to {middle_stages} stages, which does not divide; set a divisor, or "
            f"{' and '.join(names)}",
        )


@rule("GM359", "error", "NeMo-RL `check_vocab_equality` (distillation.py), `ppo.setup`", needs_loss=False)
def _other_vocabulary(facts: RecipeFacts) -> Iterator[Hit]:
    """Teacher, or critic, of another vocabulary than the policy's."""
    # A critic does not mind how the vocabulary of one tokenizer is padded; distillation does.
    for section, padding in (("teacher", 0), ("value", 1024)):
        name, shape = facts.get(f"{section}.model_name"), _shape(facts)
        other = shape_of(str(name))
        if shape is not None and other is not None and abs(shape.vocab - other.vocab) > padding:
            yield Hit(
                f"{section}.model_name",
                f"{name} has a vocabulary of {other.vocab}, and {facts.get('policy.model_name')}, whose token ids it "
                f"gets, one of {shape.vocab}; name models of one family",
            )


@rule("GM411", "error", "vLLM `_get_and_verify_max_len`", needs_loss=False)
def _positions(facts: RecipeFacts) -> Iterator[Hit]:
    """Sequences longer than the model has positions for."""
    key = "policy.generation.vllm_cfg.max_model_len"
    length, positions = facts.number(key), positions_of(str(facts.get("policy.model_name", "")))
    overrides = [facts.get(f"policy.{name}") for name in ("hf_config_overrides", "generation.vllm_kwargs.hf_overrides")]
    scaling = "policy.hf_config_overrides.rope_scaling"
    factor, original = (facts.number(f"{scaling}.{name}") for name in ("factor", "original_max_position_embeddings"))
    if facts.uses_vllm and factor and original and length is not None and factor * original < length:
        message = f"{factor:g} x {original:g} positions are fewer than {key}: {length:g}, and vLLM does not start"
        yield Hit(f"{scaling}.factor", message, fix={f"{scaling}.factor": math.ceil(length / original)})
    if facts.uses_vllm and positions is not None and length is not None and length > positions and not any(overrides):
        model = facts.get("policy.model_name")
        yield Hit(key, f"{length:g}: {model} has {positions} positions, and vLLM does not start", fix={key: positions})


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
    shape, key = _shape(facts), f"{vllm}.tensor_parallel_size"
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
