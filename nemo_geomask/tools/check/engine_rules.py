"""Settings of engines, precision, routing and adapters that cause mismatch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.facts import loads_moe_in_bfloat16, merges_expert_adapters, reads_setting
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_RUNS_FLASH_ATTENTION_2 = {
    **dict.fromkeys(("a2", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "a4000", "a5000", "a6000"), True),
    **dict.fromkeys(("l4", "l20", "l40", "l40s", "rtx"), True),
    **dict.fromkeys(("h20", "h100", "h200", "h800", "gh200"), False),
    **dict.fromkeys(("b100", "b200", "b300", "gb200", "gb300"), False),
}
"""True for the names of GPUs on which vLLM runs FlashAttention-2, those of compute capability 8; else False."""

_ROUTER_REPLAY = "policy.router_replay.enabled"
_VLLM = "policy.generation.vllm_cfg"
_AUTOMODEL = "policy.dtensor_cfg.automodel_kwargs"
_VLLM_KWARGS = "policy.generation.vllm_kwargs"
_LORA = "policy.dtensor_cfg.lora_cfg"
_EXPERTS = "model.layers.0.mlp.experts"  # the name of grouped experts in Automodel's models


@rule(
    "GM106",
    "warning",
    "https://github.com/vllm-project/flash-attention/pull/87; https://github.com/vllm-project/vllm/issues/22103",
    needs=("gpu",),
)
def _cascade_attention(facts: RecipeFacts) -> Iterator[Hit]:
    """vLLM cascade attention on a GPU that runs FlashAttention-2, such as A100 and L20."""
    key = f"{_VLLM_KWARGS}.disable_cascade_attn"
    names = [word for word in re.split(r"[\s_-]+", (facts.gpu or "").lower()) if word in _RUNS_FLASH_ATTENTION_2]
    if not names:
        raise ConfigError(
            f"--gpu: '{facts.gpu}' is not known; choose from {', '.join(_RUNS_FLASH_ATTENTION_2).upper()}"
        )
    if not facts.uses_vllm or facts.is_true(key) or not _RUNS_FLASH_ATTENTION_2[names[0]]:
        return
    yield Hit(
        key,
        f"on {facts.gpu}, vLLM runs FlashAttention-2, whose split-kv kernel returned a wrong log-sum-exp to cascade "
        "attention; until vLLM's pull request 36318, cascade attention is on by default where prompts share a prefix, "
        "as the responses to one prompt do",
        fix={key: True},
    )


@rule("GM114", "warning", "NeMo-RL issue 2322")
def _moe_without_master_weights(facts: RecipeFacts) -> Iterator[Hit]:
    """Mixture of experts without float32 weights."""
    key, optimizer = "policy.optimizer.name", str(facts.get("policy.optimizer.name"))
    uses_v2 = facts.uses_dtensor and facts.is_true("policy.dtensor_cfg._v2")
    is_automodel_class = facts.moe_key is not None and not facts.is_true(f"{_AUTOMODEL}.force_hf")
    has_master_weights = facts.is_true("policy.optimizer.kwargs.master_weights")
    if not uses_v2 or not is_automodel_class or has_master_weights or not loads_moe_in_bfloat16(facts.nemo_rl):
        return
    precision = facts.get("policy.precision")
    yield Hit(
        key,
        f"{optimizer} keeps no float32 weights of its own, and under DTensor v2 Automodel loads a mixture of experts "
        f"in bfloat16{', whatever policy.precision says' if precision == 'float32' else ''}; at small learning rates "
        "most updates round to nothing. Use transformer_engine.pytorch.optimizers.fused_adam.FusedAdam with "
        f"kwargs.master_weights: true, or {_AUTOMODEL}.force_hf: true, or Megatron",
    )


@rule("GM108", "note", "NeMo-RL docs/guides/router-replay.md; R3, arXiv:2510.11370")
def _no_router_replay(facts: RecipeFacts) -> Iterator[Hit]:
    """Mixture of experts without router replay."""
    key = facts.moe_key
    if key is None or facts.is_true(_ROUTER_REPLAY):
        return
    model = f"{facts.get('policy.model_name')} is a mixture of experts (according to {key})"
    checkout = facts.nemo_rl
    if facts.uses_vllm and facts.uses_megatron and (checkout is None or reads_setting(checkout, _ROUTER_REPLAY)):
        yield Hit(
            _ROUTER_REPLAY,
            f"{model}. Each engine routes tokens by itself, so where two experts have almost the same score, training "
            "may use another expert than sampling did",
            fix={_ROUTER_REPLAY: True},
        )
    elif facts.is_uncorrected:
        yield Hit(
            _ROUTER_REPLAY,
            f"{model}; this NeMo-RL has no router replay for these engines, and nothing corrects routes that differ; "
            "{fix}, and add a mask",
            fix={"loss_fn.use_importance_sampling_correction": True},
        )


def _uses_dtensor_lora(facts: RecipeFacts) -> bool:
    return facts.uses_dtensor and facts.is_true(f"{_LORA}.enabled")


@rule(
    "GM115",
    "warning",
    "NeMo-RL `_maybe_merge_lora_weight`, pull request 3353; Automodel `apply_lora_to_linear_modules`",
)
def _experts_without_adapter(facts: RecipeFacts) -> Iterator[Hit]:
    """LoRA on experts whose adapters a refit leaves out."""
    key, patterns = f"{_LORA}.target_modules", facts.get(f"{_LORA}.target_modules") or []
    if not _uses_dtensor_lora(facts) or facts.moe_key is None or facts.is_true(f"{_AUTOMODEL}.force_hf"):
        return
    if facts.is_true(f"{_LORA}.match_all_linear") or merges_expert_adapters(facts.nemo_rl):
        return
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern == "experts" or fnmatchcase(_EXPERTS, str(pattern)):
            yield Hit(
                key,
                f"'{pattern}' puts LoRA on Automodel's grouped experts, but a refit merges only the adapters of linear "
                "layers: it sends the experts' weights without their adapter, and the adapter under names that the "
                f"sampler does not know. Leave the experts out of {key}, or set {_AUTOMODEL}.force_hf: true where the "
                "model's own class has linear experts",
            )


@rule("GM118", "warning", "docs/background/mismatch.md", applies_to_lab=False)
def _mismatch_with_luck(facts: RecipeFacts) -> Iterator[Hit]:
    """Low-precision rollouts of several turns, normalised over a group, without a weight on tokens."""
    config, estimator = facts.config, facts.get("grpo.adv_estimator.name", "grpo")
    low_precision = {f"{_VLLM}.precision": facts.get(f"{_VLLM}.precision") == "fp8"}
    low_precision[f"{_VLLM_KWARGS}.quantization"] = facts.get(f"{_VLLM_KWARGS}.quantization") is not None
    low_precision["policy.generation.quant_cfg"] = (
        facts.get("policy.generation.quant_cfg") is not None and facts.get("policy.quant_cfg") is None
    )
    keys = [key for key, is_low in low_precision.items() if is_low]
    has_turns = (facts.number("grpo.max_rollout_turns") or 1) > 1 or facts.is_true("env.should_use_nemo_gym")
    is_weighted = config.applies_weight and config.correction_level in ("token", "turn", "sequence")
    if facts.algorithm != "grpo" or estimator not in ("grpo", "gdpo") or not keys or not has_turns or is_weighted:
        return
    fix = {
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 2.0,
    }
    if not facts.trains_nemo_rl_loss:
        fix["loss_fn.is_correction_level"] = "token"
    yield Hit(
        keys[0],
        f"{facts.get(keys[0])}: what a tool or an environment replies tells of the reward before most of a response is "
        f"written, but the advantages of {estimator}, normalised over a group, don't know the reply, and so draw the "
        "policy towards the errors of a sampler in low precision, however small. First try a baseline that knows the "
        "reply (per turn, or a critic); else {fix}: a weight on tokens, since sequence_mean, a geometric mask and "
        "IcePop don't mend it",
        fix=fix,
    )
