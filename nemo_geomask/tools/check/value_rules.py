"""GM321, GM323 to GM325 and GM339: single values that NeMo-RL, or vLLM, refuses when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.tools.check.config_classes import GENERATION_CLASSES
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_GENERATION = "policy.generation"
_PRECISIONS = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half")}
"""Precisions of NeMo-RL's trainers, each with names that other libraries give to it."""
# What vLLM's dtype accepts, and fp8, for which NeMo-RL loads its own quantised weights.
_VLLM_PRECISIONS = ("auto", "half", "float16", "bfloat16", "float", "float32", "fp8")
_POSITIVE = (
    *(f"{{algorithm}}.{name}" for name in ("num_prompts_per_step", "num_generations_per_prompt")),
    *(f"policy.{name}" for name in ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")),
    "policy.max_total_sequence_length",
    f"{_GENERATION}.max_new_tokens",
    *(f"{_GENERATION}.vllm_cfg.{name}" for name in ("tensor_parallel_size", "pipeline_parallel_size")),
    *(f"policy.dtensor_cfg.{name}" for name in ("tensor_parallel_size", "context_parallel_size")),
    *(
        f"policy.megatron_cfg.{name}_parallel_size"
        for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    ),
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "checkpointing.save_period",
    "policy.optimizer.kwargs.lr",
    "policy.megatron_cfg.optimizer.lr",
)
"""Keys whose values are above 0."""
_ESTIMATORS = {"grpo": ("grpo", "gdpo", "reinforce_plus_plus", "opd")}
_PACKING = "policy.sequence_packing.algorithm"
_PACKERS = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")


def _unknown_precision(facts: RecipeFacts) -> Iterator[Hit]:
    places = {"policy.precision": tuple(_PRECISIONS)}
    if facts.uses_vllm:
        places[f"{_GENERATION}.vllm_cfg.precision"] = _VLLM_PRECISIONS
    for key, allowed in places.items():
        value = facts.get(key)
        if isinstance(value, str) and value not in allowed:
            meant = next((name for name, aliases in _PRECISIONS.items() if value.lower() in (name, *aliases)), None)
            yield Hit(key, f"{value}: no such precision; write {meant or 'one of ' + ', '.join(allowed)}")


def _sampling_out_of_range(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_GENERATION}.temperature"
    temperature = facts.number(key)
    if temperature is not None and temperature <= 0 and not facts.is_lab:
        yield Hit(
            key,
            f"{temperature:g}: training divides the logits by the temperature, so all log-probs would be NaN, and "
            "greedy samples of one prompt are all the same; set 1.0",
        )
    key = f"{_GENERATION}.top_p"
    top_p = facts.number(key)
    if top_p is not None and not 0 < top_p <= 1:
        hint = f"; did you mean {top_p / 100:g}?" if 1 < top_p <= 100 else "; set 1.0 for no filtering"
        yield Hit(key, f"{top_p:g} is not above 0 and at most 1{hint}")
    key = f"{_GENERATION}.top_k"
    top_k = facts.number(key)
    if top_k is not None and top_k != -1 and top_k < 1:
        yield Hit(key, f"{top_k:g} is not a number of tokens; set null for no filtering, or 1 or more")


def _unknown_name(facts: RecipeFacts) -> Iterator[Hit]:
    places = {f"{_GENERATION}.backend": tuple(GENERATION_CLASSES)}
    if facts.algorithm in _ESTIMATORS:
        places[f"{facts.algorithm}.adv_estimator.name"] = _ESTIMATORS[facts.algorithm]
    if facts.is_true("policy.sequence_packing.enabled"):
        places[_PACKING] = _PACKERS
    for key, allowed in places.items():
        value = facts.get(key)
        # NeMo-RL takes the names of packing algorithms in upper case as well.
        if isinstance(value, str) and value not in allowed and not (key == _PACKING and value.lower() in allowed):
            meant = next((name for name in allowed if name == value.lower().replace("-", "_")), None)
            yield Hit(key, f"{value}: NeMo-RL has no such name; write {meant or 'one of ' + ', '.join(allowed)}")


def _not_positive(facts: RecipeFacts) -> Iterator[Hit]:
    keys = [key.format(algorithm=facts.algorithm) for key in _POSITIVE]
    if (facts.number(f"{facts.algorithm}.val_period") or 0) > 0:
        keys.append(f"{facts.algorithm}.val_batch_size")
    for key in keys:
        value = facts.number(key)
        # A learning rate of 0 is a way to measure without training.
        if value is not None and (value < 0 or (value == 0 and not key.endswith(".lr"))):
            yield Hit(key, f"{value:g} is not above 0; NeMo-RL divides by it, or starts nothing; set a positive number")


def _gpu_memory(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_GENERATION}.vllm_cfg.gpu_memory_utilization"
    fraction = facts.number(key)
    if facts.uses_vllm and fraction is not None and not 0 < fraction <= 1:
        hint = f"; did you mean {fraction / 100:g}?" if 5 <= fraction <= 100 else "; set 0.6, for example"
        yield Hit(key, f"{fraction:g} is not a fraction of the GPU's memory above 0 and at most 1{hint}")


RULES = (
    Rule(
        "GM321",
        "error",
        "precision that NeMo-RL does not know",
        "NeMo-RL `STRING_TO_DTYPE` (automodel/setup.py), `dtype_map` (megatron/setup.py); vLLM `dtype`",
        _unknown_precision,
        needs_loss=False,
        applies_to_lab=False,
    ),
    Rule(
        "GM323",
        "error",
        "temperature, top-p or top-k out of range",
        "NeMo-RL `VllmGeneration.__init__`, `apply_temperature_scaling`",
        _sampling_out_of_range,
        needs_loss=False,
    ),
    Rule(
        "GM324",
        "error",
        "generation backend, advantage estimator or packing algorithm that NeMo-RL does not have",
        "NeMo-RL `grpo.setup`, `_create_advantage_estimator`, `get_packer`",
        _unknown_name,
        applies_to_lab=False,
    ),
    Rule(
        "GM325",
        "error",
        "vLLM's part of the GPU memory out of range",
        "vLLM `CacheConfig.gpu_memory_utilization`",
        _gpu_memory,
        needs_loss=False,
    ),
    Rule(
        "GM339",
        "error",
        "size, period or learning rate that is not above 0",
        "NeMo-RL `grpo_train`, `shard_by_batch_size`; vLLM",
        _not_positive,
        needs_loss=False,
        applies_to_lab=False,
    ),
)
