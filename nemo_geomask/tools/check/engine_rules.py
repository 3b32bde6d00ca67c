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
        f"as the responses to one prompt do; set {key}: true",
    )


@rule("GM107", "warning", "NeMo-RL docs/fp8.md")
def _quantised_rollouts(facts: RecipeFacts) -> Iterator[Hit]:
    """Quantised rollouts without a correction."""
    if facts.config.corrects_mismatch or facts.config.masks:
        return
    keys = [f"{_VLLM_KWARGS}.quantization"]
    # With policy.quant_cfg, training is quantised as well.
    keys += [] if facts.get("policy.quant_cfg") else ["policy.generation.quant_cfg"]
    for key in keys:
        if value := facts.get(key):
            yield Hit(
                key,
                f"{value}: rollouts are quantised and training is not, but nothing corrects the mismatch; set "
                "loss_fn.use_importance_sampling_correction: true, and add a mask for what a weight can't correct",
            )


@rule("GM112", "warning", "NeMo-RL docs/adding-new-models.md; arXiv:2510.26788")
def _different_precision(facts: RecipeFacts) -> Iterator[Hit]:
    """Different precision in rollouts and training."""
    key = f"{_VLLM}.precision"
    training, sampling = facts.get("policy.precision"), facts.get(key)
    if facts.uses_vllm and training and sampling and sampling not in (training, "auto", "fp8"):
        yield Hit(
            key,
            f"{sampling}, but policy.precision: {training}, which makes every token's log-probs differ; set both to "
            "the same format",
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
            f"may use another expert than sampling did; set {_ROUTER_REPLAY}: true",
        )
    elif not (facts.config.corrects_mismatch or facts.config.masks):
        yield Hit(
            _ROUTER_REPLAY,
            f"{model}; this NeMo-RL has no router replay for these engines, and nothing corrects routes that differ; "
            "set loss_fn.use_importance_sampling_correction: true, and add a mask",
        )


@rule("GM109", "warning", "NeMo-RL examples/configs/grpo_math_1B.yaml; https://github.com/NVIDIA-NeMo/RL/pull/3169")
def _balancing_loss(facts: RecipeFacts) -> Iterator[Hit]:
    """Router trained with a load-balancing loss."""
    key = "policy.megatron_cfg.moe_router_load_balancing_type"
    value = facts.get(key, "none")
    balancing_types = set(value if isinstance(value, list) else [value]) - {"none"}
    if facts.moe_key and facts.uses_megatron and balancing_types:
        yield Hit(
            key,
            f"{value}: under GRPO, the auxiliary loss drives the log-probs of training and generation apart; set none",
        )


@rule("GM113", "note", "NeMo-RL examples/configs/grpo_math_1B.yaml")
def _balancing_bias(facts: RecipeFacts) -> Iterator[Hit]:
    """Router biases updated by expert load."""
    key = "policy.megatron_cfg.moe_router_bias_update_rate"
    if facts.moe_key and facts.uses_megatron and facts.number(key):
        yield Hit(
            key,
            f"{facts.get(key)}: the router's biases follow the load of the experts, not the gradient. Until the next "
            "weight update they change in the training engine only; set 0.0, NeMo-RL's default for GRPO",
        )


@rule("GM110", "note", "NeMo-RL docs/guides/async-grpo.md")
def _stale_kv_cache(facts: RecipeFacts) -> Iterator[Hit]:
    """Weights updated during a response without recomputing the KV cache."""
    section = f"{facts.algorithm}.async_{facts.algorithm}"
    key = f"{section}.recompute_kv_cache_after_weight_updates"
    if facts.is_async and facts.is_true(f"{section}.in_flight_weight_updates") and not facts.is_true(key):
        yield Hit(
            key,
            "false: with in_flight_weight_updates: true, several policies sample parts of one response. Each reads "
            "keys and values that earlier policies computed, so generation_logprobs belong to no single policy; set "
            "true",
        )


@rule("GM111", "note", "NeMo-RL `pad_and_align_routed_expert_indices`; grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3.yaml")
def _routes_lost_to_prefix_cache(facts: RecipeFacts) -> Iterator[Hit]:
    """Router replay with prefix caching."""
    key = f"{_VLLM}.enable_prefix_caching"
    if facts.is_true(_ROUTER_REPLAY) and facts.get(key) is not False:
        yield Hit(
            key,
            "with router replay, vLLM may return no routes for prompts from the prefix cache, and the trainer then "
            "routes them by itself; add enable_prefix_caching: false, so that all routes are returned",
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


@rule("GM116", "note", "NeMo-RL docs/guides/lora.md, issue 3696, pull requests 1797 and 1889")
def _rounded_adapter(facts: RecipeFacts) -> Iterator[Hit]:
    """LoRA whose merged weights are rounded, without a correction."""
    precision = facts.get("policy.precision")
    if facts.config.corrects_mismatch or facts.config.masks or precision == "float32":
        return
    keys = [f"{_LORA}.enabled"] if _uses_dtensor_lora(facts) else []
    keys += ["policy.megatron_cfg.peft.enabled"] if facts.uses_megatron else []
    for key in keys:
        if facts.is_true(key):
            yield Hit(
                key,
                f"true: the trainer keeps the adapter apart, but a refit adds it to the weights and rounds the sum to "
                f"{precision}; the sampler loses what is smaller than a weight's rounding, and nothing corrects the "
                "difference. Set loss_fn.use_importance_sampling_correction: true, or add a mask",
            )
