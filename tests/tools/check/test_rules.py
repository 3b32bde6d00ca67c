"""Every rule of ``nemo-geomask check``: a recipe in which it fires, and a near one in which it doesn't."""

import copy
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from nemo_geomask.cli import main
from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import MaskRule
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS, SETTING_READERS, merges_expert_adapters
from nemo_geomask.recipe import read_recipe
from nemo_geomask.recipe import recipe_file as recipes
from nemo_geomask.tools.check import RULES, RecipeFacts, check
from nemo_geomask.tools.check.expectation import clipped_fractions, kept_fraction, median_weight

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

SINGLE = {"async_rl.min_groups_for_streaming_train": 4}
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
        ({"policy.generation.temprature": 1.0, "reads": NEWEST}, {"policy.generation.top_n": 0, "reads": NEWEST}),
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
        ({"policy.dtensor_cfg": {"enabled": True}, **TYPED}, {"policy.dtensor_cfg": {"enabled": False}, **TYPED})
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
        (
            {**ASYNC, IN_FLIGHT: True},
            {**ASYNC, IN_FLIGHT: True, "grpo.async_grpo.recompute_kv_cache_after_weight_updates": True},
        ),
        ({**ASYNC, IN_FLIGHT: True}, ASYNC),
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
        ({**RANKED, SAVE_PERIOD: 25}, {**RANKED, SAVE_PERIOD: 20}),
        ({**RANKED, "grpo.val_period": 0}, {**RANKED, "grpo.val_period": 0, "grpo.val_at_end": True}),
        ({**RANKED, "checkpointing.higher_is_better": False}, RANKED),
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
    "GM222": [
        ({"grpo.advantage_clip_low": 0.2}, {"grpo.advantage_clip_low": -0.2}),
        ({"grpo.advantage_clip_high": -5}, {"grpo.advantage_clip_high": 5}),
        (
            {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": -5},
            {"grpo.advantage_clip_low": -5, "grpo.advantage_clip_high": 5},
        ),
    ],
    "GM224": [
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
    "GM302": [
        ({**ASYNC, "policy.generation.vllm_cfg.async_engine": False}, ASYNC),
        ({**ASYNC, "policy.generation.colocated.enabled": True}, ASYNC),
        ({**ASYNC, "policy.generation.colocated.enabled": True}, {"policy.generation.colocated.enabled": True}),
    ],
    "GM303": [({SAMPLER_PRECISION: "fp8"}, {SAMPLER_PRECISION: "fp8", CORRECT: True})],
    "GM304": [
        (
            {"policy.generation.vllm_cfg.kv_cache_dtype": "fp8"},
            {"policy.generation.vllm_cfg.kv_cache_dtype": "fp8", SAMPLER_PRECISION: "fp8", CORRECT: True},
        ),
        ({"policy.generation.vllm_cfg.kv_cache_dtype": "fp8", SAMPLER_PRECISION: "fp8", CORRECT: True, PP: 2}, {PP: 2}),
    ],
    "GM305": [({FORCED: True}, {FORCED: True, BATCH: 512})],
    "GM306": [({BATCH: 100}, {BATCH: 256})],
    "GM307": [
        ({TP: 4, SCORING: 8}, {TP: 4}),
        ({TP: 4, SCORING: 8}, {TP: 2, SCORING: 8}),
        ({TP: 4, SCORING: 8}, {TP: 4, SCORING: 8, FORCED: True, BATCH: 512}),
    ],
    "GM308": [
        ({FUSED: True}, FUSED_FITS),
        ({**FUSED_FITS, CP: 2}, FUSED_FITS),
        ({**FUSED_FITS, TOP_P: 0.9}, {TOP_P: 0.9}),
        # v0.7.0 has it under another name, for other losses; main does not read that name.
        ({FUSED_BEFORE: True, PACKING: False, "reads": OLDER}, {FUSED_BEFORE: True, PACKING: False, "reads": NEWEST}),
        ({FUSED_BEFORE: True, PACKING: False}, FUSED_FITS),
    ],
    "GM309": [
        ({REPLAY: True, BACKEND: "megatron"}, {REPLAY: True}),
        ({REPLAY: True, "policy.megatron_cfg.virtual_pipeline_model_parallel_size": 2}, {REPLAY: True}),
        ({**ASYNC, REPLAY: True, "data_plane.enabled": True}, {REPLAY: True, "data_plane.enabled": True}),
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
    "GM320": [(CHUNKS, {**CHUNKS, **DEFERRED}), (CHUNKS, {**CHUNKS, **DTENSOR})],
    "GM316": [
        ({**CARDS, TP: 3}, {**CARDS, TP: 4}),
        ({**CARDS, TP: 4, CP: 3}, {**CARDS, TP: 4, CP: 4}),
        ({**CARDS, **APART, TP: 16}, {**CARDS, **APART, TP: 8}),
        ({**CARDS, **DTENSOR, DTENSOR_TP: 5}, {**CARDS, **DTENSOR}),
        ({**CARDS, TP: 3}, {TP: 3}),
    ],
    "GM317": [
        ({CP: 2, PACKING: False}, {CP: 2}),
        ({CP: 2, PACKING: False}, {CP: 1, PACKING: False}),
        ({CP: 2, PACKING: False}, {CP: 2, PACKING: False, **DTENSOR}),
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
    "GM321": [
        ({"policy.precision": "bf16"}, {"policy.precision": "float16"}),
        ({f"{VLLM}.precision": "bf16"}, {f"{VLLM}.precision": "half"}),
        ({"policy.precision": "bf16"}, {"policy.precision": "bf16", "lab.num_threads": 1}),
    ],
    "GM322": [({DYNAMIC: True}, {DYNAMIC: True, PACKING: False}), ({DYNAMIC: True, PACKING: False, PP: 2}, {PP: 2})],
    "GM323": [
        ({TEMPERATURE: 0.0}, {TEMPERATURE: 0.01}),
        ({TEMPERATURE: 0}, {TEMPERATURE: 0, "lab.num_threads": 1}),
        ({TOP_P: 95}, {TOP_P: 0.95}),
        ({TOP_P: 0.0}, {TOP_P: 1}),
        ({"policy.generation.top_k": 0}, {"policy.generation.top_k": -1}),
    ],
    "GM324": [
        ({BACKEND: "vLLM"}, {BACKEND: "sglang"}),
        ({ESTIMATOR: "rloo"}, {ESTIMATOR: "gdpo"}),
        (
            {"policy.sequence_packing.algorithm": "modified_ffd"},
            {"policy.sequence_packing.algorithm": "MODIFIED_FIRST_FIT_DECREASING"},
        ),
        (
            {"policy.sequence_packing.algorithm": "modified_ffd"},
            {"policy.sequence_packing.algorithm": "modified_ffd", PACKING: False},
        ),
    ],
    "GM325": [({f"{VLLM}.gpu_memory_utilization": 80}, {f"{VLLM}.gpu_memory_utilization": 0.8})],
    "GM326": [
        ({"policy.generation.val_temperature": 0.6}, {"policy.generation.val_temperature": 1.0}),
        (
            {"policy.generation.val_top_k": 20, "env.should_use_nemo_gym": True},
            {"policy.generation.val_top_p": 0.9, "env.should_use_nemo_gym": True},
        ),
    ],
    "GM327": [
        ({"grpo.batch_multiplier": 2}, {"grpo.batch_multiplier": 1.0}),
        ({"grpo.batch_multiplier": 2}, {"grpo.batch_multiplier": 2, RESAMPLED: True}),
    ],
    "GM328": [
        ({**ASYNC, RESAMPLED: True}, {RESAMPLED: True}),
        ({**ASYNC, "data.use_multiple_dataloader": True}, ASYNC),
        (
            {ASYNC_PPO: True, "ppo.max_num_epochs": -1, "ppo.reward_shaping.enabled": True},
            {ASYNC_PPO: True, "ppo.max_num_epochs": -1},
        ),
        ({ASYNC_PPO: True}, {ASYNC_PPO: False}),
        (
            {ASYNC_PPO: True, "ppo.max_num_epochs": -1, FORCED: True},
            {ASYNC_PPO: True, "ppo.max_num_epochs": -1, FORCED: False},
        ),
    ],
    "GM329": [
        ({**CARDS, f"{VLLM}.tensor_parallel_size": 3}, {**CARDS, f"{VLLM}.tensor_parallel_size": 4}),
        ({**CARDS, **APART, f"{VLLM}.tensor_parallel_size": 16}, {**CARDS, f"{VLLM}.tensor_parallel_size": 16}),
        ({f"{VLLM}.pipeline_parallel_size": 2}, {f"{VLLM}.pipeline_parallel_size": 2, f"{VLLM}.async_engine": True}),
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
        ({**CARDS, PACKING: False, MICROBATCH: 3}, {**CARDS, MICROBATCH: 3}),
        ({**CARDS, PACKING: False, MICROBATCH: 3}, {**CARDS, PACKING: False}),
    ],
    "GM333": [
        (SINGLE, SINGLE_FITS),
        ({**SINGLE_FITS, "async_rl.min_groups_for_streaming_train": 64}, SINGLE_FITS),
        ({**SINGLE_FITS, **SAVED, METRIC: "val:accuracy"}, {**SINGLE_FITS, **SAVED, METRIC: "train:loss"}),
    ],
    "GM334": [
        ({**DTENSOR_CP, PACKING: True}, {**DTENSOR_CP, PACKING: False}),
        ({**DTENSOR_CP, PACKING: True}, {CP: 2, PACKING: True}),
        (
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 1, "policy.dtensor_cfg.sequence_parallel": True},
        ),
        (
            {**DTENSOR_CP, PACKING: False, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
            {**DTENSOR, DTENSOR_TP: 2, "policy.dtensor_cfg.sequence_parallel": True},
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
    "GM338": [
        ({**SAVED, METRIC: "val_reward"}, {**SAVED, METRIC: "val:accuracy"}),
        ({**SAVED, **VALIDATED, METRIC: "val:reward"}, {**SAVED, **VALIDATED, METRIC: "train:reward"}),
        ({**SAVED, METRIC: "val_reward"}, {METRIC: "val_reward"}),
    ],
    "GM339": [
        ({BATCH: 0}, {BATCH: 128}),
        ({SAVE_PERIOD: 0}, {SAVE_PERIOD: 1}),
        ({RATE: -1e-6}, {RATE: 0.0}),
        ({**VALIDATED, "grpo.val_batch_size": 0}, {"grpo.val_period": 0, "grpo.val_batch_size": 0}),
        ({BATCH: 0}, {BATCH: 0, "lab.num_threads": 1}),
    ],
    "GM410": [
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
    "GM341": [({RATE: 1e-6, MIN_RATE: 2e-6}, {RATE: 1e-6, MIN_RATE: 1e-6})],
    "GM342": [
        (
            {"policy.precision": "float16", f"{OPTIMIZER}.fp16": False},
            {"policy.precision": "float16", f"{OPTIMIZER}.fp16": True},
        ),
        ({f"{OPTIMIZER}.bf16": False}, {f"{OPTIMIZER}.bf16": True}),
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
    ],
}
# For a quick look, the first pair of each rule.
PAIRS = [
    pytest.param(rule, *pair, id=f"{rule}-{index}", marks=pytest.mark.slow if index else ())
    for rule, pairs in CASES.items()
    for index, pair in enumerate(pairs)
]


def changed(changes, base=CLEAN):
    data = copy.deepcopy(base)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return data


@pytest.fixture
def findings(tmp_path, monkeypatch):
    """Findings, in order, in CLEAN with changes; without a NeMo-RL unless ``reads`` says what one reads."""

    def find(changes, *, ignore=(), header=""):
        changes = dict(changes)
        reads, gpu, kl = changes.pop("reads", None), changes.pop("gpu", None), changes.pop("kl", 1e-3)
        megatron = changes.pop("megatron", "")
        # What a checkout has is cached by its path.
        folder = tmp_path / ("RL" if not (tmp_path / "RL").exists() else f"RL{len(list(tmp_path.iterdir()))}")
        root = checkout(folder, reads, changes.pop("classes", ""), megatron) if reads else None
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        if inherited := changes.pop("inherited", None):
            (tmp_path / "parent.yaml").write_text(written(changed(inherited, {})), encoding="utf-8")
            header += "defaults: parent.yaml\n"
        path = tmp_path / "recipe.yaml"
        path.write_text(header + written(changed(changes)), encoding="utf-8")
        recipe = read_recipe(path, leave=("data",))
        return check(RecipeFacts.from_recipe(recipe, mismatch_kl=kl, gpu=gpu), ignore=ignore).findings

    return find


def written(data) -> str:
    """As YAML, by libyaml where there is one: it is written hundreds of times."""
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def checkout(root: Path, reads, classes: str = "", megatron: str = "") -> Path:
    """As much of a NeMo-RL checkout as the rules look at.

    ``classes`` are those of its configuration, ``megatron`` is what its Megatron-LM's ``layers.py`` says.
    """
    shutil.rmtree(root, ignore_errors=True)
    layers = root / "3rdparty/Megatron-LM-workspace/Megatron-LM/megatron/core/tensor_parallel/layers.py"
    if megatron:
        layers.parent.mkdir(parents=True)
        layers.write_text(megatron)
    if classes:
        for module, start in (
            ("algorithms/grpo.py", 0),
            ("models/policy/__init__.py", classes.index("class PolicyConfig")),
        ):
            path = root / "nemo_rl" / module
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(classes[start:])
    for key, (module, word) in SETTING_READERS.items():
        path = root / "nemo_rl" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(text + (f"{word}\n" if reads[key] else "nothing\n"))
    configs = root / "examples" / "configs"
    configs.mkdir(parents=True)
    known = {PADDING: 1, "policy.router_replay.enabled": False, "policy.generation.bad_words": [], "value_loss_fn": {}}
    (configs / "grpo.yaml").write_text(written({"defaults": "base.yaml", **changed(known)}))
    return root


def test_every_rule_has_a_case_and_a_number_of_its_own():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    assert not set(ids) - set(CASES), "give these rules a pair in CASES: a recipe that fires, one that does not"
    assert not set(CASES) - set(ids), "no rule has these ids"


def test_the_base_of_the_cases_is_clean(findings):
    assert findings({"gpu": "H100", "reads": NEWEST}) == ()


@pytest.mark.parametrize(("rule", "fires", "silent"), PAIRS)
def test_rule_fires_there_and_not_here(rule, fires, silent, findings):
    hits = [finding for finding in findings(fires) if finding.rule.id == rule]
    assert hits, f"{rule} did not fire"
    for hit in hits:
        # The place is the key's own, or that of a section around it.
        assert hit.origin is None or hit.origin.line is not None
        assert len(hit.message) > 30
    assert rule not in [finding.rule.id for finding in findings(silent)]


def test_a_single_controller_that_reads_a_switch_does_not_ignore_it(findings, tmp_path):
    changes = {**SINGLE_FITS, "grpo.overlong_filtering": True, "reads": NEWEST}
    assert "GM225" not in [finding.rule.id for finding in findings(changes)]  # has no single controller
    algorithms = tmp_path / "RL/nemo_rl/algorithms"
    (algorithms / "single_controller_utils").mkdir(parents=True)
    for text, fires in (("", True), ("if config.grpo.overlong_filtering:\n    pass\n", False)):
        (algorithms / "single_controller.py").write_text("class SingleController:\n    pass\n")
        (algorithms / "single_controller_utils" / "setup.py").write_text(text)
        facts_of = RecipeFacts.from_recipe(read_recipe(tmp_path / "recipe.yaml", leave=("data",)))
        assert ("GM225" in [finding.rule.id for finding in check(facts_of).findings]) == fires


def test_a_length_penalty_is_moved_to_where_responses_end(findings):
    changes = {"grpo.reward_shaping.enabled": True, **SHAPED, "policy.generation.max_new_tokens": 512}
    (hit,) = (finding for finding in findings(changes) if finding.rule.id == "GM410")
    assert "begins at 1024 tokens" in hit.message
    assert hit.message.endswith("so it never applies; set 512")
    (hit,) = (
        finding
        for finding in findings({**changes, "grpo.reward_shaping.overlong_buffer_length": 600})
        if finding.rule.id == "GM410"
    )
    assert hit.message.endswith("set 512, and overlong_buffer_length: 128 or so")


@pytest.mark.parametrize(
    ("after", "fires"), [("", True), ("        self.checkpoint_manager.load_checkpoint(model=self.model)\n", False)]
)
def test_a_reference_copied_before_the_checkpoint_is_loaded_is_right(after, fires, findings, tmp_path):
    root = tmp_path / "RL"
    changes = {**V2, **KL, **SAVED, "reads": NEWEST}
    assert "GM209" not in [finding.rule.id for finding in findings(changes)]  # has no such worker
    worker = root / "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py"
    source = f"class W:\n    def __init__(self):\n        x = setup_reference_model_state(self.model)\n{after}"
    source += "\n    def load(self):\n        self.load_checkpoint()\n"
    worker.parent.mkdir(parents=True)
    worker.write_text(source)
    facts_of = RecipeFacts.from_recipe(read_recipe(tmp_path / "recipe.yaml", leave=("data",)))
    assert ("GM209" in [finding.rule.id for finding in check(facts_of).findings]) == fires


def test_half_precision_logits_are_named_where_they_halve_the_memory(findings):
    def message(changes):
        return next(finding.message for finding in findings(changes) if finding.rule.id == "GM408")

    wide = {TRAINED: 16_000, GEOMASK: "geomask"}
    halved = "policy.megatron_cfg.defer_fp32_logits: true takes 8.21 GB"
    assert halved in message(wide)
    assert "takes 16.4 GB" in message(wide)
    # GM101 says why not.
    assert "defer_fp32_logits" not in message({**wide, TEMPERATURE: 0.7})
    scoring = message({TRAINED: 4000, SCORED: 16_000})
    assert "a scoring microbatch of 16000 rows by 128256 columns has logits of 8.21 GB" in scoring
    assert "logprob_chunk_size" not in scoring


def test_errors_come_first(findings):
    severities = [
        finding.rule.severity for finding in findings({**MOE, REPLAY: True, BATCH: 100, "policy.precision": "float16"})
    ]
    assert severities == ["error", "warning", "note"]


def test_an_invalid_setting_of_the_loss_hides_no_other_rule(findings):
    found = findings({"loss_fn.ratio_clip_mim": 0.1, "loss_fn.zzz": 1, BATCH: 100, MASKS: [GEOMETRIC, GEOMETRIC]})
    assert [(finding.rule.id, finding.key) for finding in found] == [
        ("GM001", "loss_fn.ratio_clip_mim"),
        ("GM001", "loss_fn.zzz"),
        ("GM306", BATCH),
        ("GM202", "loss_fn.masks[1]"),
    ]
    assert "did you mean 'ratio_clip_min'?" in found[0].message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # What follows from an invalid setting, or from one that was probably meant, is not reported.
        ({**ASYNC, "loss_fn.use_importance_sampling_correction": "maybe"}, {"GM001"}),
        ({"loss_fn.use_importance_sampling_corection": True, **ASYNC, CORRECT: False}, {"GM001"}),
        ({MASKS: [{"preset": "geometirc"}, GEOMETRIC, GEOMETRIC], TP: 4, SCORING: 8}, {"GM001", "GM307"}),
        ({"loss_fn.name": "gsppo", "loss_fn.ratio_clip_max": 1.2, TP: 4, SCORING: 8}, {"GM001", "GM307"}),
        ({"loss_fn": "gspo", BATCH: 100}, {"GM001", "GM306"}),
        ({"loss_fn": None, BATCH: 100}, {"GM001", "GM306"}),
        # A contradiction removes both settings.
        ({LEVEL: "sequence", BATCH: 100}, {"GM001", "GM306"}),
    ],
)
def test_rules_are_checked_without_what_is_invalid(changes, expected, findings):
    assert {finding.rule.id for finding in findings(changes)} == expected


def test_a_way_out_is_one_that_the_objective_allows(findings):
    def message(name):
        changes = {"loss_fn.name": name, TP: 4, SCORING: 8}
        return next(finding.message for finding in findings(changes) if finding.rule.id == "GM307")

    assert "set force_on_policy_ratio: true" in message("clipped_pg")
    assert "force_on_policy_ratio" not in message("gspo")


def test_bounds_beyond_reach_on_one_side_are_not_said_to_remove_nothing(findings):
    def message(low, high):
        mask = {"preset": "geometric", "min": low, "max": high}
        return next(finding.message for finding in findings({MASKS: [mask]}) if finding.rule.id == "GM201")

    assert "removes nothing" in message(0.5, 2.0)
    for low, high in ((1.5, 3.0), (0.1, 0.5)):
        assert "keeps only means that no working run has" in message(low, high)


class TestMisplacedKeys:
    """Keys in a section that NeMo-RL's classes declare, but that has no such key."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"policy.num_prompts_per_step": 8}, "did you mean grpo.num_prompts_per_step?"),
            ({"policy.masks": []}, "did you mean loss_fn.masks?"),
            ({"policy.learning_speed": 1}, "nothing in its source reads such a name"),
            ({"policy.read_elsewhere": 1}, None),
            ({"grpo.anything_goes": 1}, None),
        ],
    )
    def test_a_misplaced_key_is_named_with_its_place_if_it_has_one(self, changes, message, findings):
        classes = f"{CLASSES}\nconfig['policy']['read_elsewhere']\n"
        found = [each for each in findings({**changes, "reads": NEWEST, "classes": classes}) if each.rule.id == "GM006"]
        assert [each.key for each in found] == (list(changes) if message else [])
        assert all(message in each.message for each in found)

    def test_of_thousands_the_rest_are_counted(self, findings):
        changes = {f"policy.learning_speed_{i}": 1 for i in range(2000)}
        found = [each for each in findings({**changes, "reads": NEWEST, "classes": CLASSES}) if each.rule.id == "GM006"]
        assert len(found) == 101
        assert sum("the 1,899 unknown ones after it" in each.message for each in found) == 1


def test_a_plugin_that_fails_in_several_lines_is_one_finding_about_the_name(findings, tmp_path, monkeypatch):
    (tmp_path / "noisy_loss.py").write_text(
        "raise ImportError('first\\nloss_fn.ratio_clip_min: greater than 0\\nlast')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = findings({"loss_fn.name": "noisy_loss:LOSS", "loss_fn.ratio_clip_min": 0.2})
    assert (found.rule.id, found.key) == ("GM001", "loss_fn.name")
    assert "ImportError: first loss_fn.ratio_clip_min: greater than 0 last" in found.message


def test_masks_are_counted_as_the_recipe_writes_them(findings):
    product = {"preset": "product", "min": 0.5, "max": 2.0}
    (found,) = findings({"loss_fn.name": "dppo", MASKS: [product]})
    assert (found.rule.id, found.key) == ("GM402", "loss_fn.masks[0]")


def test_a_doubt_about_a_clip_bound_is_not_said_again(findings):
    gspo = {"loss_fn.name": "gspo", "loss_fn.token_level_loss": False, "loss_fn.ratio_clip_max": 0.2}
    gspo["loss_fn.ratio_clip_min"] = 3e-4
    assert [found.rule.id for found in findings(gspo)] == ["GM002"]
    assert [found.rule.id for found in findings({**gspo, "loss_fn.ratio_clip_max": 0.3})] == ["GM204"]


def test_problems_between_settings_are_put_at_one_that_was_given(findings):
    (found,) = findings({"loss_fn.name": "gspo", "loss_fn.token_level_loss": True})
    assert found.key == "loss_fn.token_level_loss"
    (found,) = findings({LEVEL: "sequence"})
    assert found.key == LEVEL
    (found,) = findings({"loss_fn.name": "gsppo"})
    assert (found.key, "did you mean 'gspo'?" in found.message) == ("loss_fn.name", True)


class TestPlaceOfAContradiction:
    """At the setting nearest the user: an override, the recipe's own file, its parents, NeMo-RL's files."""

    BASE = "loss_fn:\n  token_level_loss: true\n  sequence_level_importance_ratios: false\n  ratio_clip_min: 0.2\n"

    @pytest.fixture
    def find(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        (root / "examples" / "configs" / "base.yaml").write_text(self.BASE, encoding="utf-8")

        def find(own, *overrides, parent="", rules=("GM001",)):
            (tmp_path / "parent.yaml").write_text(f"defaults: RL/examples/configs/base.yaml\n{parent}")
            path = tmp_path / "recipe.yaml"
            path.write_text(f"defaults: [parent.yaml, RL/examples/configs/base.yaml]\n{own}", encoding="utf-8")
            recipe = read_recipe(path, overrides)
            found = check(RecipeFacts.from_recipe(recipe)).findings
            return [
                (finding.key.removeprefix("loss_fn."), Path(finding.origin.where).name, finding.origin.line)
                for finding in found
                if finding.rule.id in rules
            ]

        return find

    def test_not_at_a_line_of_nemo_rls(self, find):
        own = "loss_fn:\n  name: clipped_pg\n  use_cispo: true\n  loss_normalization: constant\n"
        assert find(own) == [
            ("loss_normalization", "recipe.yaml", 5),
            ("loss_normalization", "recipe.yaml", 5),
            ("use_cispo", "recipe.yaml", 4),
        ]

    def test_what_a_variant_implies_is_at_its_name(self, find):
        assert find("loss_fn:\n  name: gspo\n") == [("name", "recipe.yaml", 3)]
        assert find("", parent="loss_fn: {name: gspo}\n") == [("name", "parent.yaml", 2)]

    def test_an_inherited_value_that_the_variant_gives_otherwise_is_a_warning_at_its_name(self, find):
        own = "loss_fn:\n  name: gspo\n  token_level_loss: false\n"
        assert find(own) == []
        assert find(own, rules=("GM002",)) == [("name", "recipe.yaml", 3)]

    def test_the_own_file_before_a_parent_and_an_override_before_both(self, find):
        own, parent = (
            "loss_fn:\n  is_correction_level: token\n",
            "loss_fn:\n  use_importance_sampling_correction: false\n",
        )
        assert find(own, parent=parent) == [("is_correction_level", "recipe.yaml", 3)]
        assert find(parent, parent=own) == [("use_importance_sampling_correction", "recipe.yaml", 3)]
        override = "loss_fn.use_importance_sampling_correction=false"
        assert find(own, override, parent=parent) == [("use_importance_sampling_correction", override, None)]

    def test_what_nobody_wrote_is_at_what_somebody_did(self, find):
        assert find("loss_fn:\n  loss_normalization_constant: 8.0\n") == [
            ("loss_normalization_constant", "recipe.yaml", 3)
        ]


class TestUnknownKeys:
    def test_an_override_counts_at_whatever_depth(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(CLEAN), encoding="utf-8")
        for override, key in {
            "++lossfn.name=gspo": "lossfn",
            "++polcy={model_name: x}": "polcy",
            "++policy.generation={temprature: 1.0}": "policy.generation.temprature",
        }.items():
            recipe = read_recipe(path, [override])
            (found,) = check(RecipeFacts(recipe, None)).findings
            assert (found.key, str(found.origin)) == (key, f"override '{override}'")

    def test_what_nemo_rls_own_parents_have_is_known(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        parent = root / "examples" / "configs" / "recipes" / "parent.yaml"
        parent.parent.mkdir()
        parent.write_text("rare: {x: 1}\npolicy: {train_micro_batch_siz: 1}\n", encoding="utf-8")
        path = tmp_path / "recipe.yaml"
        own = "rare: {x: 2}\npolicy: {train_micro_batch_siz: 2, megatron_cfg: {enabled: true}}\n"
        path.write_text(f"defaults: {parent}\n{own}", encoding="utf-8")
        assert check(RecipeFacts(read_recipe(path), None)).findings == ()
        path.write_text(own, encoding="utf-8")
        assert [found.rule.id for found in check(RecipeFacts(read_recipe(path), None)).findings] == ["GM005", "GM006"]

    def test_the_examples_are_only_read_for_a_key_that_is_declared_nowhere(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST, CLASSES)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        broken = root / "examples" / "configs" / "broken.yaml"
        broken.write_text("a: [", encoding="utf-8")
        path = tmp_path / "recipe.yaml"
        own = "grpo: {}\nloss_fn: {name: gspo}\npolicy: {train_micro_batch_size: 1, precision: a, names: [a, b]"
        path.write_text(f"{own}}}\n", encoding="utf-8")
        check(RecipeFacts(read_recipe(path), None))
        path.write_text(f"{own}, other: 1}}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"broken.yaml: not valid YAML"):
            check(RecipeFacts(read_recipe(path), None))


def test_ignored_on_request_or_by_comment(findings):
    assert findings(MOE)
    assert not findings(MOE, ignore=["gm108"])
    assert not findings(MOE, header="# nemo-geomask: ignore GM401, GM108 (as planned)\n")
    assert not findings(MOE, header="# nemo_geomask: ignore GM108\n")
    assert not findings(MOE, header="# nemo-geomask ignore GM108\n")
    # Prose.
    assert findings(MOE, header="# nemo_geomask's GM108\n# nemo-geomask ignores GM108\n")
    assert not findings(
        {**MOE, TP: 2, SCORING: 8}, header="# nemo-geomask: ignore GM108\n# nemo-geomask: ignore GM404\n"
    )


@pytest.mark.parametrize(
    ("header", "ignore", "message"),
    [
        ("", ["GM999"], "--ignore: there is no rule GM999; see nemo-geomask check --list-rules"),
        ("", ["GM10"], "there is no rule GM10; see nemo-geomask check --list-rules"),
        ("", ["GM-108"], "there is no rule GM-108; did you mean GM108"),
        ("", ["108"], "did you mean GM108"),
        ("", ["GM001"], "GM001 .* can't be ignored"),
        ("\n# nemo-geomask: ignore GM998\n", [], r"recipe.yaml:2: .*there is no rule GM998"),
        ("# nemo-geomask: ignore everything\n", [], "there is no rule everything"),
        ("# nemo-geomask: ignore\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
        ("# nemo_geomask: ignore\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
        ("# nemo-geomask: skip GM101\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
    ],
)
def test_an_ignore_that_means_nothing_is_an_error(header, ignore, message, findings):
    with pytest.raises(ConfigError, match=message):
        findings({}, header=header, ignore=ignore)


def test_values_of_a_wrong_type_stop_no_rule(findings):
    wrong = {TEMPERATURE: "hot", TOP_P: [1], BATCH: "many", TP: None, "policy.generation.vllm_cfg": "none", "grpo": 3}
    assert [finding.rule.id for finding in findings(wrong)] == []


def test_nemo_rls_own_fields_are_the_ones_the_schema_takes_from_it():
    own = {
        name
        for name, field in LossConfig.model_fields.items()
        if str(field.json_schema_extra["source"]).split(";")[0] == "NeMo-RL"
    }
    assert own == LOSS_FIELDS


@pytest.mark.slow
class TestExpectation:
    """The closed forms against simulated sequences."""

    @pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean", "sequence_max"])
    @pytest.mark.parametrize("statistic", ["ratio", "k2", "k3"])
    def test_every_rule_on_log_ratios(self, level, statistic):
        kl, tokens, rows = 4e-3, 256, 6000
        draw = torch.Generator().manual_seed(2)
        ratios = -kl + math.sqrt(2 * kl) * torch.randn(rows, tokens, generator=draw, dtype=torch.float64)
        values = {"ratio": ratios, "k2": ratios.square() / 2, "k3": ratios.expm1() - ratios}[statistic]
        pooled = {"token": values, "sequence": values.sum(-1), "sequence_mean": values.mean(-1)}.get(level)
        if pooled is None:
            # All tokens inside.
            low = torch.quantile(values.amin(-1), 0.4) if statistic == "ratio" else torch.tensor(-math.inf)
            high = torch.quantile(values.amax(-1), 0.7)
            kept = ((values >= low) & (values <= high)).all(-1).double().mean()
        else:
            low, high = (torch.quantile(pooled.flatten()[:100_000], share) for share in (0.1, 0.7))
            kept = ((pooled >= low) & (pooled <= high)).double().mean()
        rule = MaskRule("m", "total", level, statistic, float(low), float(high), "always")
        assert kept_fraction(rule, kl, tokens) == pytest.approx(float(kept), abs=0.03)

    def test_what_depends_on_more_is_not_judged(self):
        def share(log_ratio="mismatch", level="token", statistic="ratio", when="always"):
            return kept_fraction(MaskRule("m", log_ratio, level, statistic, -1.0, 1.0, when), 1e-3, 100)

        assert share() == pytest.approx(1.0)
        for other in (
            {"log_ratio": "policy"},
            {"statistic": "prob_diff"},
            {"when": "pushing"},
            {"level": "prefix_sum"},
        ):
            assert share(**other) is None
        (m2po,) = LossConfig(masks=[{"preset": "m2po", "tau": 0.04}]).mask_rules
        assert kept_fraction(m2po, 1e-3, 100) is None

    @pytest.mark.parametrize(("kl", "tokens"), [(1e-3, 500), (1e-3, 4000), (2e-2, 100)])
    def test_the_median_weight_is_that_of_simulated_sequences(self, kl, tokens):
        draw = torch.Generator().manual_seed(0)
        ratios = -kl + math.sqrt(2 * kl) * torch.randn(4000, tokens, generator=draw, dtype=torch.float64)
        assert float(ratios.exp().mean()) == pytest.approx(1, abs=2e-3)
        assert float(ratios.expm1().sub(ratios).mean()) == pytest.approx(kl, rel=0.02)
        weight = ratios.sum(-1).exp()
        assert median_weight(kl, tokens) == pytest.approx(float(weight.median()), rel=0.1)

    @pytest.mark.parametrize(("kl", "tokens"), [(1e-3, 1000), (1e-3, 200), (1e-6, 1000)])
    def test_clipped_fractions_are_those_of_simulated_sequences(self, kl, tokens):
        draw = torch.Generator().manual_seed(3)
        means = (-kl + math.sqrt(2 * kl) * torch.randn(4000, tokens, generator=draw, dtype=torch.float64)).mean(-1)
        config = LossConfig(name="gspo", ratio_clip_min=3e-4, ratio_clip_max=4e-4)
        found = [float((means.exp() < 1 - 3e-4).double().mean()), float((means.exp() > 1 + 4e-4).double().mean())]
        assert clipped_fractions(config, kl, tokens) == pytest.approx(found, abs=0.02)


def test_a_nemo_rl_that_merges_adapters_of_experts_is_recognised(tmp_path):
    worker = tmp_path / "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("if not isinstance(module, LinearLoRA):\n    pass\n", encoding="utf-8")
    assert not merges_expert_adapters(None)
    assert not merges_expert_adapters(tmp_path)
    fixed = tmp_path / "fixed" / worker.relative_to(tmp_path)
    fixed.parent.mkdir(parents=True)
    fixed.write_text("gate_and_up = module.lora_gate_and_up_A\n", encoding="utf-8")
    assert merges_expert_adapters(tmp_path / "fixed")


@pytest.mark.parametrize(("estimator", "fires"), [("k1", True), ("k2", False), ("k3", False)])
@pytest.mark.parametrize("name", [None, "clipped_pg"])
def test_without_a_score_function_the_kl_by_k1_has_no_gradient(findings, tmp_path, monkeypatch, estimator, fires, name):
    """In NeMo-RL v0.6.0; there k2, of which the rule warns elsewhere, has the KL's gradient."""
    utils = tmp_path / "old" / "nemo_rl" / "algorithms" / "utils.py"
    utils.parent.mkdir(parents=True)
    utils.write_text("def calculate_kl(): ...\n", encoding="utf-8")
    data = changed({**KL, KL_TYPE: estimator, "loss_fn.name": name, "loss_fn.ratio_clip_c": None})
    path = tmp_path / "recipe.yaml"
    path.write_text(written(data), encoding="utf-8")
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: tmp_path / "old")
    found = check(RecipeFacts.from_recipe(read_recipe(path, leave=("data",)))).findings
    messages = [finding.message for finding in found if finding.rule.id == "GM207"]
    if name is None:
        assert bool(messages) == fires
        assert all("differentiates curr - ref without the score function" in message for message in messages)
    else:
        assert bool(messages) == (estimator == "k2")


def test_rules_for_other_algorithms_are_said_to_be_unchecked(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(written({**changed({BATCH: 0}, {"dpo": {}, "policy": {}})}), encoding="utf-8")
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "GM339 policy.train_global_batch_size" in out
    assert re.search(r"not checked: \d+ of \d+ rules, which are about GRPO and PPO; this recipe trains DPO", out)
