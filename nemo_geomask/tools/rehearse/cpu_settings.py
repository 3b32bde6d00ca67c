"""Changes to a recipe that settings without a CPU implementation need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_geomask.tools.check import RecipeFacts, trained_sections
from nemo_geomask.tools.rehearse.setting_change import Change

__all__ = ["cpu_changes"]


def cpu_changes(facts: RecipeFacts, *, automodel: bool) -> Iterator[Change]:
    """Yield the changes, each with what the CPU lacks; ``automodel``: True if Automodel is installed."""
    settings: dict[str, tuple[Any, str]] = {
        "logger.monitor_gpus": (False, "there are none"),
        "policy.generation.vllm_cfg.enforce_eager": (True, "CUDA graphs"),
        "policy.generation.vllm_cfg.gpu_memory_utilization": (0.1, "of the machine's memory, not of a card's"),
        "policy.generation.vllm_cfg.use_deep_gemm": (False, "a kernel of CUDA's"),
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger": (False, "one process more"),
    }
    sampled_in = str(facts.get("policy.generation.vllm_cfg.precision"))
    if sampled_in in ("bfloat16", "float32"):
        # As a value: in most recipes it refers to the trainer's precision, which may change.
        settings["policy.generation.vllm_cfg.precision"] = (sampled_in, "")
    else:
        settings["policy.generation.vllm_cfg.precision"] = ("bfloat16", "vLLM's kernels for CPUs have no other")
    if facts.get("policy.generation.vllm_cfg.kv_cache_dtype", "auto") != "auto":
        settings["policy.generation.vllm_cfg.kv_cache_dtype"] = ("auto", "vLLM's kernels for CPUs have no other")
    for section in trained_sections(facts):
        settings |= {f"{section}.{key}": change for key, change in _trainer_changes(facts, section, automodel)}
    if "policy.dtensor_cfg._v2" in settings and facts.get("checkpointing.model_save_format") is not None:
        settings["checkpointing.model_save_format"] = (None, "DTensor v1's workers have one format")
    for key, (value, why) in settings.items():
        yield Change(key, value, facts.get(key), why, pinned=key.endswith("vllm_cfg.precision"))


def _trainer_changes(facts: RecipeFacts, section: str, automodel: bool) -> Iterator[tuple[str, tuple[Any, str]]]:
    if facts.is_true(f"{section}.megatron_cfg.enabled"):
        yield from _MEGATRON_ON_CPU.items()
        return
    if facts.is_true(f"{section}.sequence_packing.enabled"):
        yield "sequence_packing.enabled", (False, "packed rows need an attention kernel of CUDA's")
    if section == "policy" and facts.is_true("policy.dtensor_cfg._v2") and not automodel:
        why = "nemo_automodel is not importable here, nor in the checkout's 3rdparty: DTensor v1's workers"
        yield "dtensor_cfg._v2", (False, why)
        if facts.is_true("policy.dtensor_cfg.lora_cfg.enabled"):
            yield "dtensor_cfg.lora_cfg.enabled", (False, "DTensor v1's workers have none")


_TE = "transformer-engine's"
_MEGATRON_ON_CPU: dict[str, tuple[Any, str]] = {
    "megatron_cfg.transformer_impl": ("local", f"layers of Megatron's own in place of {_TE}"),
    "megatron_cfg.apply_rope_fusion": (False, f"a kernel of {_TE}"),
    "megatron_cfg.bias_activation_fusion": (False, "a compiled kernel"),
    "megatron_cfg.moe_permute_fusion": (False, f"a kernel of {_TE}"),
    "megatron_cfg.moe_enable_deepep": (False, "a kernel of CUDA's"),
    "megatron_cfg.checkpoint.async_save": (False, "copies from a card"),
    "megatron_cfg.optimizer.bf16": (False, "an optimiser of CUDA's"),
    "megatron_cfg.optimizer.use_precision_aware_optimizer": (False, f"an optimiser of {_TE}"),
    "megatron_cfg.optimizer.use_distributed_optimizer": (False, "an optimiser of CUDA's"),
    "megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": (False, "streams"),
    "megatron_cfg.distributed_data_parallel_config.overlap_param_gather": (False, "streams"),
    "precision": ("float32", "the optimiser for CPUs keeps no copy in another precision"),
}
