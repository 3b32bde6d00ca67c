"""Combinations and single values that NeMo-RL, or vLLM, refuses when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.tools.check.config_classes import GENERATION_CLASSES
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_CORRECTION = "loss_fn.use_importance_sampling_correction"
_GENERATION = "policy.generation"
_VLLM = f"{_GENERATION}.vllm_cfg"
_MEGATRON = "policy.megatron_cfg.enabled"
_DTENSOR = "policy.dtensor_cfg.enabled"
_PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"
_VIRTUAL_PIPELINE = "policy.megatron_cfg.virtual_pipeline_model_parallel_size"
_REPLAY = "policy.router_replay.enabled"


_SETUP = "NeMo-RL `grpo.setup`"
_ASYNC = "NeMo-RL `async_grpo_train`"


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


@rule("GM301", "error", _ASYNC, applies_to_lab=False)
def _async_without_correction(facts: RecipeFacts) -> Iterator[Hit]:
    """Asynchronous training without importance-sampling correction."""
    if facts.is_async and not facts.config.use_importance_sampling_correction:
        yield Hit(
            _CORRECTION,
            "false, but asynchronous training needs the correction for its stale samples; beside masks, "
            "is_correction_level: masks_only keeps the weight at 1; set true",
        )


@rule("GM302", "error", _ASYNC, applies_to_lab=False)
def _async_without_engine(facts: RecipeFacts) -> Iterator[Hit]:
    """Asynchronous training without vLLM's async engine on separate GPUs."""
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


@rule("GM303", "error", _SETUP)
def _fp8_without_correction(facts: RecipeFacts) -> Iterator[Hit]:
    """FP8 rollouts without importance-sampling correction."""
    is_fp8 = facts.uses_vllm and facts.get(f"{_VLLM}.precision") == "fp8"
    if is_fp8 and not facts.config.use_importance_sampling_correction:
        yield Hit(_CORRECTION, f"false, but {_VLLM}.precision: fp8 needs the correction; set true")


@rule("GM304", "error", _SETUP)
def _fp8_kv_cache(facts: RecipeFacts) -> Iterator[Hit]:
    """FP8 KV cache with incompatible settings."""
    key = f"{_VLLM}.kv_cache_dtype"
    if not facts.uses_vllm or not str(facts.get(key, "")).startswith("fp8"):
        return
    is_missing = {
        f"{_VLLM}.precision: fp8": facts.get(f"{_VLLM}.precision") != "fp8",
        f"{_DTENSOR}: false": facts.uses_dtensor,
        f"{_VLLM}.async_engine: false": facts.is_true(f"{_VLLM}.async_engine"),
        f"{_PIPELINE}: 1": facts.size(_PIPELINE) > 1,
    }
    required = [setting for setting, missing in is_missing.items() if missing]
    if required:
        yield Hit(key, f"{facts.get(key)} needs {', '.join(required)}; set these, or kv_cache_dtype: auto")


@rule("GM309", "error", "NeMo-RL `validate_router_replay_config`", applies_to_lab=False)
def _router_replay(facts: RecipeFacts) -> Iterator[Hit]:
    """Router replay with incompatible settings."""
    if not facts.is_true(_REPLAY):
        return
    if not facts.uses_vllm or not facts.uses_megatron:
        yield Hit(_REPLAY, f"true needs {_GENERATION}.backend: vllm and {_MEGATRON}: true; set these, or false")
    if facts.size(_VIRTUAL_PIPELINE) != 1:
        yield Hit(_REPLAY, f"true needs {_VIRTUAL_PIPELINE}: 1; set that, or false")
    if facts.is_async and facts.is_true("data_plane.enabled"):
        yield Hit(
            _REPLAY,
            "true needs data_plane.enabled: false in asynchronous training; set that, or use the single "
            "controller (a section async_rl) instead of async_grpo",
        )


@rule("GM312", "error", "NeMo-RL `Policy.__init__`", needs_loss=False, applies_to_lab=False)
def _training_backends(facts: RecipeFacts) -> Iterator[Hit]:
    """Not exactly one training backend."""
    if "policy" not in facts.recipe.data:
        return
    if facts.uses_megatron == facts.uses_dtensor:
        quantifier = "both" if facts.uses_dtensor else "neither"
        yield Hit(_MEGATRON, f"{quantifier} of megatron_cfg and dtensor_cfg are enabled; enable exactly one")


@rule("GM322", "error", "NeMo-RL `Policy.__init__`", needs_loss=False)
def _packing_with_dynamic_batches(facts: RecipeFacts) -> Iterator[Hit]:
    """Dynamic batching with packed sequences or pipeline parallelism."""
    key = "policy.dynamic_batching.enabled"
    if not facts.is_true(key):
        return
    if facts.is_true("policy.sequence_packing.enabled"):
        yield Hit(key, "true excludes policy.sequence_packing.enabled: true; set one of them to false")
    if facts.uses_megatron and facts.size(_PIPELINE) > 1:
        yield Hit(key, f"true needs {_PIPELINE}: 1; set that, or false")


@rule("GM326", "error", _SETUP)
def _other_sampling_in_validation(facts: RecipeFacts) -> Iterator[Hit]:
    """Validation sampled in another way than training."""
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


@rule("GM327", "error", _SETUP)
def _multiplier_without_dynamic_sampling(facts: RecipeFacts) -> Iterator[Hit]:
    """Larger rollout batches without dynamic sampling."""
    key, switch = f"{facts.algorithm}.batch_multiplier", f"{facts.algorithm}.use_dynamic_sampling"
    multiplier = facts.number(key)
    if multiplier not in (None, 1) and not facts.is_true(switch):
        yield Hit(key, f"{multiplier:g} needs {switch}: true; set that, or 1")


@rule("GM328", "error", "NeMo-RL examples/run_grpo.py, run_ppo.py")
def _async_with_batch_features(facts: RecipeFacts) -> Iterator[Hit]:
    """Asynchronous training with a feature of the synchronous trainer."""
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


@rule("GM333", "error", "NeMo-RL `validate_single_controller_config`")
def _single_controller(facts: RecipeFacts) -> Iterator[Hit]:
    """Single controller with incompatible settings."""
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


@rule(
    "GM321",
    "error",
    "NeMo-RL `STRING_TO_DTYPE` (automodel/setup.py), `dtype_map` (megatron/setup.py); vLLM `dtype`",
    needs_loss=False,
    applies_to_lab=False,
)
def _unknown_precision(facts: RecipeFacts) -> Iterator[Hit]:
    """Precision that NeMo-RL does not know."""
    places = {"policy.precision": tuple(_PRECISIONS)}
    if facts.uses_vllm:
        places[f"{_GENERATION}.vllm_cfg.precision"] = _VLLM_PRECISIONS
    for key, allowed in places.items():
        value = facts.get(key)
        if isinstance(value, str) and value not in allowed:
            meant = next((name for name, aliases in _PRECISIONS.items() if value.lower() in (name, *aliases)), None)
            yield Hit(key, f"{value}: no such precision; write {meant or 'one of ' + ', '.join(allowed)}")


@rule("GM323", "error", "NeMo-RL `VllmGeneration.__init__`, `apply_temperature_scaling`", needs_loss=False)
def _sampling_out_of_range(facts: RecipeFacts) -> Iterator[Hit]:
    """Temperature, top-p or top-k out of range."""
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


@rule("GM324", "error", "NeMo-RL `grpo.setup`, `_create_advantage_estimator`, `get_packer`", applies_to_lab=False)
def _unknown_name(facts: RecipeFacts) -> Iterator[Hit]:
    """Generation backend, advantage estimator or packing algorithm that NeMo-RL does not have."""
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


@rule("GM339", "error", "NeMo-RL `grpo_train`, `shard_by_batch_size`; vLLM", needs_loss=False, applies_to_lab=False)
def _not_positive(facts: RecipeFacts) -> Iterator[Hit]:
    """Size, period or learning rate that is not above 0."""
    keys = [key.format(algorithm=facts.algorithm) for key in _POSITIVE]
    if (facts.number(f"{facts.algorithm}.val_period") or 0) > 0:
        keys.append(f"{facts.algorithm}.val_batch_size")
    for key in keys:
        value = facts.number(key)
        # A learning rate of 0 is a way to measure without training.
        if value is not None and (value < 0 or (value == 0 and not key.endswith(".lr"))):
            yield Hit(key, f"{value:g} is not above 0; NeMo-RL divides by it, or starts nothing; set a positive number")


@rule("GM325", "error", "vLLM `CacheConfig.gpu_memory_utilization`", needs_loss=False)
def _gpu_memory(facts: RecipeFacts) -> Iterator[Hit]:
    """vLLM's part of the GPU memory out of range."""
    key = f"{_GENERATION}.vllm_cfg.gpu_memory_utilization"
    fraction = facts.number(key)
    if facts.uses_vllm and fraction is not None and not 0 < fraction <= 1:
        hint = f"; did you mean {fraction / 100:g}?" if 5 <= fraction <= 100 else "; set 0.6, for example"
        yield Hit(key, f"{fraction:g} is not a fraction of the GPU's memory above 0 and at most 1{hint}")
