"""GM301 to GM304, GM309, GM312, GM322, GM326 to GM328, GM333: combinations that NeMo-RL refuses when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.strict import as_yaml
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
        f"{_DTENSOR}: false": facts.uses_dtensor,
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
    if "policy" not in facts.recipe.data:
        return
    if facts.uses_megatron == facts.uses_dtensor:
        quantifier = "both" if facts.uses_dtensor else "neither"
        yield Hit(_MEGATRON, f"{quantifier} of megatron_cfg and dtensor_cfg are enabled; enable exactly one")


def _packing_with_dynamic_batches(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.dynamic_batching.enabled"
    if not facts.is_true(key):
        return
    if facts.is_true("policy.sequence_packing.enabled"):
        yield Hit(key, "true excludes policy.sequence_packing.enabled: true; set one of them to false")
    if facts.uses_megatron and (facts.number(_PIPELINE) or 1) > 1:
        yield Hit(key, f"true needs {_PIPELINE}: 1; set that, or false")


def _other_sampling_in_validation(facts: RecipeFacts) -> Iterator[Hit]:
    for name in ("temperature", "top_p", "top_k"):
        key, trained_key = f"{_GENERATION}.val_{name}", f"{_GENERATION}.{name}"
        value, trained = facts.get(key), facts.get(trained_key)
        if value is None or value == trained:
            continue
        if not facts.uses_vllm or not facts.is_true("env.should_use_nemo_gym") or name == "top_k":
            fix = f"set {key}: {as_yaml(trained)}, or leave it out"
            yield Hit(
                key,
                f"{value}, but {trained_key}: {as_yaml(trained)}: only NeMo-Gym's rollouts with vLLM can "
                f"validate with another temperature or top-p, and none with another top-k; {fix}",
            )


def _multiplier_without_dynamic_sampling(facts: RecipeFacts) -> Iterator[Hit]:
    key, switch = f"{facts.algorithm}.batch_multiplier", f"{facts.algorithm}.use_dynamic_sampling"
    multiplier = facts.number(key)
    if multiplier not in (None, 1) and not facts.is_true(switch):
        yield Hit(key, f"{multiplier:g} needs {switch}: true; set that, or 1")


def _async_with_batch_features(facts: RecipeFacts) -> Iterator[Hit]:
    name = facts.algorithm
    if not facts.is_async or name not in ("grpo", "ppo"):
        return
    trainer, switch = f"asynchronous {name.upper()}", f"{name}.async_{name}.enabled: false"
    steps = ("use_dynamic_sampling", "reward_scaling.enabled", "reward_shaping.enabled")
    keys = [*(f"{name}.{step}" for step in steps), "data.use_multiple_dataloader"]
    if name == "ppo":
        keys += ["env.should_use_nemo_gym", "loss_fn.force_on_policy_ratio"]
        epochs = facts.get("ppo.max_num_epochs")
        if epochs != -1:
            value = "not set" if epochs is None else as_yaml(epochs)
            message = f"{value}: {trainer} has no limit of epochs; set -1, and the length by ppo.max_num_steps"
            yield Hit("ppo.max_num_epochs", message)
    for key in keys:
        if facts.is_true(key):
            yield Hit(key, f"true is not supported by {trainer}; set false, or {switch}")


def _single_controller(facts: RecipeFacts) -> Iterator[Hit]:
    if not facts.uses_single_controller:
        return
    batch_key, prompts_key = "policy.train_global_batch_size", "grpo.num_prompts_per_step"
    batch, prompts = facts.number(batch_key), facts.number(prompts_key)
    groups = facts.number("async_rl.min_groups_for_streaming_train")
    if batch and facts.rollout_size and batch != facts.rollout_size:
        yield Hit(
            batch_key,
            f"{batch:g}: the single controller takes one optimiser step per rollout batch; set num_prompts_per_step x "
            f"num_generations_per_prompt = {facts.rollout_size}",
        )
    if prompts and groups and prompts < groups:
        yield Hit(
            "async_rl.min_groups_for_streaming_train",
            f"{groups:g} exceeds {prompts_key}: {prompts:g}, so a step would never start; lower it",
        )
    metric = facts.get("checkpointing.metric_name")
    if facts.is_true("checkpointing.enabled") and metric is not None and not str(metric).startswith("train:"):
        yield Hit(
            "checkpointing.metric_name", f"{metric}: the single controller does not validate; set train:<name>, or null"
        )


_SETUP = "NeMo-RL `grpo.setup`"
_ASYNC = "NeMo-RL `async_grpo_train`"

RULES = (
    Rule(
        "GM301",
        "error",
        "asynchronous training without importance-sampling correction",
        _ASYNC,
        _async_without_correction,
        applies_to_lab=False,
    ),
    Rule(
        "GM302",
        "error",
        "asynchronous training without vLLM's async engine on separate GPUs",
        _ASYNC,
        _async_without_engine,
        applies_to_lab=False,
    ),
    Rule("GM303", "error", "FP8 rollouts without importance-sampling correction", _SETUP, _fp8_without_correction),
    Rule("GM304", "error", "FP8 KV cache with incompatible settings", _SETUP, _fp8_kv_cache),
    Rule(
        "GM309",
        "error",
        "router replay with incompatible settings",
        "NeMo-RL `validate_router_replay_config`",
        _router_replay,
        applies_to_lab=False,
    ),
    Rule(
        "GM312",
        "error",
        "not exactly one training backend",
        "NeMo-RL `Policy.__init__`",
        _training_backends,
        needs_loss=False,
        applies_to_lab=False,
    ),
    Rule(
        "GM322",
        "error",
        "dynamic batching with packed sequences or pipeline parallelism",
        "NeMo-RL `Policy.__init__`",
        _packing_with_dynamic_batches,
        needs_loss=False,
    ),
    Rule("GM326", "error", "validation sampled in another way than training", _SETUP, _other_sampling_in_validation),
    Rule(
        "GM327",
        "error",
        "larger rollout batches without dynamic sampling",
        _SETUP,
        _multiplier_without_dynamic_sampling,
    ),
    Rule(
        "GM328",
        "error",
        "asynchronous training with a feature of the synchronous trainer",
        "NeMo-RL examples/run_grpo.py, run_ppo.py",
        _async_with_batch_features,
    ),
    Rule(
        "GM333",
        "error",
        "single controller with incompatible settings",
        "NeMo-RL `validate_single_controller_config`",
        _single_controller,
    ),
)
