"""GM301 to GM304, GM309 and GM312: engines, precisions and backends that NeMo-RL refuses when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_CORRECTION = "loss_fn.use_importance_sampling_correction"
_GENERATION = "policy.generation"
_VLLM = f"{_GENERATION}.vllm_cfg"
_MEGATRON = "policy.megatron_cfg.enabled"
_DTENSOR = "policy.dtensor_cfg.enabled"
_PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"
_VIRTUAL_PIPELINE = "policy.megatron_cfg.virtual_pipeline_model_parallel_size"
_REPLAY = "policy.router_replay.enabled"


def _async_without_correction(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.is_async and not facts.config.use_importance_sampling_correction:
        yield Hit(_CORRECTION, "false, but asynchronous training needs the correction for its stale samples; set true")


def _async_without_engine(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.is_async or not facts.uses_vllm:
        return
    if not facts.is_true(f"{_VLLM}.async_engine"):
        yield Hit(f"{_VLLM}.async_engine", "false, but asynchronous training needs vLLM's async engine; set true")
    if facts.is_true(f"{_GENERATION}.colocated.enabled"):
        yield Hit(
            f"{_GENERATION}.colocated.enabled",
            "true, but asynchronous training needs separate GPUs for vLLM; set false, and state vLLM's GPUs under "
            "colocated.resources",
        )


def _fp8_without_correction(facts: RecipeFacts) -> Iterator[Hit]:
    is_fp8 = facts.uses_vllm and facts.get(f"{_VLLM}.precision") == "fp8"
    if is_fp8 and not facts.config.use_importance_sampling_correction:
        yield Hit(_CORRECTION, f"false, but {_VLLM}.precision: fp8 needs the correction; set true")


def _fp8_kv_cache(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_VLLM}.kv_cache_dtype"
    if not facts.uses_vllm or not str(facts.get(key, "")).startswith("fp8"):
        return
    is_missing = {
        f"{_VLLM}.precision: fp8": facts.get(f"{_VLLM}.precision") != "fp8",
        f"{_DTENSOR}: false": facts.is_true(_DTENSOR),
        f"{_VLLM}.async_engine: false": facts.is_true(f"{_VLLM}.async_engine"),
        f"{_PIPELINE}: 1": (facts.number(_PIPELINE) or 1) > 1,
    }
    required = [setting for setting, missing in is_missing.items() if missing]
    if required:
        yield Hit(key, f"{facts.get(key)} needs {', '.join(required)}; set these, or kv_cache_dtype: auto")


def _router_replay(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.is_true(_REPLAY):
        return
    if not facts.uses_vllm or not facts.uses_megatron:
        yield Hit(_REPLAY, f"true needs {_GENERATION}.backend: vllm and {_MEGATRON}: true; set these, or false")
    if (facts.number(_VIRTUAL_PIPELINE) or 1) != 1:
        yield Hit(_REPLAY, f"true needs {_VIRTUAL_PIPELINE}: 1; set that, or false")
    if facts.is_async and facts.is_true("data_plane.enabled"):
        yield Hit(
            _REPLAY,
            "true needs data_plane.enabled: false in asynchronous training; set that, or use the single "
            "controller (a section async_rl) instead of async_grpo",
        )


def _training_backends(facts: RecipeFacts) -> Iterator[Hit]:
    if "policy" not in facts.recipe.data or "lab" in facts.recipe.data:
        return
    uses_dtensor = facts.is_true(_DTENSOR)
    if facts.uses_megatron == uses_dtensor:
        quantifier = "both" if uses_dtensor else "neither"
        yield Hit(_MEGATRON, f"{quantifier} of megatron_cfg and dtensor_cfg are enabled; enable exactly one")


_SETUP = "NeMo-RL `grpo.setup`"
_ASYNC = "NeMo-RL `async_grpo_train`"

RULES = (
    Rule(
        "GM301",
        "error",
        "asynchronous training without importance-sampling correction",
        _ASYNC,
        _async_without_correction,
    ),
    Rule(
        "GM302",
        "error",
        "asynchronous training without vLLM's async engine on separate GPUs",
        _ASYNC,
        _async_without_engine,
    ),
    Rule("GM303", "error", "FP8 rollouts without importance-sampling correction", _SETUP, _fp8_without_correction),
    Rule("GM304", "error", "FP8 KV cache with incompatible settings", _SETUP, _fp8_kv_cache),
    Rule(
        "GM309",
        "error",
        "router replay with incompatible settings",
        "NeMo-RL `validate_router_replay_config`",
        _router_replay,
    ),
    Rule("GM312", "error", "not exactly one training backend", "NeMo-RL `Policy.__init__`", _training_backends),
)
