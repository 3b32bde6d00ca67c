"""Settings that a rehearsal changes: their form on a command line, and those that have no CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_geomask.tools.check import RecipeFacts, trained_sections
from nemo_geomask.tools.rehearse.refusals import BACKEND
from nemo_geomask.yaml_text import inline_yaml

GENERATION_PRECISION = "policy.generation.vllm_cfg.precision"


@dataclass(frozen=True)
class Change:
    """Change of one setting."""

    key: str  # dotted key
    value: Any  # the new value; None is written as null
    why: str = ""  # reason in a few words; empty if the change follows from the tiny model, the prompts or the folders
    was: Any = None  # the recipe's value; None if it has none

    @property
    def is_effective(self) -> bool:
        """True unless the value stays the same.

        The engine's precision is always written: most recipes interpolate the trainer's, which may change.
        """
        return self.was != self.value or self.key == GENERATION_PRECISION

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for NeMo-RL's command line; a mapping is deleted first, which would be merged otherwise."""
        deletion = [f"~{self.key}"] if isinstance(self.value, dict) and self.was is not None else []
        return (*deletion, f"++{self.key}={inline_yaml(self.value)}")


_CACHE_DTYPE = "policy.generation.vllm_cfg.kv_cache_dtype"


def cpu_changes(
    facts: RecipeFacts, *, has_automodel: bool, is_recurrent: bool, has_fp8_cache: bool
) -> Iterator[Change]:
    """Yield the changes, each with what the CPU lacks.

    Args:
        is_recurrent: True if layers of the model keep a state, as Mamba's and linear attention do.
        has_fp8_cache: True if vLLM has kernels for an fp8 KV cache on this processor.
    """
    settings: dict[str, tuple[Any, str]] = {
        "logger.monitor_gpus": (False, "there are no GPUs"),
        "policy.generation.vllm_cfg.enforce_eager": (True, "CUDA graphs"),
        "policy.generation.vllm_cfg.gpu_memory_utilization": (
            0.1,
            "a fraction of the machine's memory, not of a GPU's",
        ),
        "policy.generation.vllm_cfg.use_deep_gemm": (False, "a CUDA kernel"),
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger": (False, "would start another process"),
    }
    generation_precision = str(facts.get(GENERATION_PRECISION))
    # NeMo-RL reads the cache's dtype with precision: fp8 alone.
    keeps_fp8_cache = has_fp8_cache and generation_precision == "fp8" and str(facts.get(_CACHE_DTYPE)).startswith("fp8")
    if keeps_fp8_cache:
        # Without quantised weights: every layer's name contains this empty word.
        settings["policy.generation.vllm_cfg.quantization_ignored_layer_kws"] = ([""], "")
        if facts.is_true("policy.generation.vllm_cfg.is_mx"):
            settings["policy.generation.vllm_cfg.is_mx"] = (False, "quantised CUDA kernels")
    elif generation_precision in ("bfloat16", "float32"):
        settings[GENERATION_PRECISION] = (generation_precision, "")
    else:
        settings[GENERATION_PRECISION] = ("bfloat16", "vLLM's CPU kernels support no other")
    if not keeps_fp8_cache and facts.get(_CACHE_DTYPE, "auto") != "auto":
        settings[_CACHE_DTYPE] = ("auto", "vLLM's kernels for this processor support no other")
    if is_recurrent:
        # NeMo-RL turns it on by default on GPUs of compute capability 8 or higher, which the shim of CUDA reports.
        caching = "policy.generation.vllm_cfg.enable_prefix_caching"
        settings[caching] = (
            False,
            "it needs several states a sequence, and vLLM's CPU kernels of Mamba and linear attention keep one",
        )
    settings |= _vllm_in_place_of_another(facts)
    for key, replacement in _LEFT_OUT.items():
        if facts.get(key) not in (None, False):
            settings[key] = replacement
    if facts.get("data_plane.backend") == "mooncake_cpu":
        settings["data_plane.backend"] = ("simple", "Mooncake is not among the rehearsal's requirements")
    for section in trained_sections(facts):
        settings |= {f"{section}.{key}": change for key, change in _trainer_changes(facts, section, has_automodel)}
    if "policy.dtensor_cfg._v2" in settings and facts.get("checkpointing.model_save_format") is not None:
        settings["checkpointing.model_save_format"] = (None, "DTensor v1's workers have a single format")
    for key, (value, why) in settings.items():
        yield Change(key, value, why)


_ASYNC_ENGINE = "policy.generation.vllm_cfg.async_engine"
_COLOCATED = "policy.generation.colocated.enabled"


def _vllm_in_place_of_another(facts: RecipeFacts) -> dict[str, tuple[Any, str]]:
    """Return the settings by which vLLM samples for a recipe with another backend; empty for vLLM's recipes."""
    backend = facts.get(BACKEND, "vllm")
    if backend == "vllm":
        return {}
    settings: dict[str, tuple[Any, str]] = {BACKEND: ("vllm", f"{backend} samples on GPUs alone; vLLM takes its place")}
    if facts.is_true("grpo.async_grpo.enabled"):
        settings[_ASYNC_ENGINE] = (True, "asynchronous GRPO needs vLLM's asynchronous engine")
        settings[_COLOCATED] = (False, "beside the trainer, vLLM can't sample asynchronously")
    return settings


def is_colocated(facts: RecipeFacts) -> bool:
    """Return True if trainer and sampler share GPUs in the rehearsal."""
    value, _ = _vllm_in_place_of_another(facts).get(_COLOCATED, (facts.get(_COLOCATED, True), ""))
    return bool(value)


def _trainer_changes(facts: RecipeFacts, section: str, has_automodel: bool) -> Iterator[tuple[str, tuple[Any, str]]]:
    if facts.is_true(f"{section}.megatron_cfg.enabled"):
        optional = ("fp8_cfg.enabled", "cuda_graph_impl", "mtp_num_layers")
        for key, change in _MEGATRON_ON_CPU.items():
            if not key.endswith(optional) or facts.get(f"{section}.{key}") is not None:
                yield key, change
        # flex selects CUDA kernels for the same exchange of tokens, all-to-all.
        if facts.get(f"{section}.megatron_cfg.moe_token_dispatcher_type") == "flex":
            yield "megatron_cfg.moe_token_dispatcher_type", ("alltoall", "CUDA kernels")
        return
    optimizer = str(facts.get(f"{section}.optimizer.name", ""))
    if optimizer.startswith("transformer_engine"):
        kwargs = facts.get(f"{section}.optimizer.kwargs", {})
        plain = {key: value for key, value in kwargs.items() if key in ("lr", "weight_decay", "betas", "eps")}
        yield "optimizer", ({"name": "torch.optim.AdamW", "kwargs": plain}, f"needs {_TE}'s optimiser")
    backend = "dtensor_cfg.automodel_kwargs.backend"
    for key, (value, why) in _AUTOMODEL_ON_CPU.items():
        if facts.get(f"{section}.{backend}.{key}") not in (None, value, "torch_fp32"):
            yield f"{backend}.{key}", (value, why)
    if facts.is_true(f"{section}.sequence_packing.enabled"):
        yield "sequence_packing.enabled", (False, "packed rows need a CUDA attention kernel")
    lora = "dtensor_cfg.lora_cfg"
    if facts.is_true(f"{section}.{lora}.enabled") and facts.is_true(f"{section}.{lora}.use_triton"):
        yield f"{lora}.use_triton", (False, "Triton kernels")
    if section == "policy" and facts.is_true("policy.dtensor_cfg._v2") and not has_automodel:
        why = "nemo_automodel can be imported neither here nor from the checkout's 3rdparty: DTensor v1's workers"
        yield "dtensor_cfg._v2", (False, why)
        if facts.is_true(f"policy.{lora}.enabled"):
            yield f"{lora}.enabled", (False, "DTensor v1's workers have no LoRA")


_TE = "transformer-engine"
_LEFT_OUT: dict[str, tuple[Any, str]] = {
    # By key: the replacement of any value but null and false, and what the CPU lacks.
    "policy.quant_cfg": (None, "quantised CUDA kernels"),
    "policy.generation.quant_cfg": (None, "quantised CUDA kernels"),
    "policy.generation.real_quant": (False, "quantised CUDA kernels"),
    "policy.draft.enabled": (False, "no draft model is made"),
    "policy.generation.vllm_kwargs.speculative_config": (None, "no draft model is made"),
    "policy.generation.vllm_kwargs.moe_backend": ("auto", "a CUDA kernel"),
    "policy.generation.vllm_kwargs.attention_backend": (None, "a CUDA kernel"),
    "policy.generation.vllm_kwargs.quantization": (None, "quantised CUDA kernels"),
    "policy.generation.refit_transport": (None, "weights are sent to vLLM by NeMo-RL's default transport"),
}
_AUTOMODEL_ON_CPU: dict[str, tuple[Any, str]] = {
    "attn": ("sdpa", f"{_TE}'s attention"),
    "linear": ("torch", f"{_TE}'s layers"),
    "rms_norm": ("torch", f"{_TE}'s norm"),
    "experts": ("torch", "a CUDA kernel"),
    "dispatcher": ("torch", "a CUDA kernel"),
    "enable_deepep": (False, "a CUDA kernel"),
    "rope_fusion": (False, f"a {_TE} kernel"),
}
_MEGATRON_ON_CPU: dict[str, tuple[Any, str]] = {
    "megatron_cfg.transformer_impl": ("local", f"Megatron's own layers in place of {_TE}'s"),
    "megatron_cfg.apply_rope_fusion": (False, f"a {_TE} kernel"),
    "megatron_cfg.bias_activation_fusion": (False, "a compiled kernel"),
    "megatron_cfg.moe_permute_fusion": (False, f"a {_TE} kernel"),
    "megatron_cfg.moe_enable_deepep": (False, "a CUDA kernel"),
    "megatron_cfg.moe_shared_expert_overlap": (False, "CUDA streams"),
    "megatron_cfg.gradient_accumulation_fusion": (False, "a CUDA kernel"),
    "megatron_cfg.fp8_cfg.enabled": (False, f"{_TE} kernels"),
    "megatron_cfg.cuda_graph_impl": ("none", "CUDA graphs"),
    "megatron_cfg.mtp_num_layers": (0, "the tiny model predicts the next token only"),
    "megatron_cfg.checkpoint.async_save": (False, "copies from GPU memory"),
    "megatron_cfg.optimizer.bf16": (False, "exists on CUDA only"),
    "megatron_cfg.optimizer.use_precision_aware_optimizer": (False, f"needs {_TE}'s optimiser"),
    "megatron_cfg.optimizer.use_distributed_optimizer": (False, "exists on CUDA only"),
    "megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": (False, "CUDA streams"),
    "megatron_cfg.distributed_data_parallel_config.overlap_param_gather": (False, "CUDA streams"),
    "precision": ("float32", "the CPU optimiser keeps no master weights in another precision"),
}
