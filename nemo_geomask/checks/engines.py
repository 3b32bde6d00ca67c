"""GM1, second part: engines, precision and routing that make the policies part."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.tree import reads
from nemo_geomask.errors import ConfigError

__all__ = ["RULES"]

# By name: whether vLLM runs FlashAttention-2 there, which it does on compute capability 8.
_GPUS = {
    **dict.fromkeys(("a2", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "a4000", "a5000", "a6000"), True),
    **dict.fromkeys(("l4", "l20", "l40", "l40s", "rtx"), True),
    **dict.fromkeys(("h20", "h100", "h200", "h800", "gh200"), False),
    **dict.fromkeys(("b100", "b200", "b300", "gb200", "gb300"), False),
}

_ROUTER_REPLAY = "policy.router_replay.enabled"
_VLLM = "policy.generation.vllm_cfg"
_VLLM_KWARGS = "policy.generation.vllm_kwargs"


def _cascade_attention(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_VLLM_KWARGS}.disable_cascade_attn"
    named = [word for word in re.split(r"[\s_-]+", (facts.gpu or "").lower()) if word in _GPUS]
    if not named:
        raise ConfigError(f"--gpu: '{facts.gpu}' is not known; known: {', '.join(_GPUS).upper()}")
    if not facts.vllm or facts.on(key) or not _GPUS[named[0]]:
        return
    yield Hit(
        key,
        f"on {facts.gpu}, vLLM runs FlashAttention-2, whose split-kv kernel returned a wrong log-sum-exp to cascade "
        "attention. The responses to one prompt share a prefix, which is what switches it on (by default, until vLLM's "
        f"pull request 36318); set {key}: true",
    )


def _quantised(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.config.corrects_mismatch or facts.config.masks:
        return
    keys = [f"{_VLLM_KWARGS}.quantization"]
    # Where training is quantised the same way, the two agree.
    keys += [] if facts.get("policy.quant_cfg") else ["policy.generation.quant_cfg"]
    for key in keys:
        if value := facts.get(key):
            yield Hit(
                key,
                f"{key.rpartition('.')[2]}: {value}: the rollouts are quantised and the training is not, but nothing "
                "corrects for it; set loss_fn.use_importance_sampling_correction: true, and a mask for what it can't "
                "correct",
            )


def _other_precision(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_VLLM}.precision"
    training, sampling = facts.get("policy.precision"), facts.get(key)
    if facts.vllm and training and sampling and sampling not in (training, "auto", "fp8"):
        yield Hit(
            key,
            f"precision: {sampling}, but policy.precision: {training}; sample in the format that is trained, or expect "
            "a mismatch in every token",
        )


def _no_router_replay(facts: RecipeFacts) -> Iterator[Hit]:
    key = facts.mixture_of_experts
    if key is None or facts.on(_ROUTER_REPLAY):
        return
    model = f"{facts.get('policy.model_name')} is a mixture of experts (by {key})"
    tree = facts.nemo_rl
    if facts.vllm and facts.megatron and (tree is None or reads(tree, _ROUTER_REPLAY)):
        yield Hit(
            _ROUTER_REPLAY,
            f"{model}, and each engine routes on its own: on a near-tie a token meets other experts than the ones "
            f"it was sampled with; set {_ROUTER_REPLAY}: true",
        )
    elif not (facts.config.corrects_mismatch or facts.config.masks):
        yield Hit(
            _ROUTER_REPLAY,
            f"{model}; there is no router replay for these engines in this NeMo-RL, and nothing corrects for routes "
            "that differ: set loss_fn.use_importance_sampling_correction: true, and a mask",
        )


def _balancing_loss(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.megatron_cfg.moe_router_load_balancing_type"
    kinds = facts.get(key, "none")
    balanced = set(kinds if isinstance(kinds, list) else [kinds]) - {"none"}
    if facts.mixture_of_experts and facts.megatron and balanced:
        yield Hit(
            key,
            f"moe_router_load_balancing_type: {kinds}: the auxiliary loss makes train and generation log-probs part "
            "under GRPO; set none",
        )


def _balancing_bias(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.megatron_cfg.moe_router_bias_update_rate"
    if facts.mixture_of_experts and facts.megatron and facts.number(key):
        yield Hit(
            key,
            f"moe_router_bias_update_rate: {facts.get(key)} moves the router by load, not by the gradient, and "
            "between weight updates on the training side only; NeMo-RL's default for GRPO is 0.0",
        )


def _mixed_cache(facts: RecipeFacts) -> Iterator[Hit]:
    section = f"{facts.algorithm}.async_{facts.algorithm}"
    key = f"{section}.recompute_kv_cache_after_weight_updates"
    if facts.asynchronous and facts.on(f"{section}.in_flight_weight_updates") and not facts.on(key):
        yield Hit(
            key,
            "with in_flight_weight_updates: true, one response is sampled by several policies, each over keys and "
            "values of the ones before; generation_logprobs belong to no single policy. true recomputes the cache",
        )


def _routes_lost_to_cache(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{_VLLM}.enable_prefix_caching"
    if facts.on(_ROUTER_REPLAY) and facts.get(key) is not False:
        yield Hit(
            key,
            "with router replay, prompts from the prefix cache may come without routes, which the trainer then chooses "
            "itself; enable_prefix_caching: false returns all of them",
        )


RULES = (
    Rule(
        "GM106",
        "warning",
        "vLLM cascade attention over FlashAttention-2 (A100, L20 and the like)",
        "https://github.com/vllm-project/flash-attention/pull/87; https://github.com/vllm-project/vllm/issues/22103",
        _cascade_attention,
        needs=("gpu",),
    ),
    Rule("GM107", "warning", "quantised rollouts without a correction", "NeMo-RL docs/fp8.md", _quantised),
    Rule(
        "GM108",
        "warning",
        "mixture of experts without router replay",
        "NeMo-RL docs/guides/router-replay.md; R3, arXiv:2510.11370",
        _no_router_replay,
    ),
    Rule(
        "GM109",
        "warning",
        "router trained by a load-balancing loss",
        "NeMo-RL examples/configs/grpo_math_1B.yaml; https://github.com/NVIDIA-NeMo/RL/pull/3169",
        _balancing_loss,
    ),
    Rule(
        "GM110",
        "note",
        "weights updated during a response, over the old KV cache",
        "NeMo-RL docs/guides/async-grpo.md",
        _mixed_cache,
    ),
    Rule(
        "GM111",
        "note",
        "router replay with prefix caching",
        "NeMo-RL `pad_and_align_routed_expert_indices`; grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3.yaml",
        _routes_lost_to_cache,
    ),
    Rule(
        "GM112",
        "warning",
        "rollouts in another precision than training",
        "NeMo-RL docs/adding-new-models.md; arXiv:2510.26788",
        _other_precision,
    ),
    Rule(
        "GM113",
        "note",
        "router biases updated by load",
        "NeMo-RL examples/configs/grpo_math_1B.yaml",
        _balancing_bias,
    ),
)
