"""Cases of the rules of check: for each, settings under which it fires, and near ones under which it doesn't."""

import copy

from nemo_geomask.hosts.nemo_rl.facts import SETTING_READERS

CLEAN = {
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
    "loss_fn": {"name": "clipped_pg", "reference_policy_kl_penalty": 0.0},
    "policy": {
        "model_name": "meta-llama/Llama-3.1-8B",
        "train_global_batch_size": 128,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 4,
        "max_total_sequence_length": 4096,
        "precision": "bfloat16",
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 1},
        "sequence_packing": {"enabled": True},
        "generation": {
            "backend": "vllm",
            "max_new_tokens": 2048,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "colocated": {"enabled": True},
            "vllm_cfg": {
                "precision": "bfloat16",
                "kv_cache_dtype": "auto",
                "async_engine": False,
                "logprobs_mode": "processed_logprobs",
            },
            "vllm_kwargs": {},
        },
    },
}

TEMPERATURE = "policy.generation.temperature"
TOP_P = "policy.generation.top_p"
MODE = "policy.generation.vllm_cfg.logprobs_mode"
KWARGS = "policy.generation.vllm_kwargs"
REPLAY = "policy.router_replay.enabled"
FUSED = "policy.megatron_cfg.use_fused_linear_logprobs"
FUSED_BEFORE = "policy.megatron_cfg.use_linear_ce_fusion_loss"
CHUNKS = {"policy.logprob_chunk_size": 1024}
DEFERRED = {"policy.megatron_cfg.defer_fp32_logits": True}
DYNAMIC = "policy.dynamic_batching.enabled"
PACKING = "policy.sequence_packing.enabled"
TRAINED = "policy.sequence_packing.train_mb_tokens"
SCORED = "policy.sequence_packing.logprob_mb_tokens"
GEOMASK = "loss_fn.logprob_backend"
TP = "policy.megatron_cfg.tensor_model_parallel_size"
SCORING = "policy.logprob_batch_size"
BATCH = "policy.train_global_batch_size"
MASKS = "loss_fn.masks"
CORRECT = "loss_fn.use_importance_sampling_correction"
LEVEL = "loss_fn.is_correction_level"
PENALTY = "loss_fn.reference_policy_kl_penalty"
KL = {"loss_fn.reference_policy_kl_penalty": 0.1}
KL_TYPE = "loss_fn.reference_policy_kl_type"
KL_IN_REWARD = {"loss_fn.use_kl_in_reward": True, "grpo.adv_estimator.name": "reinforce_plus_plus"}
ANCHOR = "loss_fn.ratio_anchor"
FORCED = "loss_fn.force_on_policy_ratio"

CARDS = {"cluster.gpus_per_node": 8, "cluster.num_nodes": 2}
APART = {
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources": {"gpus_per_node": 8, "num_nodes": 1},
}
MOE = {"policy.model_name": "Qwen/Qwen3-30B-A3B"}
ASYNC = {
    "grpo.async_grpo.enabled": True,
    "policy.generation.vllm_cfg.async_engine": True,
    "policy.generation.colocated.enabled": False,
    CORRECT: True,
}
FUSED_FITS = {FUSED: True, PACKING: False}
DTENSOR = {"policy.megatron_cfg.enabled": False, "policy.dtensor_cfg.enabled": True}
MEGATRON = {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False}
V2 = {**DTENSOR, "policy.dtensor_cfg._v2": True}
LORA_CFG = "policy.dtensor_cfg.lora_cfg"
LORA = {f"{LORA_CFG}.enabled": True}
SAVED = {"checkpointing.enabled": True}
GEOMETRIC = {"preset": "geometric", "min": 0.99, "max": 1.01}
VETO = {"preset": "veto", "min": 0.1, "max": 10.0}
BY_SEQUENCE = {"loss_fn.token_level_loss": False, "loss_fn.ratio_clip_min": 5e-4}
GSPO = {"loss_fn.name": "gspo", "loss_fn.token_level_loss": False}
# v0.7.0, as far as the rules can tell.
OLDER = {key: key in ("policy.router_replay.enabled", "policy.quant_cfg") for key in SETTING_READERS}
NEWEST = dict.fromkeys(SETTING_READERS, True)
SCRIPT = """
def main():
    config = load_config("recipe.yaml")
    policy, grpo = config["policy"], config["grpo"]
    assert not policy.get("dynamic_batching", {}).get("enabled"), "the stand-in takes no dynamic batches"
    transport = policy["generation"].get("refit_transport")
    if policy["dtensor_cfg"]["enabled"] and transport == "nccl_reshard":
        raise ValueError("Megatron alone reshards")
    size = policy.get("size", 32)
    assert size == grpo["num_prompts_per_step"], f"{size} is another size"
    assert size > 0, "the size is not positive"
    assert policy.get("max_grad_norm", 1) > 0, "every gradient is clipped away"
    assert policy.get("optimizer", 1) is not None, "needs an optimizer"
    if policy["generation"].get("quick"):
        assert policy["generation"]["top_p"] == 1, "quick samples are not filtered"
    if policy.get("save_format"):
        assert policy.get("saves"), "nothing is saved"
"""  # of a NeMo-RL that refuses these

DPO = {"dpo.max_num_steps": 9, "loss_fn": None}
PUZZLE = {"env.sliding_puzzle_game.cfg.game_config.shuffle_moves": 10}
MATHS = {"dataset_name": "OpenMathInstruct-2"}
FILES = {"dataset_name": "ResponseDataset", "data_path": "a.jsonl"}
PADDING = "policy.make_sequence_length_divisible_by"
CP = "policy.megatron_cfg.context_parallel_size"
PP = "policy.megatron_cfg.pipeline_model_parallel_size"
FIRST, LAST = (f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
MODEL = "policy.model_name"
DTENSOR_TP = "policy.dtensor_cfg.tensor_parallel_size"
DTENSOR_CP = {**DTENSOR, "policy.dtensor_cfg.context_parallel_size": 2}

ON_TOTAL = {"level": "sequence", "statistic": "ratio", "min": 0.5, "max": 2.0}
TRUNCATED = {
    CORRECT: True,
    "loss_fn.truncated_importance_sampling_ratio_min": 0.9999,
    "loss_fn.truncated_importance_sampling_ratio": 1.002,
}

SINGLE = {"async_rl.min_groups_for_streaming_train": 4, "data_plane.enabled": True}
SINGLE_FITS = {**SINGLE, "policy.train_global_batch_size": 512}
SHAPED = {
    "grpo.reward_shaping.overlong_buffer_length": 128,
    "grpo.reward_shaping.overlong_buffer_penalty": 1.0,
    "grpo.reward_shaping.max_response_length": 1152,
}
VLLM = "policy.generation.vllm_cfg"
EP = "policy.megatron_cfg.expert_model_parallel_size"
COLOCATED = "policy.generation.colocated"
TRAINING_TYPE = "loss_fn.truncated_importance_sampling_type"
CAP, FLOOR = "loss_fn.truncated_importance_sampling_ratio", "loss_fn.truncated_importance_sampling_ratio_min"
CLASSES = """
from nemo_rl.models.policy import PolicyConfig


class MasterConfig(BaseModel, extra="allow"):
    policy: PolicyConfig
    grpo: Annotated[dict[str, Any], Field(description="any")]


class PolicyConfig(TypedDict):
    train_micro_batch_size: int
    precision: "str"
    # Comments and optional keys.
    optional_size: NotRequired[int | None]
    dtensor_cfg: EnabledConfig | DisabledConfig
    names: NotRequired[list[str]]


class EnabledConfig(TypedDict):
    enabled: Literal[True]
    size: int


class DisabledConfig(TypedDict):
    enabled: Literal[False]


def train(config, model):
    model.slope(rows=config["rows"])
"""
TYPED = {"reads": NEWEST, "classes": CLASSES}
NORMALIZE = "loss_fn.is_correction_batch_normalize"

# By rule: (fires, doesn't); each is changes to CLEAN, with `gpu`, `kl` and `reads`: what NeMo-RL reads. Its example
# configs have CLEAN's keys and PADDING.
ETP = "policy.megatron_cfg.expert_tensor_parallel_size"
COPIED_EXPERTS = {
    **MOE,
    "reads": NEWEST,
    "megatron": "expert_parallel = config.expert_model_parallel_size > 1",
    TP: 2,
    EP: 1,
    ETP: 1,
}
PLUS_PLUS = {"grpo.adv_estimator.name": "reinforce_plus_plus"}
VALIDATED = {"grpo.val_period": 10, "grpo.val_batch_size": 256}
PAIRS_RANKED = {
    "dpo.val_period": 10,
    "grpo": None,
    "loss_fn": None,
    "checkpointing": {"enabled": True, "metric_name": "val:a", "keep_top_k": 3},
}
RANKED = {
    "grpo.val_period": 10,
    "checkpointing.enabled": True,
    "checkpointing.metric_name": "val:accuracy",
    "checkpointing.keep_top_k": 3,
}
RATE, OTHER_RATE = "policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr"
MIN_RATE = "policy.megatron_cfg.optimizer.min_lr"
OPTIMIZER = "policy.megatron_cfg.optimizer"
ADAPTED = {**V2, **LORA, f"{LORA_CFG}.use_triton": True}
SHAPING = "grpo.reward_shaping.enabled"
CLIP_MIN = "loss_fn.ratio_clip_min"
CLIP_MAX = "loss_fn.ratio_clip_max"
IN_REWARD = "loss_fn.use_kl_in_reward"
RESPONSES = "grpo.num_generations_per_prompt"
VALIDATED_SAMPLES = "grpo.max_val_samples"
METRIC = "checkpointing.metric_name"
BETTER = "checkpointing.higher_is_better"
SEVERAL = {"grpo.val_num_generations_per_prompt": 4}
FAILURE = "async_rl.rollout_failure"
REWARDED = {"rm.max_num_epochs": 1, "grpo": None, "loss_fn": None, "policy.reward_model_cfg.enabled": True}
REWARDED["policy.reward_model_cfg.reward_model_type"] = "bradley_terry"
TEACHERS = "on_policy_distillation"
TEACHER = {
    f"{TEACHERS}.teacher_model_by_agent_name": {"a": "m", "b": "m"},
    f"{TEACHERS}.non_colocated_teachers": {"enabled": True},
}
SAMPLER_PRECISION = "policy.generation.vllm_cfg.precision"
SAVE_PERIOD = "checkpointing.save_period"
MICROBATCH = "policy.train_micro_batch_size"
ASYNC_PPO = "ppo.async_ppo.enabled"
ESTIMATOR = "grpo.adv_estimator.name"
THRESHOLD = "grpo.seq_logprob_error_threshold"
NLL = "loss_fn.positive_example_nll_weight"
DYNAMIC = "policy.dynamic_batching.enabled"
BACKEND = "policy.generation.backend"
PEFT = "policy.megatron_cfg.peft.enabled"
RESPONSE = "policy.generation.max_new_tokens"
RESAMPLED = "grpo.use_dynamic_sampling"
BALANCING = "policy.megatron_cfg.moe_router_load_balancing_type"
IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates"
RECOMPUTED = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
ASYNC[RECOMPUTED] = True
COEFFICIENT = "grpo.reward_shaping.stop_properly_penalty_coef"
DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
AGENTIC = {
    f"{KWARGS}.quantization": "int4",
    "grpo.max_rollout_turns": 8,
    CORRECT: True,
    LEVEL: "sequence_mean",
    ESTIMATOR: "grpo",
}
SCALING, STOP, ESTIMATES = "grpo.reward_scaling", "grpo.stop_at_validation_metric", "grpo.adv_estimator"
SCALED = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
LEFT_OUT = {"name": "grpo", "normalize_rewards": True, "use_leave_one_out_baseline": True}
THRESHOLD_OF_STOP = "grpo.stop_at_validation_threshold"
GYM = "env.should_use_nemo_gym"
ROUTER = "async_rl.generation_router"
ROUTED = {f"{ROUTER}.enabled": True, f"{ROUTER}.backend_timeout_s": 10}
DTENSOR_SP = "policy.dtensor_cfg.sequence_parallel"
DISTILLED_ON = {"distillation.max_num_steps": 9, "grpo": None, "loss_fn": None}
WAITING, BUFFER = {"async_rl.sampler.max_staleness_versions": 2}, "async_rl.max_buffered_rollouts"
IN_ORDER = {**SINGLE_FITS, "async_rl.sampler": {"name": "in_order", "max_lookahead_versions": 2}}
READY_FIRST = {**SINGLE_FITS, "async_rl.sampler.name": "ready_first"}
PPO_AGE = "ppo.async_ppo.max_trajectory_age_steps"
GYM_FITS = {GYM: True}
OPTIMIZER = "policy.megatron_cfg.optimizer"
_YARN = ("original_max_position_embeddings", "mscale", "mscale_all_dim")
MEGATRON_YARN = {**MEGATRON, **{f"policy.hf_config_overrides.rope_scaling.{name}": 1 for name in _YARN}}
SAVE_FORMAT = "checkpointing.model_save_format"
SGLANG_ROUTER = "policy.generation.sglang_cfg.sglang_router_config"
EXTERNAL = {f"{SGLANG_ROUTER}.use_external_router": True}
ENGINE = {"sglang_server_config": {"num_gpus_per_engine": 1}}
SAMPLER_TP = f"{VLLM}.tensor_parallel_size"
FP8_EXPERTS = {**MOE, SAMPLER_PRECISION: "fp8", CORRECT: True}
PER_LOADER = "data.num_prompts_per_dataloader"
TOP_K = "distillation.topk_logits_k"
MTP = "policy.megatron_cfg.mtp_loss_scaling_factor"
MCORE = "policy.generation.mcore_generation_config"
OVERRIDDEN = f"{KWARGS}.hf_overrides.x"
TRAIN_SET = {"dataset_name": "x", "env_name": "math", "prompt_file": "examples/prompts/cot.txt"}
VERIFIER = "env.math.math_verify_impl"
ROPE = "policy.hf_config_overrides.rope_scaling"
LONGEST = "grpo.reward_shaping.max_response_length"
SAVE_BY = "checkpointing.checkpoint_must_save_by"
CASES = {
    "GM001": [({"loss_fn.ratio_clip_mim": 0.1}, {CLIP_MIN: 0.1})],
    "GM002": [
        ({**GSPO, CLIP_MIN: 0.2, CLIP_MAX: 4e-4}, GSPO),
        ({CORRECT: True, TRAINING_TYPE: "tis"}, {CORRECT: True}),
        ({"loss_fn.name": "dppo", ANCHOR: "prev"}, {"loss_fn.name": "dppo"}),
        ({"loss_fn.name": "ipo", ANCHOR: "prev"}, {"loss_fn.name": "ipo", ANCHOR: "prev", CORRECT: True}),
        ({"loss_fn.name": "dppo", ANCHOR: "prev"}, {"loss_fn.name": "vespo", ANCHOR: "prev"}),
    ],
    "GM003": [
        ({"loss_fn.name": None, MASKS: [VETO]}, {MASKS: [VETO]}),
        ({"loss_fn.name": None, MASKS: [VETO]}, {"loss_fn.name": None, CLIP_MIN: 0.3}),
        ({"loss_fn.name": None, MASKS: [VETO]}, {"loss_fn.name": None, MASKS: [VETO], "lab.num_threads": 1}),
    ],
    "GM007": [({"data.train.path": "${oc.env:NOWHERE_KNOWN}/x"}, {"data.train.path": "${policy.model_name}/x"})],
    "GM004": [
        ({"lossfn": {"name": "gspo"}, "reads": NEWEST}, {"loss_fn.name": "gspo", **GSPO, "reads": NEWEST}),
        ({"loss": {"name": "gspo"}, "reads": NEWEST}, {"value_loss_fn": {"x": 1}, "reads": NEWEST}),
        ({"Loss_fn": {"name": "gspo"}, "reads": NEWEST}, {"losses_of_ours": {"x": 1}, "reads": NEWEST}),
        ({"lossfn": 1, "loss_fn.zzz": 1, "reads": NEWEST}, {"lossfn": 1, "lab.num_threads": 1, "reads": NEWEST}),
    ],
    "GM005": [
        ({"polcy": {"model_name": "x"}, "reads": NEWEST}, {MODEL: "x", "reads": NEWEST}),
        ({"ours": {"size": 8}, "reads": NEWEST}, {"ours": {"size": 8}, BATCH: "${ours.size}", "reads": NEWEST}),
        ({"ours": 8, "reads": NEWEST}, {"ours": 8, BATCH: "${ours}", "reads": NEWEST}),
    ],
    "GM006": [
        ({"policy.train_micro_batch_sze": 4, "reads": NEWEST}, {MICROBATCH: 4, "reads": NEWEST}),
        ({"policy.sequence_packing.enabld": True, "reads": NEWEST}, {PACKING: True, "reads": NEWEST}),
        # Another name, which NeMo-RL has in no example: a word more, one letter of few, a section that none has.
        ({"grpo.num_prompts_per_stp": 4, "reads": NEWEST}, {"grpo.num_val_prompts_per_step": 4, "reads": NEWEST}),
        ({"policy.generation.temprature": 1.0, "reads": NEWEST}, {"policy.tokenizer.top_n": 0, "reads": NEWEST}),
        # A name of something else is no setting, but one that is read from some mapping may be.
        ({"policy.slope": 1, **TYPED}, {"policy.rows": 1, **TYPED}),
        ({"policy.beta": 0.1, **TYPED}, {"loss_fn.reference_policy_kl_penalty": 0.1, **TYPED}),
        ({"policy.generatio": {}, "reads": NEWEST}, {"policy.tokenizer.train_micro_batch_sze": 4, "reads": NEWEST}),
    ],
    "GM008": [
        ({MICROBATCH: "four", **TYPED}, {MICROBATCH: "4", **TYPED}),
        ({"policy.optional_size": 1.5, **TYPED}, {"policy.optional_size": None, **TYPED}),
        ({"policy.dtensor_cfg": True, **TYPED}, {"policy.dtensor_cfg": {"enabled": False, "size": "x"}, **TYPED}),
        (
            {"policy.dtensor_cfg": {"enabled": True, "size": []}, **TYPED},
            {"policy.dtensor_cfg": {"enabled": True, "size": 2.0}, **TYPED},
        ),
        ({"policy.names": "a", **TYPED}, {"policy.names": ["a"], **TYPED}),
        ({"policy.names": [1], **TYPED}, {"policy.names": [], **TYPED}),
        # v0.6.0 validates nothing.
        (
            {"policy.names": "a", **TYPED},
            {
                "policy.names": "a",
                "reads": NEWEST,
                "classes": CLASSES.replace('(BaseModel, extra="allow")', "(TypedDict)"),
            },
        ),
    ],
    "GM009": [
        ({"policy.dtensor_cfg": {"enabled": True}, **TYPED}, {"policy.dtensor_cfg": {"enabled": False}, **TYPED}),
        (
            {"policy.generation.backend": "sglang", **TYPED},
            {"policy.generation.backend": "sglang", "policy.generation.sglang_cfg.tp_size": 1, **TYPED},
        ),
    ],
    "GM101": [
        (
            {"policy.megatron_cfg.defer_fp32_logits": True, TEMPERATURE: 0.7},
            {"policy.megatron_cfg.defer_fp32_logits": True},
        ),
        ({"policy.megatron_cfg.defer_fp32_logits": True, TEMPERATURE: 0.7}, {TEMPERATURE: 0.7}),
    ],
    "GM102": [
        ({MODE: "raw_logprobs", TEMPERATURE: 0.7}, {TEMPERATURE: 0.7}),
        ({MODE: "raw_logprobs", TOP_P: 0.9}, {MODE: "raw_logprobs"}),
        # Not set: vLLM's own default where NeMo-RL reads the key, processed where it does not.
        ({MODE: None, TOP_P: 0.9, "reads": NEWEST}, {MODE: None, TOP_P: 0.9, "reads": OLDER}),
        ({MODE: "raw_logprobs", TOP_P: 0.9}, {MODE: "raw_logprobs", TOP_P: 0.9, BACKEND: "sglang"}),
    ],
    "GM103": [
        ({"policy.generation.bad_words": ["x"]}, {"policy.generation.bad_words": ["x"], MODE: "raw_logprobs"}),
        ({"policy.generation.bad_words": ["x"]}, {"policy.generation.bad_words": []}),
    ],
    "GM104": [
        ({TOP_P: 0.9, MASKS: [GEOMETRIC]}, {MASKS: [GEOMETRIC]}),
        ({TOP_P: 0.9, MASKS: [GEOMETRIC]}, {TOP_P: 0.9, MASKS: [GEOMETRIC], "loss_fn.drop_filtered_tokens": True}),
        ({TOP_P: 0.9, MASKS: [GEOMETRIC]}, {TOP_P: 0.9, MASKS: [{"preset": "icepop", "max": 5.0}]}),
        ({"policy.generation.top_k": 50, CORRECT: True, LEVEL: "sequence_mean"}, {TOP_P: 0.9, CORRECT: True}),
        (
            {
                TOP_P: 0.9,
                CORRECT: True,
                TRAINING_TYPE: "seq-mask-tis",
                "loss_fn.truncated_importance_sampling_ratio": 1.002,
                "loss_fn.truncated_importance_sampling_ratio_min": 0.99,
            },
            {TOP_P: 0.9},
        ),
    ],
    "GM105": [({**FUSED_FITS, TEMPERATURE: 0.7}, FUSED_FITS), ({**FUSED_FITS, TEMPERATURE: 0.7}, {TEMPERATURE: 0.7})],
    "GM106": [
        ({"gpu": "A100"}, {"gpu": "A100", f"{KWARGS}.disable_cascade_attn": True}),
        ({"gpu": "NVIDIA-L20"}, {"gpu": "H100"}),
        ({"gpu": "NVIDIA A100 80GB PCIe"}, {"gpu": "NVIDIA H100 80GB HBM3"}),
        ({"gpu": "A100-SXM4-80GB", f"{KWARGS}.disable_cascade_attn": False}, {"gpu": "B200"}),
        ({"gpu": "A100"}, {"gpu": "A100", BACKEND: "sglang"}),
    ],
    "GM107": [
        ({f"{KWARGS}.quantization": "fp8"}, {f"{KWARGS}.quantization": "fp8", CORRECT: True}),
        ({f"{KWARGS}.quantization": "fp8"}, {f"{KWARGS}.quantization": "fp8", MASKS: [VETO]}),
        (
            {"policy.generation.quant_cfg": "nvfp4"},
            {"policy.generation.quant_cfg": "nvfp4", "policy.quant_cfg": "nvfp4"},
        ),
    ],
    "GM108": [
        (MOE, {**MOE, REPLAY: True}),
        (MOE, {}),
        (MOE, {MODEL: "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}),
        ({EP: 8}, {EP: 1}),
        # Where there is no replay to switch on, a correction will do.
        (
            {**MOE, "reads": dict.fromkeys(SETTING_READERS, False)},
            {**MOE, "reads": dict.fromkeys(SETTING_READERS, False), MASKS: [VETO]},
        ),
        (
            {**MOE, "policy.megatron_cfg.enabled": False, "policy.dtensor_cfg.enabled": True},
            {**MOE, "policy.megatron_cfg.enabled": False, "policy.dtensor_cfg.enabled": True, CORRECT: True},
        ),
    ],
    "GM109": [
        ({**MOE, BALANCING: "seq_aux_loss"}, {**MOE, BALANCING: "none"}),
        ({**MOE, BALANCING: ["none", "aux_loss"]}, {BALANCING: "aux_loss"}),
    ],
    "GM110": [
        ({**ASYNC, IN_FLIGHT: True, RECOMPUTED: False}, {**ASYNC, IN_FLIGHT: True}),
        ({**ASYNC, RECOMPUTED: False}, {**ASYNC, RECOMPUTED: False, f"{VLLM}.enable_prefix_caching": False}),
        (
            {**ASYNC, RECOMPUTED: False, IN_FLIGHT: True, f"{VLLM}.enable_prefix_caching": False},
            {**ASYNC, RECOMPUTED: False, BACKEND: "megatron"},
        ),
    ],
    "GM117": [
        ({MODEL: DISTILLED, f"{VLLM}.enforce_eager": False}, {MODEL: DISTILLED, f"{VLLM}.enforce_eager": True}),
        (
            {MODEL: DISTILLED, f"{VLLM}.enforce_eager": False},
            {MODEL: DISTILLED, f"{KWARGS}.compilation_config.backend": "eager"},
        ),
        ({"policy.quant_cfg": "NVFP4_DEFAULT_CFG"}, {"policy.quant_cfg": "NVFP4_W4A16_CFG"}),
    ],
    "GM118": [
        (AGENTIC, {**AGENTIC, "grpo.max_rollout_turns": 1}),
        (AGENTIC, {**AGENTIC, f"{KWARGS}.quantization": None}),
        (AGENTIC, {**AGENTIC, "loss_fn.is_correction_level": "token"}),
        ({**AGENTIC, "loss_fn.name": "clipped_pg", CORRECT: False, LEVEL: None}, {**AGENTIC, ESTIMATOR: "gae"}),
    ],
    "GM111": [
        ({**MOE, REPLAY: True}, {**MOE, REPLAY: True, "policy.generation.vllm_cfg.enable_prefix_caching": False}),
        ({**MOE, REPLAY: True}, MOE),
    ],
    "GM112": [
        ({SAMPLER_PRECISION: "float16"}, {SAMPLER_PRECISION: "auto"}),
        ({"policy.precision": "float32"}, {"policy.precision": "float32", SAMPLER_PRECISION: "float32"}),
    ],
    "GM113": [
        (
            {**MOE, "policy.megatron_cfg.moe_router_bias_update_rate": 0.001},
            {**MOE, "policy.megatron_cfg.moe_router_bias_update_rate": 0.0},
        )
    ],
    "GM114": [
        ({**MOE, **V2}, {**MOE, **DTENSOR}),
        ({**MOE, **V2, "policy.precision": "float32"}, V2),
        ({**MOE, **V2}, {**MOE, **V2, "policy.optimizer.kwargs.master_weights": True}),
        ({**MOE, **V2}, {**MOE, **V2, "policy.dtensor_cfg.automodel_kwargs.force_hf": True}),
    ],
    "GM115": [
        (
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": ["*experts*"]},
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": ["*_proj", "*.gate"]},
        ),
        (
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": "experts"},
            {**V2, **LORA, f"{LORA_CFG}.target_modules": "experts"},
        ),
        # All linear layers are none of the grouped experts.
        (
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": ["*.mlp.*"]},
            {**MOE, **V2, **LORA, f"{LORA_CFG}.match_all_linear": True},
        ),
        (
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": ["*experts*"]},
            {
                **MOE,
                **V2,
                **LORA,
                f"{LORA_CFG}.target_modules": ["*experts*"],
                "policy.dtensor_cfg.automodel_kwargs.force_hf": True,
            },
        ),
        (
            {**MOE, **V2, **LORA, f"{LORA_CFG}.target_modules": ["*experts*"]},
            {**MOE, **V2, f"{LORA_CFG}.target_modules": ["*experts*"], f"{LORA_CFG}.enabled": False},
        ),
    ],
    "GM116": [
        ({**V2, **LORA}, {**V2, **LORA, CORRECT: True}),
        ({**V2, **LORA}, {**V2, **LORA, MASKS: [VETO]}),
        ({**V2, **LORA}, V2),
        # Megatron trains, so DTensor's section has no effect.
        ({PEFT: True}, LORA),
        ({PEFT: True}, {PEFT: True, "policy.precision": "float32", SAMPLER_PRECISION: "float32"}),
    ],
    "GM201": [
        ({MASKS: [{"preset": "geometric", "max": 3.0}]}, {MASKS: [{"preset": "geometric", "max": 1.1}]}),
        # One bound within reach is enough.
        (
            {MASKS: [{"preset": "geometric", "min": 0.5, "max": 3.0}]},
            {MASKS: [{"preset": "geometric", "min": 0.95, "max": 3.0}]},
        ),
        ({MASKS: [{"preset": "geometric", "max": 3.0}]}, {MASKS: [{"preset": "icepop", "max": 3.0}]}),
        (
            {MASKS: [{"preset": "trust_region", "statistic": "k3", "level": "sequence_mean", "max": 1.0}]},
            {MASKS: [{"preset": "trust_region", "statistic": "k3", "level": "sequence_mean", "max": 0.01}]},
        ),
        ({"loss_fn.batch_veto": {"max": 1.0}}, {"loss_fn.batch_veto": {"max": 0.1}}),
        (
            {
                CORRECT: True,
                LEVEL: "sequence_mean",
                TRAINING_TYPE: "tis",
                "loss_fn.truncated_importance_sampling_ratio": 2.0,
            },
            {CORRECT: True, LEVEL: "token", TRAINING_TYPE: "tis", "loss_fn.truncated_importance_sampling_ratio": 2.0},
        ),
    ],
    "GM202": [
        (
            {MASKS: [{"preset": "veto", "min": 0.95, "max": 1.05}, {"preset": "geometric", "min": 0.9, "max": 1.1}]},
            {MASKS: [{"preset": "veto", "min": 0.95, "max": 1.05}, {"preset": "geometric", "min": 0.9, "max": 1.04}]},
        ),
        ({MASKS: [GEOMETRIC, GEOMETRIC]}, {MASKS: [GEOMETRIC, {**GEOMETRIC, "max": 1.02, "min": 0.995}]}),
        (
            {MASKS: [{"preset": "product", "min": 0.9, "max": 1.1}, {"preset": "geometric", "min": 0.9, "max": 1.1}]},
            # A product bound that leaves 1 out says nothing of the mean.
            {MASKS: [{"preset": "product", "min": 1.05, "max": 1.1}, {"preset": "geometric", "min": 1.04, "max": 1.1}]},
        ),
        (
            {MASKS: [VETO, {"preset": "icepop", "min": 0.1, "max": 10.0}]},
            {MASKS: [{"preset": "icepop", "min": 0.1, "max": 10.0}, {"preset": "geometric", "min": 0.9, "max": 1.1}]},
        ),
        (
            {
                MASKS: [
                    {"log_ratio": "mismatch", "level": "sequence_mean", "max": 1.05},
                    {"log_ratio": "mismatch", "level": "sequence_mean", "max": 1.1, "when": "negative_advantage"},
                ]
            },
            {
                MASKS: [
                    {"log_ratio": "mismatch", "level": "sequence_mean", "max": 1.05, "when": "negative_advantage"},
                    {"log_ratio": "mismatch", "level": "sequence_mean", "max": 1.1},
                ]
            },
        ),
    ],
    "GM203": [
        (
            {BATCH: 512, MASKS: [{"preset": "opsm", "delta": 0.1, "log_ratio": "policy"}]},
            {BATCH: 128, MASKS: [{"preset": "opsm", "delta": 0.1, "log_ratio": "policy"}]},
        ),
        (
            {BATCH: 512, FORCED: True, MASKS: [{"preset": "opsm", "delta": 0.1, "log_ratio": "policy"}]},
            {BATCH: 512, FORCED: True, MASKS: [{"preset": "opsm", "delta": 0.1}]},
        ),
    ],
    "GM204": [
        (
            {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False},
            {
                "loss_fn.sequence_level_importance_ratios": True,
                "loss_fn.token_level_loss": False,
                CLIP_MIN: 0.01,
                CLIP_MAX: 0.01,
            },
        ),
        ({**GSPO, CLIP_MAX: 0.3}, {**GSPO, CLIP_MIN: 1.0}),
        # NeMo-RL's default under gspo is GM002's.
        ({**GSPO, CLIP_MAX: 0.3}, {**GSPO, CLIP_MAX: 0.2}),
    ],
    "GM205": [
        ({MODE: "raw_logprobs", "reads": OLDER}, {MODE: "raw_logprobs", "reads": NEWEST}),
        ({MODE: "raw_logprobs", "reads": OLDER}, {MODE: "processed_logprobs", "reads": OLDER}),
        ({REPLAY: True, "reads": dict.fromkeys(SETTING_READERS, False)}, {REPLAY: False, "reads": OLDER}),
    ],
    "GM206": [
        ({IN_REWARD: True, PENALTY: 0.01}, {IN_REWARD: True, PENALTY: 0.01, ESTIMATOR: "reinforce_plus_plus"}),
        ({IN_REWARD: True, PENALTY: 0.01, ESTIMATOR: "gdpo"}, {IN_REWARD: True, PENALTY: 0.0}),
        (
            {IN_REWARD: True, PENALTY: 0.01, ESTIMATOR: "gae"},  # PPO's
            {IN_REWARD: True, PENALTY: 0.01, ESTIMATOR: "reinforce_plus_plus"},
        ),
    ],
    "GM207": [
        ({**KL, "loss_fn.reference_policy_kl_gradient": "k1"}, {**KL, "loss_fn.reference_policy_kl_gradient": "k2"}),
        ({**KL, KL_TYPE: "k2"}, {**KL, KL_TYPE: "k2", "loss_fn.reference_policy_kl_gradient": "k2"}),
        ({**KL, KL_TYPE: "k2"}, {**KL, KL_TYPE: "k3"}),
        ({**KL, KL_TYPE: "k2"}, {PENALTY: 0.0, KL_TYPE: "k2"}),
        ({**KL, **KL_IN_REWARD, KL_TYPE: "k3"}, {**KL, **KL_IN_REWARD, KL_TYPE: "k1"}),
        ({**KL, **KL_IN_REWARD, KL_TYPE: "k2"}, {**KL, **KL_IN_REWARD, KL_TYPE: "k1"}),
    ],
    "GM208": [
        ({"policy.docs_per_step": 64}, {}),
        ({"policy.docs_per_step": 64}, {"policy.docs_per_step": 64, "lab.num_threads": 1}),
        ({"policy.docs_per_step": 64, "loss_fn.zzz": 1}, {"loss_fn.zzz": 1}),
    ],
    "GM209": [
        ({**V2, **KL, **SAVED}, {**V2, **KL, **SAVED, "policy.dtensor_cfg._v2": False}),
        ({**V2, **KL, **SAVED}, {**V2, **KL}),
        ({**V2, **KL, **SAVED}, {**V2, PENALTY: 0.0, **SAVED}),
        ({**V2, **KL, **SAVED}, {**V2, **KL, **SAVED, **MEGATRON}),
    ],
    "GM210": [
        ({CLIP_MAX: 1.2}, {CLIP_MAX: 0.28}),
        ({CLIP_MIN: 0.8}, {CLIP_MIN: 1.0}),
        ({CLIP_MAX: 5.0}, {"loss_fn.name": "cispo", CLIP_MAX: 5.0}),
        ({CLIP_MAX: 1.2}, {"loss_fn.name": "cispo", CLIP_MAX: 1.2}),
        ({CLIP_MAX: 1.2}, {CLIP_MAX: 1.2, "loss_fn.disable_ppo_ratio": True}),
    ],
    "GM211": [({CLIP_MAX: 4e-4}, GSPO), ({CLIP_MIN: 3e-4}, {CLIP_MIN: 0.02})],
    "GM212": [
        ({CORRECT: True, TRAINING_TYPE: "tis", CAP: 0.5}, {CORRECT: True, TRAINING_TYPE: "tis", CAP: 1.0}),
        (
            {CORRECT: True, TRAINING_TYPE: "icepop", CAP: 5.0, FLOOR: 1.1},
            {CORRECT: True, TRAINING_TYPE: "icepop", CAP: 5.0, FLOOR: 0.5},
        ),
    ],
    "GM213": [
        ({RESPONSES: 1}, {RESPONSES: 2}),
        ({RESPONSES: 1}, {RESPONSES: 1, **PLUS_PLUS, "grpo.adv_estimator.minus_baseline": False}),
        ({RESPONSES: 1, **PLUS_PLUS}, {RESPONSES: 2, **PLUS_PLUS}),
        (
            {RESPONSES: 2, "grpo.use_leave_one_out_baseline": True},
            {RESPONSES: 3, "grpo.use_leave_one_out_baseline": True},
        ),
        (
            {RESPONSES: 2, "grpo.adv_estimator.use_leave_one_out_baseline": True},
            {RESPONSES: 2, "grpo.adv_estimator.use_leave_one_out_baseline": False},
        ),
    ],
    "GM214": [({THRESHOLD: 0.5}, {THRESHOLD: 1.5})],
    "GM215": [({RESPONSE: 5000}, {RESPONSE: 4096})],
    "GM216": [
        ({**VALIDATED, VALIDATED_SAMPLES: 64}, {**VALIDATED, VALIDATED_SAMPLES: 256}),
        ({**VALIDATED, VALIDATED_SAMPLES: 64}, {**VALIDATED, VALIDATED_SAMPLES: 64, "grpo.val_period": 0}),
        (
            {"grpo.val_at_end": True, "grpo.val_batch_size": 256, VALIDATED_SAMPLES: 64},
            {**VALIDATED, VALIDATED_SAMPLES: None},
        ),
        ({**VALIDATED, VALIDATED_SAMPLES: 64}, {**VALIDATED, VALIDATED_SAMPLES: 64, "env.should_use_nemo_gym": True}),
    ],
    "GM217": [({**VALIDATED, VALIDATED_SAMPLES: 500}, {**VALIDATED, VALIDATED_SAMPLES: 10000})],
    "GM218": [
        ({**PAIRS_RANKED}, {**PAIRS_RANKED, "data.validation": {"dataset_name": "a"}}),
        ({**RANKED, SAVE_PERIOD: 25}, {**RANKED, SAVE_PERIOD: 20}),
        ({**RANKED, "grpo.val_period": 0}, {**RANKED, "grpo.val_period": 0, "grpo.val_at_end": True}),
        ({**RANKED, SAVE_PERIOD: 25}, {**RANKED, SAVE_PERIOD: 25, METRIC: "train:reward"}),
        ({**RANKED, SAVE_PERIOD: 25}, {**RANKED, SAVE_PERIOD: 25, "checkpointing.keep_top_k": None}),
    ],
    "GM219": [
        ({"inherited": {RATE: 5e-6}, OTHER_RATE: 1e-6}, {RATE: 5e-6, OTHER_RATE: 1e-6}),
        ({"inherited": {RATE: 5e-6}, OTHER_RATE: 1e-6}, {"inherited": {OTHER_RATE: 1e-6}, RATE: 5e-6}),
        (
            {**DTENSOR, "inherited": {OTHER_RATE: 1e-6}, RATE: 5e-6},
            {**DTENSOR, "inherited": {OTHER_RATE: 1e-6}, RATE: 1.000001e-6},
        ),
    ],
    "GM220": [
        ({"policy.dtensor_cfg.lora_cfg.enabled": True}, {PEFT: True}),
        ({**DTENSOR, PEFT: True}, {**DTENSOR, "policy.dtensor_cfg.lora_cfg.enabled": True}),
        (
            {**DTENSOR, "checkpointing.pretrained_checkpoint": {"path": "x"}},
            {"checkpointing.pretrained_checkpoint": {"path": "x"}},
        ),
    ],
    "GM221": [({NLL: 0.1}, {NLL: 0.0}), ({NLL: 0.1}, {NLL: 0.1, "ppo": {}})],
    "GM226": [
        (
            {"policy.hf_config_overrides.rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
            {"policy.hf_config_overrides.rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        ),
        ({**PUZZLE, "grpo.max_rollout_turns": 1}, {**PUZZLE, "grpo.max_rollout_turns": 50}),
        ({"policy.tokenizer.chat_template": "chatml"}, {"policy.tokenizer.chat_template": "{{ messages }}"}),
        (
            {
                SHAPING: True,
                "grpo.reward_shaping.stop_properly_penalty_coef": 0.5,
                SCALING: {**SCALED, "target_min": -1.0},
            },
            {SHAPING: True, "grpo.reward_shaping.stop_properly_penalty_coef": 0.5, SCALING: SCALED},
        ),
        (
            {SHAPING: True, **SHAPED, "grpo.reward_shaping.overlong_buffer_length": 2000},
            {SHAPING: True, **SHAPED},
        ),
        ({"grpo.invalid_tool_call_advantage": 5.0}, {"grpo.invalid_tool_call_advantage": -5.0}),
        ({**RANKED, METRIC: "val:val_loss", BETTER: True}, {**RANKED, METRIC: "val:val_loss", BETTER: False}),
        ({"ppo.max_num_steps": 9, "ppo.policy_training_start_step": 9}, {"ppo.max_num_steps": 9}),
        ({"ppo.x": 1, "value_loss_fn.scale": 0}, {"ppo.x": 1, "value_loss_fn.scale": 0.5}),
        *(
            ({SCALING: {**SCALED, name: value}}, {SCALING: {**SCALED, name: value, "enabled": False}})
            for name, value in (("source_max", 0.0), ("source_min", 2.0), ("target_max", -1.0))
        ),
        *(
            ({STOP: "accuracy", THRESHOLD_OF_STOP: 90}, {STOP: metric, THRESHOLD_OF_STOP: limit})
            for metric, limit in (("accuracy", 0.9), ("avg_length", 90))
        ),
        ({STOP: "accuracy", THRESHOLD_OF_STOP: 0.0}, {STOP: "accuracy", THRESHOLD_OF_STOP: 0.9}),
        ({**RANKED, "checkpointing.higher_is_better": False}, RANKED),
        ({**DISTILLED_ON, TOP_K: 1}, {**DISTILLED_ON, TOP_K: 2}),
        ({**DISTILLED_ON, TOP_K: 1}, {**DISTILLED_ON, TOP_K: 1, "loss_fn": {"zero_outside_topk": True}}),
    ],
    "GM230": [
        ({"inherited": {**start, key: 9}, **there, key: value}, {"inherited": {**start, key: 9}, **here, key: value})
        for start, there, here, key, value in (
            ({TP: 1}, {}, DTENSOR, "policy.dtensor_cfg.lora_cfg.dim", 64),
            ({BATCH: 128}, DTENSOR, {}, "policy.megatron_cfg.peft.dim", 64),
            (
                {"policy.megatron_cfg.mtp_loss_scaling_factor": 0.0},
                {},
                {MTP: 0.1},
                "policy.megatron_cfg.mtp_num_layers",
                1,
            ),
            ({BATCH: 128}, {"policy.generation.backend": "sglang"}, {}, f"{VLLM}.enforce_eager", True),
            ({BATCH: 128}, {}, {SAMPLER_PRECISION: "fp8"}, f"{VLLM}.num_last_layers_in_bf16", 2),
            ({BATCH: 128}, {COEFFICIENT: 0.5}, {}, "grpo.reward_shaping.overlong_buffer_penalty", 0.5),
            ({BATCH: 128}, {"loss_fn.dynamic_loss_scaling": True}, {}, "loss_fn.kl_loss_weight", 0.5),
            (
                {BATCH: 128},
                {"distillation.x": 1, "loss_fn.kl_type": "reverse"},
                {"distillation.x": 1},
                "loss_fn.mixed_kl_weight",
                0.3,
            ),
        )
    ]
    + [
        # What others wrote is not the user's mistake, nor is a setting that no other file has.
        ({"inherited": {OVERRIDDEN: 2}, OVERRIDDEN: 1}, {OVERRIDDEN: 1}),
        ({"inherited": {OVERRIDDEN: 2}, OVERRIDDEN: 1}, {"inherited": {OVERRIDDEN: 1}, OVERRIDDEN: 1}),
    ],
    "GM231": [
        (
            {"data.train": TRAIN_SET, VERIFIER: "dapo_math_verify", "reads": NEWEST},
            {"data.train": TRAIN_SET, VERIFIER: right, "reads": NEWEST},
        )
        for right in ("hf_math_verify", None)
    ]
    + [
        (
            {"data.train": TRAIN_SET, "env.math.reward_functions": [{"name": "format"}], "reads": NEWEST},
            {"data.train": TRAIN_SET, "env.math.reward_functions": [{"name": "geo3k"}], "reads": NEWEST},
        ),
        (
            {"data.train": TRAIN_SET, VERIFIER: "dapo_math_verify", "reads": NEWEST},
            {
                "data.train": {**TRAIN_SET, "prompt_file": None},
                VERIFIER: "dapo_math_verify",
                "reads": NEWEST,
            },
        ),
    ],
    "GM227": [
        (
            {"on_policy_distillation.enabled": True, "grpo.adv_estimator": {"name": "grpo"}},
            {"on_policy_distillation.enabled": True, "grpo.adv_estimator": {"name": "opd"}},
        ),
        (
            {**DPO, "grpo": None, "dpo.preference_average_log_probs": False, "dpo.reference_policy_kl_penalty": 5},
            {**DPO, "grpo": None, "dpo.preference_average_log_probs": True, "dpo.reference_policy_kl_penalty": 5},
        ),
        ({"env.nemo_gym.is_trajectory_collection": True}, {"env.nemo_gym.is_trajectory_collection": False}),
        (
            {ESTIMATES: LEFT_OUT, SHAPING: True, **SHAPED},
            {ESTIMATES: {**LEFT_OUT, "use_leave_one_out_baseline": False}, SHAPING: True, **SHAPED},
        ),
        ({ESTIMATES: LEFT_OUT, SCALING: SCALED}, {ESTIMATES: LEFT_OUT}),
        (
            {**ASYNC, "grpo.async_grpo.max_trajectory_age_steps": 4},
            {**ASYNC, "grpo.async_grpo.max_trajectory_age_steps": 4, IN_FLIGHT: True},
        ),
    ],
    "GM011": [
        *(
            ({key: wrong, "reads": NEWEST}, {key: right, "reads": NEWEST})
            for key, wrong, right in (
                (RATE, 0.0, 1e-7),
                (RATE, 1e-3, 3e-5),
                (RATE, 1e-10, 1e-7),
                # A single number that recipes repeat is no range, and a 0 in one of them makes 0 usual.
                ("env.mine.malus", -1.0, 100.0),
                ("env.mine.bonus", 10.0, 0.0),
            )
        ),
        (
            {SCALING: {"enabled": True, "source_max": 50}, "reads": NEWEST},
            {SCALING: {"enabled": False, "source_max": 50}, "reads": NEWEST},
        ),
        # What another rule explains needs no comparison.
        ({RATE: 0.0, "reads": NEWEST}, {"policy.max_grad_norm": 0.0, "reads": NEWEST}),
    ],
    "GM360": [
        ({"policy.size": 7, "reads": NEWEST, "script": SCRIPT}, {"reads": NEWEST, "script": SCRIPT}),
        # What another error explains is not said again.
        (
            {"policy.size": 7, "reads": NEWEST, "script": SCRIPT},
            {"policy.max_grad_norm": 0.0, "reads": NEWEST, "script": SCRIPT},
        ),
    ],
    "GM347": [
        ({"loss_fn.proximal_policy": "interpolated"}, {"loss_fn.proximal_policy": "recomputed"}),
        ({"loss_fn.max_token_lag": 2}, {"loss_fn.max_token_lag": None}),
        ({"loss_fn.denominator": "kept_in_loss", MASKS: [GEOMETRIC]}, {MASKS: [GEOMETRIC]}),
    ],
    "GM346": [
        *(
            (fires, {**fires, **settled})
            for fires, settled in (
                ({**DTENSOR, "policy.dtensor_cfg.dp_replicate_size": 2}, {"policy.dtensor_cfg._v2": True}),
                ({**DTENSOR, **SAVED, SAVE_FORMAT: "safetensors"}, {SAVE_FORMAT: None}),
                ({**DTENSOR, **SAVED, SAVE_FORMAT: "safetensors"}, V2),
                ({"grpo.invalid_tool_call_advantage": -5.0}, GYM_FITS),
                ({"reward_penalties.penalize_empty_final_answer": True}, GYM_FITS),
                ({**READY_FIRST}, {CORRECT: True}),
                ({"grpo.adv_estimator": {"name": "opd"}, "on_policy_distillation.enabled": True}, ASYNC),
                ({**READY_FIRST, CORRECT: True, FORCED: True}, {FORCED: False}),
                (
                    {"policy.megatron_cfg.attention_backend": "flash_attn"},
                    {"policy.megatron_cfg.attention_backend": "flash"},
                ),
                (
                    {**DTENSOR, LORA_CFG: {"enabled": True, "target_modules": ["q_proj"], "match_all_linear": True}},
                    {f"{LORA_CFG}.match_all_linear": False},
                ),
                (
                    {
                        "policy.megatron_cfg.peft": {
                            "enabled": True,
                            "target_modules": ["linear_qkv"],
                            "exclude_modules": ["x"],
                        }
                    },
                    {"policy.megatron_cfg.peft.exclude_modules": []},
                ),
                (
                    {
                        "policy.generation.mcore_generation_config": {
                            "transformer_impl": "inference_optimized",
                            "tensor_model_parallel_size": 2,
                            "sequence_parallel": False,
                        }
                    },
                    {"policy.generation.mcore_generation_config.sequence_parallel": True},
                ),
                (
                    {**APART, "policy.generation.refit_transport": "vllm_s3_sparse"},
                    {"policy.generation.refit_cfg.sparse.storage.s3_bucket": "ours"},
                ),
                (
                    {"cluster.master_port_range_low": 9, "cluster.master_port_range_high": 9},
                    {"cluster.master_port_range_high": 10},
                ),
                (
                    {"policy.generation.backend": "sglang", "policy.generation.sglang_cfg": {"pp_size": 2, **ENGINE}},
                    {"policy.generation.sglang_cfg.pp_size": 1},
                ),
                ({"data.use_multiple_dataloader": True, PER_LOADER: 5}, {PER_LOADER: 8}),
                (
                    {"async_rl.x": 1, BATCH: 512, "data.use_multiple_dataloader": True, "data_plane.enabled": True},
                    {"async_rl": None, PER_LOADER: 8},
                ),
                ({"data.use_multiple_dataloader": True}, {PER_LOADER: 8}),
                ({"policy.quant_cfg": "INT8", **DTENSOR}, MEGATRON),
                ({f"{VLLM}.is_mx": True}, {SAMPLER_PRECISION: "fp8", CORRECT: True}),
                ({**SINGLE_FITS, f"{FAILURE}.nemo_gym.rollout_timeout_s": 9}, GYM_FITS),
                ({**SINGLE_FITS, **GYM_FITS, f"{FAILURE}.native.env_timeout_s": 9}, {GYM: False}),
                (
                    {
                        f"{FAILURE}.nemo_gym.rollout_timeout_s": 9,
                        "async_rl.stall_watchdog.stall_timeout_s": 9,
                        **GYM_FITS,
                    },
                    {"async_rl": None},
                ),
                (
                    {**SINGLE_FITS, **GYM_FITS, f"{FAILURE}.nemo_gym.rollout_timeout_s": 9, **ROUTED},
                    {f"{ROUTER}.backend_timeout_s": 8},
                ),
                ({"data.default.env_name": "reward_model", "env.reward_model.max_grad_norm": 1}, {"data": None}),
                ({ESTIMATOR: "opd", **ASYNC}, {f"{TEACHERS}.enabled": True}),
                (
                    {**CARDS, **TEACHER, f"{TEACHERS}.non_colocated_teachers.default_teacher_cfg.gpus_per_node": 16},
                    {TEACHERS: None},
                ),
                # The critic and the teacher are models as the policy is.
                *(
                    ({f"{model}.dtensor_cfg": {"enabled": True, "dp_replicate_size": 2}}, {f"{model}.dtensor_cfg": {}})
                    for model in ("value", "teacher")
                ),
            )
        ),
    ],
    "GM222": [
        ({"grpo.advantage_clip_low": 0.2}, {"grpo.advantage_clip_low": -0.2}),
        ({"grpo.advantage_clip_high": -5}, {"grpo.advantage_clip_high": 5}),
        (
            {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": -5},
            {"grpo.advantage_clip_low": -5, "grpo.advantage_clip_high": 5},
        ),
    ],
    "GM224": [
        ({"policy.tokenizer.name": "Qwen/Qwen3-4B"}, {"policy.tokenizer.name": "x/Llama-3.1-Tulu-3-8B"}),
        ({"inherited": {"policy.tokenizer.name": "a/b"}}, {"policy.tokenizer.name": "a/b"}),
        (
            {"inherited": {"policy.tokenizer.name": "a/b"}},
            {"inherited": {"policy.tokenizer.name": "${policy.model_name}"}},
        ),
    ],
    "GM225": [
        ({**SINGLE_FITS, SHAPING: True, **SHAPED}, SINGLE_FITS),
        ({**SINGLE_FITS, "grpo.overlong_filtering": True}, {"grpo.overlong_filtering": True}),
        ({**SINGLE_FITS, RESAMPLED: True}, {RESAMPLED: True}),
        ({**SINGLE_FITS, "grpo.reward_scaling.enabled": True}, {"grpo.reward_scaling.enabled": True}),
        # A NeMo-RL without a single controller.
        (
            {**SINGLE_FITS, "grpo.overlong_filtering": True},
            {**SINGLE_FITS, "grpo.overlong_filtering": True, "reads": NEWEST},
        ),
        ({"ppo.use_dynamic_sampling": True}, {"ppo.use_dynamic_sampling": False}),
    ],
    "GM301": [({**ASYNC, CORRECT: False}, ASYNC), ({**ASYNC, CORRECT: False}, {CORRECT: False})],
    "GM305": [({FORCED: True}, {FORCED: True, BATCH: 512})],
    "GM306": [({BATCH: 100}, {BATCH: 256})],
    "GM228": [
        ({"data.train": {**MATHS, "data_path": "a.jsonl"}, "reads": NEWEST}, {"data.train": FILES, "reads": NEWEST}),
        (
            {"data.train": {"dataset_name": "GSM8K", "split_validation_size": 0.1}, "reads": NEWEST},
            {"data.train": [{**MATHS, "split_validation_size": 0.1, "prompt_file": "a"}], "reads": NEWEST},
        ),
    ],
    "GM348": [
        ({"data.train": {"dataset_name": "ResponseDataset"}, "reads": NEWEST}, {"data.train": FILES, "reads": NEWEST})
    ],
    "GM349": [
        ({**VALIDATED, "data.train": train, "reads": NEWEST}, {**VALIDATED, "data.train": held_out, "reads": NEWEST})
        for train, held_out in (
            ({**MATHS, "split_validation_size": 0}, MATHS),
            ([{"dataset_name": "GSM8K"}], [{"dataset_name": "GSM8K"}, MATHS]),
            (FILES, {"dataset_name": "some.other.Dataset"}),
            (FILES, {**FILES, "split_validation_size": 0.1}),
        )
    ],
    "GM350": [
        (
            {ESTIMATOR: "gdpo", "data.train": {"env_name": "math"}, "reads": NEWEST},
            {ESTIMATOR: "gdpo", "data.train": {"env_name": name}, "reads": NEWEST},
        )
        for name in ("math_multi_reward", "my_own")
    ],
    "GM352": [
        ({"grpo": None, **section, **wrong}, {"grpo": None, **section, **right})
        for section, wrong, right in (
            (DPO, {PACKING: True}, {PACKING: False}),
            ({**DPO, PACKING: False}, {"policy.dynamic_batching.enabled": True}, {}),
            (
                {**DPO, PACKING: False},
                {"dpo.reference_policy_kl_penalty": 0.0},
                {"dpo.reference_policy_kl_penalty": 0.1},
            ),
            ({**DPO, PACKING: False}, {"dpo.preference_loss_weight": 0}, {"dpo.sft_loss_weight": 0}),
        )
    ]
    + [
        ({**common, **wrong}, {**common, **right})
        for common, wrong, right in (
            ({**DTENSOR, "data.default.processor": "vlm_hf_data_processor"}, {PACKING: True}, {PACKING: False}),
            ({**DTENSOR_CP, PACKING: False}, {"data.default.processor": "vlm_hf_data_processor"}, {}),
            ({**DTENSOR_CP, PACKING: False}, {MODEL: "google/gemma-3-1b-it"}, {MODEL: "google/gemma-2-2b"}),
            (
                {BACKEND: "sglang", "policy.generation.sglang_cfg.tp_size": 2},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus_per_engine": 4},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus_per_engine": 2},
            ),
            (
                {BACKEND: "sglang", "cluster": {"num_nodes": 1, "gpus_per_node": 8}},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus": 2},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus": 8},
            ),
            ({"env.should_use_nemo_gym": True}, {"policy.generation.top_k": 50}, {}),
            ({FUSED: True, PACKING: False}, {CP: 2}, {}),
            (DISTILLED_ON, {BACKEND: "sglang"}, {BACKEND: "megatron"}),
            ({**DPO, "grpo": None, PACKING: False}, {"dpo.sft_loss_weight": -1}, {"dpo.sft_loss_weight": 0.1}),
            ({"data_plane.enabled": True, **GYM_FITS}, {"grpo.malformed_thinking_advantage": -1.0}, {}),
            ({**DTENSOR_CP, PACKING: False}, {MODEL: "Qwen/Qwen3.5-9B"}, {MODEL: "Qwen/Qwen3-8B"}),
            (
                {**CARDS, BACKEND: "sglang"},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus": 32},
                {"policy.generation.sglang_cfg.sglang_server_config.num_gpus": 16},
            ),
            ({"env.should_use_nemo_gym": True}, {"policy.generation.stop_strings": ["x"]}, {}),
            (
                {"data.default.env_name": "reward_model", "env.reward_model.resources.gpus_per_node": 1},
                {"cluster.gpus_per_node": 1, "cluster.num_nodes": 1},
                {"cluster.gpus_per_node": 2, "cluster.num_nodes": 1},
            ),
        )
    ],
    "GM355": [
        (
            {"grpo.max_num_steps": 20, "policy.megatron_cfg.scheduler.lr_warmup_iters": 50},
            {"grpo.max_num_steps": 20, "policy.megatron_cfg.scheduler.lr_warmup_iters": 5},
        ),
        ({**VALIDATED, "grpo.max_num_steps": 5}, {**VALIDATED, "grpo.max_num_steps": 5, "grpo.val_at_end": True}),
    ],
    "GM356": [
        (
            {"sft.max_num_steps": 9, "grpo": None, "loss_fn": None, "data.max_input_seq_length": 128},
            {"sft.max_num_steps": 9, "grpo": None, "loss_fn": None, "data.max_input_seq_length": 4096},
        ),
        ({"data.train.split_validation_size": 5}, {"data.train.split_validation_size": 0.05}),
        ({"data.train.split_validation_size": 5}, {"data.train.split_validation_size": 64}),
    ],
    "GM357": [
        ({"policy.optimizer": {"name": "torch.optim.AdamW", "kwargs": wrong}}, {"policy.optimizer": right})
        for wrong, right in (
            ({"learning_rate": 1e-6}, {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "betas": [0.9, 0.999]}}),
            ({"lr": 1e-6, "weight_decy": 0.1}, {"name": "nobodys.optim.AdamW", "kwargs": {"weight_decy": 0.1}}),
        )
    ],
    "GM358": [
        ({**FP8_EXPERTS, SAMPLER_TP: 4}, {**FP8_EXPERTS, SAMPLER_TP: 2}),
        ({**FP8_EXPERTS, SAMPLER_TP: 4}, {**FP8_EXPERTS, SAMPLER_TP: 4, f"{VLLM}.expert_parallel_size": 4}),
        ({**FP8_EXPERTS, SAMPLER_TP: 4}, {**FP8_EXPERTS, SAMPLER_TP: 4, SAMPLER_PRECISION: "bfloat16"}),
        ({**FP8_EXPERTS, SAMPLER_TP: 4}, {**FP8_EXPERTS, SAMPLER_TP: 4, f"{VLLM}.is_mx": True}),
        ({**FP8_EXPERTS, MODEL: "Qwen/Qwen2.5-7B", SAMPLER_TP: 8}, {**FP8_EXPERTS, MODEL: "x/8B", SAMPLER_TP: 8}),
    ],
    "GM353": [({**CARDS, PACKING: False, SCORING: 3}, {**CARDS, SCORING: 3, PACKING: True})],
    "GM354": [
        (
            {"data.default.prompt_file": "examples/prompts/cot_math.txt", "reads": NEWEST},
            {"data.default.prompt_file": "examples/prompts/cot.txt", "reads": NEWEST},
        ),
        # It has no place for the question.
        (
            {"data.default.prompt_file": "examples/prompts/system.txt", "reads": NEWEST},
            {"data.default.system_prompt_file": "examples/prompts/system.txt", "reads": NEWEST},
        ),
    ],
    "GM232": [
        (
            {**VALIDATED, "data.train": MATHS, "data.validation": MATHS},
            {**VALIDATED, "data.train": MATHS, "data.validation": {**MATHS, "split": "test"}},
        ),
        (
            {**VALIDATED, "data.train": FILES, "data.validation": FILES},
            {"data.train": FILES, "data.validation": FILES},
        ),
    ],
    "GM351": [
        (
            {STOP: "reward", **VALIDATED, "reads": NEWEST},
            {STOP: "accuracy", **VALIDATED, "reads": NEWEST},
        ),
        ({STOP: "pass_k", **VALIDATED, "reads": NEWEST}, {STOP: "pass_k", **VALIDATED, **SEVERAL, "reads": NEWEST}),
        ({**SAVED, METRIC: "val_reward"}, {METRIC: "val_reward"}),
        *(
            ({**pairs, METRIC: f"val:validation-{wrong}"}, {**pairs, METRIC: f"val:validation-{right}"})
            for pairs in ({**DPO, "grpo": None, **SAVED, "dpo.val_period": 5, PACKING: False, "reads": NEWEST},)
            for wrong, right in (("default_los", "default_loss"), ("loss", "default_accuracy"))
        ),
    ]
    + [
        (
            {**SAVED, **VALIDATED, METRIC: wrong, "reads": NEWEST},
            {**SAVED, **VALIDATED, **SEVERAL, METRIC: right, "reads": NEWEST},
        )
        for wrong, right in (("val:acuracy", "val:pass_k"), ("train:rewards", "train:reward"), ("val:x", "train:a/b"))
    ],
    "GM359": [
        (
            {MODEL: "Qwen/Qwen3-4B", f"{section}.model_name": wrong},
            {MODEL: "Qwen/Qwen3-4B", f"{section}.model_name": right},
        )
        for section, wrong, right in (
            ("teacher", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"),
            ("teacher", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-3B"),
            ("value", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B"),
        )
    ],
    "GM411": [
        (
            {f"{VLLM}.max_model_len": 8192, ROPE: {"factor": 2, "original_max_position_embeddings": 2048}},
            {f"{VLLM}.max_model_len": 8192, ROPE: {"factor": 4, "original_max_position_embeddings": 2048}},
        ),
        (
            {MODEL: "Qwen/Qwen2.5-Math-7B-Instruct", f"{VLLM}.max_model_len": 8192},
            {MODEL: "Qwen/Qwen2.5-Math-7B-Instruct", f"{VLLM}.max_model_len": 4096},
        ),
        (
            {MODEL: "Qwen/Qwen3-4B-Base", f"{VLLM}.max_model_len": 40960},
            {MODEL: "Qwen/Qwen3-4B", f"{VLLM}.max_model_len": 40960},
        ),
    ],
    "GM229": [
        (
            {"env.vlm.reward_functions": [{"name": "format", "weight": 1.0}, {"name": "exact_alnum", "weight": 0.0}]},
            {"env.vlm.reward_functions": [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}]},
        ),
        ({"env.vlm.reward_functions": []}, {"env.vlm.reward_functions": None}),
    ],
    "GM307": [
        ({TP: 4, SCORING: 8}, {TP: 4}),
        ({TP: 4, SCORING: 8}, {TP: 2, SCORING: 8}),
        ({TP: 4, SCORING: 8}, {TP: 4, SCORING: 8, FORCED: True, BATCH: 512}),
    ],
    "GM308": [
        ({FUSED_BEFORE: True, PACKING: False}, FUSED_FITS),
    ],
    "GM310": [
        ({IN_REWARD: True, PENALTY: 0.1, FORCED: True, BATCH: 512}, {IN_REWARD: True, PENALTY: 0.1}),
        (
            {IN_REWARD: True, PENALTY: 0.1, FORCED: True, BATCH: 512},
            {IN_REWARD: True, PENALTY: 0.1, FORCED: True, BATCH: 512, THRESHOLD: 2.0},
        ),
    ],
    "GM311": [
        (
            {"grpo.skip_reference_policy_logprobs_calculation": True, PENALTY: 0.1},
            {"grpo.skip_reference_policy_logprobs_calculation": True},
        )
    ],
    "GM312": [({"policy.dtensor_cfg.enabled": True}, {}), ({"policy.megatron_cfg.enabled": False}, DTENSOR)],
    "GM313": [
        ({GEOMASK: "geomask", TOP_P: 0.9}, {GEOMASK: "geomask"}),
        (
            {GEOMASK: "geomask", **FUSED_FITS, FUSED_BEFORE: True, FUSED: False},
            {GEOMASK: "geomask", **FUSED_FITS, FUSED: False},
        ),
        (
            {GEOMASK: "geomask_linear", **DTENSOR, "policy.dtensor_cfg.context_parallel_size": 2},
            {GEOMASK: "geomask_linear", **DTENSOR},
        ),
        ({GEOMASK: "mcore", **FUSED_FITS}, {GEOMASK: "nemo_rl", **FUSED_FITS}),
        ({GEOMASK: "mcore", **DTENSOR}, {GEOMASK: "geomask", **DTENSOR}),
    ],
    "GM314": [
        ({PADDING: 3, CP: 2}, {PADDING: 8, CP: 2}),
        ({PADDING: 2, CP: 2}, {PADDING: 2}),
        ({PADDING: 4, CP: 2, TP: 4, "policy.megatron_cfg.sequence_parallel": True}, {PADDING: 4, CP: 2, TP: 4}),
        (
            {PADDING: 6, TP: 4, "policy.megatron_cfg.sequence_parallel": True},
            {PADDING: 4, TP: 4, "policy.megatron_cfg.sequence_parallel": True},
        ),
        ({PADDING: 3, CP: 2}, {PADDING: 3, CP: 2, PACKING: False}),
        ({PADDING: 3, CP: 2}, {PADDING: 3, CP: 2, DYNAMIC: True}),
        ({PADDING: 3, CP: 2}, {PADDING: 3, CP: 2, **DTENSOR}),
    ],
    "GM315": [
        ({ANCHOR: "gen", THRESHOLD: 1.5}, {ANCHOR: "gen", THRESHOLD: None}),
        (
            {ANCHOR: "gen", "on_policy_distillation": {"enabled": True}},
            {ANCHOR: "gen", "on_policy_distillation": {"enabled": True}, MASKS: [GEOMETRIC]},
        ),
    ],
    "GM319": [({"loss_fn.record": {"dir": "records", "entropy": True}}, {"loss_fn.record": {"dir": "records"}})],
    "GM316": [
        ({**CARDS, TP: 3}, {**CARDS, TP: 4}),
        ({**CARDS, TP: 4, CP: 3}, {**CARDS, TP: 4, CP: 4}),
        ({**CARDS, **APART, TP: 16}, {**CARDS, **APART, TP: 8}),
        ({**CARDS, **DTENSOR, DTENSOR_TP: 5}, {**CARDS, **DTENSOR}),
        ({**CARDS, TP: 3}, {TP: 3}),
    ],
    "GM318": [
        ({MASKS: [{"preset": "m2po"}], **SINGLE}, {MASKS: [{"preset": "m2po"}]}),
        ({MASKS: [{"preset": "m2po"}], **SINGLE}, {MASKS: [GEOMETRIC], **SINGLE}),
        ({CORRECT: True, NORMALIZE: True, **SINGLE}, {CORRECT: True, NORMALIZE: True}),
    ],
    "GM401": [
        ({CORRECT: True, LEVEL: "sequence"}, {CORRECT: True, LEVEL: "sequence_mean"}),
        ({CORRECT: True, LEVEL: "sequence"}, {CORRECT: True, LEVEL: "sequence", RESPONSE: 512}),
        ({CORRECT: True, LEVEL: "sequence"}, {CORRECT: True, LEVEL: "sequence", "kl": 1e-4}),
        ({**GSPO, CORRECT: True}, {**GSPO}),
    ],
    "GM402": [
        ({MASKS: [{"preset": "product", "min": 0.5, "max": 2.0}]}, {MASKS: [GEOMETRIC]}),
        (
            {MASKS: [{"preset": "product", "min": 0.5, "max": 2.0}]},
            {MASKS: [{"preset": "product", "min": 0.5, "max": 2.0}], "policy.max_total_sequence_length": 300},
        ),
        ({MASKS: [GEOMETRIC], "kl": 0.05}, {MASKS: [GEOMETRIC]}),
        # The mismatch that is usual for the recipe's precisions, and bounds that keep about half.
        ({**FP8_EXPERTS, MASKS: [{**GEOMETRIC, "min": 0.992}], "kl": None}, {**MOE, MASKS: [GEOMETRIC], "kl": None}),
        ({MASKS: [{**GEOMETRIC, "min": 0.9995}]}, {MASKS: [{**GEOMETRIC, "min": 0.999}]}),
        # On the total log-ratio too; not on staleness alone.
        ({MASKS: [{**ON_TOTAL, "log_ratio": "total"}]}, {MASKS: [{**ON_TOTAL, "log_ratio": "policy"}]}),
        # Truncations that are masks.
        ({**TRUNCATED, TRAINING_TYPE: "seq-mask-tis"}, {**TRUNCATED, TRAINING_TYPE: "tis"}),
    ],
    "GM403": [({NLL: 0.1, "ppo": {}}, {NLL: 0.1, "loss_fn.positive_example_nll_normalization": "loss", "ppo": {}})],
    "GM404": [({TP: 2, SCORING: 8}, {SCORING: 8}), ({TP: 2, SCORING: 8}, {TP: 4, SCORING: 8})],
    "GM405": [
        ({"loss_fn.batch_veto": {"max": 1e-4}}, {"loss_fn.batch_veto": {"max": 0.1}}),
        ({"loss_fn.batch_veto": {"max": 0.01}, "kl": 0.02}, {"loss_fn.batch_veto": {"max": 0.01}}),
    ],
    "GM406": [({"policy.generation.vllm_cfg.max_model_len": 4095}, {"policy.generation.vllm_cfg.max_model_len": 4096})],
    "GM407": [
        ({**GSPO, ANCHOR: "gen"}, GSPO),
        ({**GSPO, ANCHOR: "gen"}, {**GSPO, ANCHOR: "gen", "kl": 1e-6}),
        ({**GSPO, ANCHOR: "gen"}, {**GSPO, ANCHOR: "gen", CLIP_MIN: 0.003}),
        (
            {"loss_fn.sequence_level_importance_ratios": True, **BY_SEQUENCE, ANCHOR: "gen"},
            {**BY_SEQUENCE, ANCHOR: "gen"},
        ),
    ],
    "GM408": [
        # 12 bytes of 128,256 columns a row: 12 GB are 7,797 rows.
        ({TRAINED: 7900}, {TRAINED: 7700}),
        ({TRAINED: 16_000, TP: 1}, {TRAINED: 15_400, TP: 2}),
        ({TRAINED: 8000}, {TRAINED: 8000, CP: 2}),
        ({TRAINED: 8000}, {TRAINED: 8000, GEOMASK: "geomask"}),
        # 14 of two bytes each, of which the gradient has two too.
        ({TRAINED: 7000, **DEFERRED}, {TRAINED: 7000}),
        ({TRAINED: 13_000, GEOMASK: "geomask"}, {TRAINED: 13_000, GEOMASK: "geomask", **DEFERRED}),
        ({TRAINED: 8000, **CHUNKS}, {TRAINED: 8000, **CHUNKS, **DEFERRED}),
        ({TRAINED: 8000, **CHUNKS, **DEFERRED, TOP_P: 0.9}, {TRAINED: 8000, **CHUNKS, **DEFERRED}),
        ({TRAINED: 8000, **CHUNKS, **DTENSOR}, {TRAINED: 8000, **CHUNKS, **DTENSOR, GEOMASK: "geomask"}),
        ({TRAINED: 8000}, {TRAINED: 8000, MODEL: "a/b"}),
        # Four sequences of 4,096 tokens side by side.
        ({PACKING: False}, {PACKING: False, MICROBATCH: 1, SCORING: 1}),
        # Scoring alone has as many, if there is any.
        ({TRAINED: 4000, SCORED: 8000}, {TRAINED: 4000, SCORED: 8000, FORCED: True, BATCH: 512}),
        (
            {TRAINED: 4000, SCORED: 8000, FORCED: True, BATCH: 512, THRESHOLD: 2.0},
            {TRAINED: 4000, SCORED: 8000, GEOMASK: "geomask"},
        ),
    ],
    "GM324": [
        *(
            ({key: wrong, "reads": NEWEST}, {key: right, "reads": NEWEST})
            for key, wrong, right in (
                (BACKEND, "vLLM", "sglang"),
                (ESTIMATOR, "rloo", "gdpo"),
                ("policy.sequence_packing.algorithm", "modified_ffd", "MODIFIED_FIRST_FIT_DECREASING"),
                ("policy.precision", "bf16", "float16"),
                (f"{VLLM}.precision", "bf16", "half"),
                ("data.train.dataset_name", "OpenMathInstruct2", "OpenMathInstruct-2"),
                ("data.train.dataset_name", "OpenMathInstruct2", "my_package.MyDataset"),
                (VERIFIER, "hf_math", "hf_math_verify"),
                # A registry that a function adds to is open for words that resemble none of its own.
                ("data.default.processor", "math_data_procesor", "my_own_preparation"),
                ("policy.optimizer.name", "torch.optim.AdmW", "torch.optim.Adam"),
                ("policy.optimizer.name", "torch.optim.AdmW", "torch.optim.lr_scheduler.LinearLR"),
                # What NeMo-RL passes on, or does not read, is free.
                ("policy.precision", "bf16", "bfloat16"),
            )
        ),
        (
            {"policy.sequence_packing.algorithm": "modified_ffd", "reads": NEWEST},
            {"policy.sequence_packing.algorithm": "modified_ffd", PACKING: False, "reads": NEWEST},
        ),
        (
            {"policy.precision": "bf16", "reads": NEWEST},
            {"policy.precision": "bf16", "lab.num_threads": 1, "reads": NEWEST},
        ),
        ({"policy.precision": "bf16", "reads": NEWEST}, {f"{KWARGS}.precision": "bf16", "reads": NEWEST}),
    ],
    "GM010": [
        *(
            ({key: wrong, "reads": NEWEST}, {key: right, "reads": NEWEST})
            for key, wrong, right in (
                ("checkpointing.model_save_format", "safetensor", "torch_save"),
                ("policy.megatron_cfg.moe_router_dtype", "fp65", "fp32"),
                ("policy.optimizer.name", "torch.optm.AdamW", "some_package.optim.AdamX"),
                ("policy.optimizer.name", "AdamW", "torch.optim.AdamW"),
            )
        ),
        (
            {"checkpointing.model_save_format": "safetensor", "reads": NEWEST},
            {"logger.wandb.model_save_format": "safetensor", "reads": NEWEST},
        ),
    ],
    "GM327": [
        ({"grpo.batch_multiplier": 2}, {"grpo.batch_multiplier": 1.0}),
        ({"grpo.batch_multiplier": 2}, {"grpo.batch_multiplier": 2, RESAMPLED: True}),
    ],
    "GM329": [
        *(
            (
                {**CARDS, **APART, "policy.generation.backend": "megatron", f"{MCORE}.{axis}_parallel_size": 16},
                {**CARDS, "policy.generation.backend": "megatron", f"{MCORE}.{axis}_parallel_size": 16},
            )
            for axis in ("tensor_model", "expert_model")
        ),
        ({**CARDS, f"{VLLM}.tensor_parallel_size": 3}, {**CARDS, f"{VLLM}.tensor_parallel_size": 4}),
        ({**CARDS, **APART, f"{VLLM}.tensor_parallel_size": 16}, {**CARDS, f"{VLLM}.tensor_parallel_size": 16}),
        (
            {f"{VLLM}.tensor_parallel_size": 4, f"{VLLM}.expert_parallel_size": 6},
            {f"{VLLM}.tensor_parallel_size": 4, f"{VLLM}.expert_parallel_size": 8},
        ),
        (
            {f"{VLLM}.tensor_parallel_size": 4, f"{VLLM}.expert_parallel_size": 8, f"{VLLM}.async_engine": True},
            {f"{VLLM}.tensor_parallel_size": 8, f"{VLLM}.expert_parallel_size": 8, f"{VLLM}.async_engine": True},
        ),
    ],
    "GM330": [
        ({**CARDS, EP: 3}, {**CARDS, EP: 8}),
        ({**CARDS, EP: 16, PP: 2}, {**CARDS, EP: 16}),
        ({**CARDS, EP: 3}, {**CARDS, EP: 3, "cluster.segment_size": 2}),
        ({**CARDS, EP: 3}, {EP: 3}),
    ],
    "GM331": [
        ({**CARDS, **TEACHER, **APART}, {**CARDS, **TEACHER, **APART, "cluster.num_nodes": 3}),
        ({**CARDS, **TEACHER, "cluster.num_nodes": 1}, {**CARDS, **TEACHER}),
        (
            {**CARDS, "data.default.env_name": "reward_model", "env.reward_model.resources.num_nodes": 2},
            {**CARDS, "data.default.env_name": "reward_model", "env.reward_model.resources.num_nodes": 1},
        ),
        (
            {**DISTILLED_ON, **CARDS, "cluster.num_nodes": 1, COLOCATED: {"enabled": False, "resources": {}}},
            {**DISTILLED_ON, **CARDS, **APART},
        ),
        (
            {**CARDS, f"{COLOCATED}": {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 2}}},
            {**CARDS, **APART},
        ),
        ({**CARDS, f"{COLOCATED}.enabled": False}, CARDS),
        (
            {**CARDS, f"{COLOCATED}": {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}}},
            {**CARDS, **APART},
        ),
        (
            {**CARDS, "cluster.num_nodes": 1, f"{COLOCATED}": {"enabled": False, "resources": {"gpus_per_node": 8}}},
            {**CARDS, "cluster.num_nodes": 1, f"{COLOCATED}": {"enabled": False, "resources": {"gpus_per_node": 4}}},
        ),
    ],
    "GM332": [
        ({**CARDS, "cluster.num_nodes": 3}, CARDS),
        ({**CARDS, "cluster.num_nodes": 3, **DPO, "grpo": None}, {**CARDS, **DPO, "grpo": None}),
        ({**REWARDED, **CARDS, "rm.val_global_batch_size": 30}, {**REWARDED, **CARDS, "rm.val_global_batch_size": 32}),
        ({**CARDS, "value": {"train_global_batch_size": 30}}, {**CARDS, "value": {"train_global_batch_size": 64}}),
        ({**CARDS, PACKING: False, MICROBATCH: 3}, {**CARDS, MICROBATCH: 3}),
        ({**CARDS, PACKING: False, MICROBATCH: 3}, {**CARDS, PACKING: False}),
    ],
    "GM334": [
        (
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 1, "policy.dtensor_cfg.sequence_parallel": True},
        ),
        (
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
            {**DTENSOR, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
        ),
    ],
    "GM302": [
        ({**ASYNC, "policy.generation.colocated.enabled": True}, ASYNC),
        ({**ASYNC, "policy.generation.colocated.enabled": True}, {"policy.generation.colocated.enabled": True}),
    ],
    "GM322": [({DYNAMIC: True}, {DYNAMIC: True, PACKING: False})],
    "GM326": [
        ({"policy.generation.val_temperature": 0.6}, {"policy.generation.val_temperature": 1.0}),
        (
            {"policy.generation.val_top_k": 20, "env.should_use_nemo_gym": True},
            {"policy.generation.val_top_p": 0.9, "env.should_use_nemo_gym": True},
        ),
    ],
    # Qwen2.5-7B has 28 heads and 4 key-value heads, Qwen3-30B-A3B has 32 and 4.
    "GM335": [
        ({MODEL: "Qwen/Qwen2.5-7B", TP: 8}, {MODEL: "Qwen/Qwen2.5-7B", TP: 4}),
        ({MODEL: "Qwen/Qwen2.5-7B", TP: 14}, {**MOE, TP: 8}),
        ({**MOE, **DTENSOR, DTENSOR_TP: 8}, {**MOE, **DTENSOR, DTENSOR_TP: 4}),
        ({**MOE, TP: 3}, {MODEL: "my/own-model", TP: 3}),
    ],
    # Qwen3-30B-A3B has 48 layers.
    "GM336": [
        ({**MOE, PP: 5}, {**MOE, PP: 4}),
        ({**MOE, PP: 5}, {**MOE, PP: 5, FIRST: 8}),
        ({**MOE, PP: 4, FIRST: 11}, {**MOE, PP: 4, FIRST: 11, LAST: 11}),
        ({**MOE, PP: 2, FIRST: 20, LAST: 20}, {**MOE, PP: 2, FIRST: 20, LAST: 28}),
        ({**MOE, PP: 3, FIRST: 48}, {**MOE, **DTENSOR, PP: 5}),
    ],
    "GM337": [
        (COPIED_EXPERTS, {**COPIED_EXPERTS, ETP: 2}),
        (COPIED_EXPERTS, {**COPIED_EXPERTS, EP: 2}),
        (COPIED_EXPERTS, {**COPIED_EXPERTS, MODEL: "Qwen/Qwen3-8B"}),
        (COPIED_EXPERTS, {**COPIED_EXPERTS, "megatron": "or config.expert_tensor_parallel_size != tp"}),
        (COPIED_EXPERTS, {**COPIED_EXPERTS, "megatron": ""}),
        ({**COPIED_EXPERTS, TP: 4, ETP: 2}, {**COPIED_EXPERTS, TP: 1}),
    ],
    "GM339": [
        *(({SAVE_BY: wrong}, {SAVE_BY: "00:03:45:00"}) for wrong in ("03:45:00", 13500)),
        ({"grpo.max_num_steps": 0}, {"grpo.max_num_steps": 1}),
        ({"grpo.max_num_epochs": -1}, {**ASYNC, "grpo.max_num_epochs": -1}),
        ({**DISTILLED_ON, "distillation.topk_logits_k": 0}, {**DISTILLED_ON, "distillation.topk_logits_k": 64}),
        (
            {**REWARDED, "rm.val_period": 9, "rm.val_micro_batch_size": 0},
            {**REWARDED, "rm.val_period": 9, "rm.val_micro_batch_size": 1},
        ),
        ({**READY_FIRST, **WAITING, BUFFER: 64}, {**READY_FIRST, **WAITING, BUFFER: 96}),
        ({**IN_ORDER, BUFFER: 64}, {**IN_ORDER, BUFFER: 96}),
        ({BATCH: 0}, {BATCH: 128}),
        ({SAVE_PERIOD: 0}, {SAVE_PERIOD: 1}),
        ({RATE: -1e-6}, {RATE: 0.0}),
        ({**VALIDATED, "grpo.val_batch_size": 0}, {"grpo.val_period": 0, "grpo.val_batch_size": 0}),
        ({BATCH: 0}, {BATCH: 0, "lab.num_threads": 1}),
        ({TEMPERATURE: 0.0}, {TEMPERATURE: 0.01}),
        ({TEMPERATURE: 0}, {TEMPERATURE: 0, "lab.num_threads": 1}),
        ({TOP_P: 95}, {TOP_P: 0.95}),
        ({TOP_P: 0.0}, {TOP_P: 1}),
        ({"policy.generation.top_k": 0}, {"policy.generation.top_k": -1}),
        ({f"{VLLM}.gpu_memory_utilization": 80}, {f"{VLLM}.gpu_memory_utilization": 0.8}),
        ({RATE: 5.0}, {RATE: 5e-6}),
        ({"policy.optimizer.kwargs": {"betas": [0.9, 9.99]}}, {"policy.optimizer.kwargs": {"betas": [0.9, 0.999]}}),
        ({"policy.max_grad_norm": 0}, {"policy.max_grad_norm": None}),
        ({**SAVED, "checkpointing.keep_top_k": 0}, {**SAVED, "checkpointing.keep_top_k": None}),
        ({RESAMPLED: True, "grpo.dynamic_sampling_max_gen_batches": 0}, {"grpo.dynamic_sampling_max_gen_batches": 0}),
    ],
    "GM410": [
        ({SHAPING: True, **SHAPED, LONGEST: 512}, {SHAPING: True, **SHAPED, LONGEST: 1800}),
        ({SHAPING: True, **SHAPED, RESPONSE: 1024}, {SHAPING: True, **SHAPED, RESPONSE: 1025}),
        # vLLM's context bounds a response; the trainer's length does where there is no other.
        (
            {SHAPING: True, **SHAPED, "policy.max_total_sequence_length": 1000},
            {SHAPING: True, **SHAPED, "policy.max_total_sequence_length": 1000, f"{VLLM}.max_model_len": 4096},
        ),
        ({SHAPING: True, **SHAPED, f"{VLLM}.max_model_len": 1000}, {**SHAPED, f"{VLLM}.max_model_len": 1000}),
        (
            {SHAPING: True, **SHAPED, f"{VLLM}.max_model_len": 1000},
            {
                SHAPING: True,
                **SHAPED,
                f"{VLLM}.max_model_len": 1000,
                "grpo.reward_shaping.stop_properly_penalty_coef": 0.5,
            },
        ),
    ],
    "GM409": [
        ({TRAINED: 2048}, {TRAINED: 4096}),
        ({SCORED: 2048}, {SCORED: 2048, PACKING: False}),
        (
            {DYNAMIC: True, "policy.dynamic_batching.train_mb_tokens": 2048},
            {DYNAMIC: True, "policy.dynamic_batching.train_mb_tokens": 8192},
        ),
    ],
    "GM341": [
        ({RATE: 1e-6, MIN_RATE: 2e-6}, {RATE: 1e-6, MIN_RATE: 1e-6}),
        (DTENSOR, {**DTENSOR, OTHER_RATE: 1e-6}),
    ],
    "GM342": [
        (
            {"policy.precision": "float16", f"{OPTIMIZER}.fp16": False},
            {"policy.precision": "float16", f"{OPTIMIZER}.fp16": True},
        ),
        ({f"{OPTIMIZER}.bf16": False}, {f"{OPTIMIZER}.bf16": True}),
        ({"policy.precision": "float32", f"{OPTIMIZER}.bf16": True}, {f"{OPTIMIZER}.bf16": True}),
        (
            {f"{OPTIMIZER}.bf16": False},
            {f"{OPTIMIZER}.bf16": False, f"{OPTIMIZER}.use_precision_aware_optimizer": False},
        ),
    ],
    "GM343": [
        ({**ADAPTED, DTENSOR_TP: 2}, ADAPTED),
        ({**ADAPTED, DTENSOR_TP: 2}, {**ADAPTED, DTENSOR_TP: 2, f"{LORA_CFG}.use_triton": False}),
        ({**ADAPTED, "policy.dtensor_cfg._v2": False}, ADAPTED),
    ],
    "GM345": [
        ({SHAPING: True}, {SHAPING: True, "grpo.reward_shaping.stop_properly_penalty_coef": 0.5}),
        ({SHAPING: True}, {SHAPING: True, **SHAPED}),
        *(
            (
                {SHAPING: True, **SHAPED, f"grpo.reward_shaping.{name}": value},
                {**trainer, SHAPING: True, **SHAPED, f"grpo.reward_shaping.{name}": value},
            )
            for name, value in (
                ("overlong_buffer_length", None),
                ("overlong_buffer_length", 0),
                ("overlong_buffer_penalty", -1.0),
                ("max_response_length", None),
            )
            for trainer in (ASYNC, SINGLE_FITS)
        ),
        ({"ppo.reward_shaping.enabled": True}, {"ppo.reward_shaping.enabled": True, ASYNC_PPO: True}),
    ],
    "GM344": [
        (
            {"env.math.num_workers": 1, "data.default.env_name": "code"},
            {"env.math.num_workers": 1, "data.default.env_name": "math"},
        ),
        (
            {"env.math.num_workers": 1, "data.train": [{"env_name": "math"}, {"env_name": "code"}]},
            {"env.math.num_workers": 1, "data.train": [{"env_name": "math"}]},
        ),
        *(
            (
                {"env.dapo.num_workers": 1, "data.default.env_name": "dapo", "reads": NEWEST},
                {f"env.{name}.num_workers": 1, "data.default": {"env_name": name, **others}, "reads": NEWEST},
            )
            for name, others in (("math", {}), ("clevr", {"processor": "vlm_hf_data_processor"}))
        ),
    ],
}
# For a quick look, the first pair of each rule.


def changed(changes, base=CLEAN):
    data = copy.deepcopy(base)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return data
