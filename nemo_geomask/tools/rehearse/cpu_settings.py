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
    for key, lost in _LEFT_OUT.items():
        if facts.get(key) not in (None, False):
            settings[key] = lost
    if facts.get("data_plane.backend") == "mooncake_cpu":
        settings["data_plane.backend"] = ("simple", "Mooncake is not in these requirements")
    for section in trained_sections(facts):
        settings |= {f"{section}.{key}": change for key, change in _trainer_changes(facts, section, automodel)}
    if "policy.dtensor_cfg._v2" in settings and facts.get("checkpointing.model_save_format") is not None:
        settings["checkpointing.model_save_format"] = (None, "DTensor v1's workers have one format")
    for key, (value, why) in settings.items():
        pinned = key.endswith("vllm_cfg.precision")
        yield Change(key, value, facts.get(key), why, delete=isinstance(value, dict), pinned=pinned)


def _trainer_changes(facts: RecipeFacts, section: str, automodel: bool) -> Iterator[tuple[str, tuple[Any, str]]]:
    if facts.is_true(f"{section}.megatron_cfg.enabled"):
        optional = ("fp8_cfg.enabled", "cuda_graph_impl", "mtp_num_layers")
        for key, change in _MEGATRON_ON_CPU.items():
            if not key.endswith(optional) or facts.get(f"{section}.{key}") is not None:
                yield key, change
        # Flex is a dispatcher of kernels: its exchange is all-to-all.
        if facts.get(f"{section}.megatron_cfg.moe_token_dispatcher_type") == "flex":
            yield "megatron_cfg.moe_token_dispatcher_type", ("alltoall", "kernels of CUDA's")
        return
    optimizer = str(facts.get(f"{section}.optimizer.name", ""))
    if optimizer.startswith("transformer_engine"):
        kwargs = facts.get(f"{section}.optimizer.kwargs", {})
        plain = {key: value for key, value in kwargs.items() if key in ("lr", "weight_decay", "betas", "eps")}
        yield "optimizer", ({"name": "torch.optim.AdamW", "kwargs": plain}, f"an optimiser of {_TE}")
    backend = "dtensor_cfg.automodel_kwargs.backend"
    for key, (value, why) in _AUTOMODEL_ON_CPU.items():
        if facts.get(f"{section}.{backend}.{key}") not in (None, value, "torch_fp32"):
            yield f"{backend}.{key}", (value, why)
    if facts.is_true(f"{section}.sequence_packing.enabled"):
        yield "sequence_packing.enabled", (False, "packed rows need an attention kernel of CUDA's")
    if section == "policy" and facts.is_true("policy.dtensor_cfg._v2") and not automodel:
        why = "nemo_automodel is not importable here, nor in the checkout's 3rdparty: DTensor v1's workers"
        yield "dtensor_cfg._v2", (False, why)
        if facts.is_true("policy.dtensor_cfg.lora_cfg.enabled"):
            yield "dtensor_cfg.lora_cfg.enabled", (False, "DTensor v1's workers have none")


_TE = "transformer-engine's"
_LEFT_OUT: dict[str, tuple[Any, str]] = {
    # Whatever the recipe has there.
    "policy.quant_cfg": (None, "quantised kernels of CUDA's"),
    "policy.generation.quant_cfg": (None, "quantised kernels of CUDA's"),
    "policy.generation.real_quant": (False, "quantised kernels of CUDA's"),
    "policy.draft.enabled": (False, "the draft is a model of its own"),
    "policy.generation.vllm_kwargs.speculative_config": (None, "the draft is a model of its own"),
    "policy.generation.vllm_kwargs.moe_backend": ("auto", "a kernel of CUDA's"),
    "policy.generation.vllm_kwargs.attention_backend": (None, "a kernel of CUDA's"),
    "policy.generation.vllm_kwargs.quantization": (None, "quantised kernels of CUDA's"),
    "policy.generation.refit_transport": (None, "new weights go to vLLM by NeMo-RL's default way"),
}
_AUTOMODEL_ON_CPU: dict[str, tuple[Any, str]] = {
    "attn": ("sdpa", f"attention of {_TE}"),
    "linear": ("torch", f"layers of {_TE}"),
    "rms_norm": ("torch", f"a norm of {_TE}"),
    "experts": ("torch", "a kernel of CUDA's"),
    "dispatcher": ("torch", "a kernel of CUDA's"),
    "enable_deepep": (False, "a kernel of CUDA's"),
    "rope_fusion": (False, f"a kernel of {_TE}"),
}
_MEGATRON_ON_CPU: dict[str, tuple[Any, str]] = {
    "megatron_cfg.transformer_impl": ("local", f"layers of Megatron's own in place of {_TE}"),
    "megatron_cfg.apply_rope_fusion": (False, f"a kernel of {_TE}"),
    "megatron_cfg.bias_activation_fusion": (False, "a compiled kernel"),
    "megatron_cfg.moe_permute_fusion": (False, f"a kernel of {_TE}"),
    "megatron_cfg.moe_enable_deepep": (False, "a kernel of CUDA's"),
    "megatron_cfg.moe_shared_expert_overlap": (False, "streams"),
    "megatron_cfg.gradient_accumulation_fusion": (False, "a kernel of CUDA's"),
    "megatron_cfg.fp8_cfg.enabled": (False, f"kernels of {_TE}"),
    "megatron_cfg.cuda_graph_impl": ("none", "CUDA graphs"),
    "megatron_cfg.mtp_num_layers": (0, "the tiny model predicts one token"),
    "megatron_cfg.checkpoint.async_save": (False, "copies from a card"),
    "megatron_cfg.optimizer.bf16": (False, "an optimiser of CUDA's"),
    "megatron_cfg.optimizer.use_precision_aware_optimizer": (False, f"an optimiser of {_TE}"),
    "megatron_cfg.optimizer.use_distributed_optimizer": (False, "an optimiser of CUDA's"),
    "megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": (False, "streams"),
    "megatron_cfg.distributed_data_parallel_config.overlap_param_gather": (False, "streams"),
    "precision": ("float32", "the optimiser for CPUs keeps no copy in another precision"),
}
