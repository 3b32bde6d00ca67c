"""Parallel sizes that the model's heads and layers, or its backend, do not allow."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.tools.check.model_shapes import ModelShape, shape_of
from nemo_geomask.tools.check.parallel_layout import layout_keys, trained_sections
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule


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
        name = facts.get(f"{section}.model_name")
        if shape.heads % tp:
            yield Hit(key, f"{tp} does not divide the {shape.heads} attention heads of {name}; set a divisor")
        elif shape.kv_heads % tp:
            # Megatron repeats a key-value head on several ranks.
            is_megatron = facts.is_true(f"{section}.megatron_cfg.enabled")
            if not is_megatron:
                yield Hit(
                    key,
                    f"{tp} does not divide the {shape.kv_heads} key-value heads of {name}, as DTensor needs; set a "
                    "divisor",
                )
            elif tp % shape.kv_heads:
                yield Hit(
                    key,
                    f"{tp} is neither a divisor nor a multiple of the {shape.kv_heads} key-value heads of {name}; set "
                    "one",
                )


@rule("GM336", "error", "Megatron-LM `TransformerConfig`, `get_num_layers_to_build`", needs_loss=False)
def _layers(facts: RecipeFacts) -> Iterator[Hit]:
    """Pipeline-parallel size that does not divide the layers."""
    for section in trained_sections(facts):
        shape, key = _shape(section, facts), f"{section}.megatron_cfg.pipeline_model_parallel_size"
        if shape is None or not facts.is_true(f"{section}.megatron_cfg.enabled"):
            continue
        stages, layers = facts.size(key), shape.layers
        ends = {
            f"num_layers_in_{end}_pipeline_stage": facts.number(
                f"{section}.megatron_cfg.num_layers_in_{end}_pipeline_stage"
            )
            for end in ("first", "last")
        }
        stated = {name: int(count) for name, count in ends.items() if count}
        if stages < 2 or not stated:
            if stages > 1 and layers % stages:
                yield Hit(
                    key,
                    f"{stages} does not divide the {layers} layers of {facts.get(f'{section}.model_name')}; set a "
                    f"divisor, or {' and '.join(ends)}",
                )
            continue
        middle_stages, middle_layers = stages - len(stated), layers - sum(stated.values())
        is_even = middle_layers % middle_stages == 0 if middle_stages else middle_layers == 0
        if middle_layers < 0 or bool(middle_layers) != bool(middle_stages) or not is_even:
            counts = ", ".join(f"{name}: {count}" for name, count in stated.items())
            yield Hit(
                key,
                f"{stages} with {counts} leaves {middle_layers} of {layers} layers to {middle_stages} stages, which "
                "does not divide; change one of these",
            )
