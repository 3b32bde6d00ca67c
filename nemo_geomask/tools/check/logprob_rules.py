"""Log-probs of the sampler that are not the trainer's, and log-probs that can't be computed as configured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import NO_ENTROPY, lacks_entropy, prev_readers, reads_setting
from nemo_geomask.tools.check.logprob_paths import fused_key, missing_for_backend, missing_for_fused
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_LOGPROBS_MODE = "policy.generation.vllm_cfg.logprobs_mode"


_MEGATRON = "policy.megatron_cfg.enabled"
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"
_CHUNK_SIZE = "policy.logprob_chunk_size"
_DTENSOR_CP = "policy.dtensor_cfg.context_parallel_size"
# Why a backend needs certain settings; every other backend takes all logits.
_BACKEND_REASON = {"mcore": "works over Megatron's own process groups", "geomask_linear": "takes hidden states"}


@rule("GM101", "warning", "NeMo-RL `apply_temperature_scaling` (megatron/train.py)")
def _temperature_on_half_precision(facts: RecipeFacts) -> Iterator[Hit]:
    """Temperature other than 1 with half-precision logits."""
    # Without this setting, Megatron's logits are float32, as the DTensor trainer's always are.
    key = "policy.megatron_cfg.defer_fp32_logits"
    if facts.uses_megatron and facts.is_true(key) and facts.temperature != 1.0:
        # bfloat16 has 8 significant bits, so its values between 16 and 32 are 2^-3 apart.
        yield Hit(
            key,
            f"true: training divides half-precision logits by the temperature ({facts.temperature:g}) in place, which "
            "rounds them a second time, by up to 0.06 for logits of 16 to 32, while vLLM samples from float32 logits; "
            "set policy.generation.temperature: 1.0, or defer_fp32_logits: false",
        )


@rule("GM102", "error", "vLLM `logprobs_mode`; https://github.com/vllm-project/vllm/issues/42259")
def _raw_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
    """Raw log-probs, although temperature, top-p or top-k change the sampled distribution."""
    checkout = facts.nemo_rl
    if not facts.uses_vllm or (checkout is not None and not reads_setting(checkout, _LOGPROBS_MODE)):
        return
    # A NeMo-RL that reads the key leaves vLLM's default, raw_logprobs, in place if the recipe does not set it.
    mode = facts.get(_LOGPROBS_MODE, "raw_logprobs" if checkout is not None else None)
    causes = [f"temperature {facts.temperature:g}"] if facts.temperature != 1.0 else []
    causes += [f"{facts.filter_key.rpartition('.')[2]} {facts.get(facts.filter_key)}"] if facts.filter_key else []
    if mode == "raw_logprobs" and causes:
        yield Hit(
            _LOGPROBS_MODE,
            f"raw_logprobs: vLLM returns log-probs of the distribution before {' and '.join(causes)}, but training "
            "computes them after it, so every mismatch ratio is wrong; set logprobs_mode: processed_logprobs",
        )


@rule("GM103", "warning", "NeMo-RL `VllmSpecificArgs.logprobs_mode` (generation/vllm/config.py)")
def _bad_words(facts: RecipeFacts) -> Iterator[Hit]:
    """`bad_words`, which change the sampled distribution but not the trained one."""
    bad_words = facts.get("policy.generation.bad_words")
    if bad_words and facts.get(_LOGPROBS_MODE) != "raw_logprobs":
        yield Hit(
            "policy.generation.bad_words",
            f"{len(bad_words)} bad words change the distribution that vLLM samples from and reports, but not the one "
            "that is trained; remove them, or, at temperature 1.0 without top-p and top-k, set vllm_cfg.logprobs_mode: "
            "raw_logprobs",
        )


@rule("GM104", "warning", "NeMo-RL `mask_out_neg_inf_logprobs`; https://github.com/huggingface/trl/issues/6789")
def _filter_with_pooling(facts: RecipeFacts) -> Iterator[Hit]:
    """Top-p or top-k with weights or masks that pool over a sequence."""
    key, config = facts.filter_key, facts.config
    if key is None:
        return
    pooled = [
        f"mask {rule.label}" for rule in config.mask_rules if rule.level != "token" and rule.log_ratio != "policy"
    ]
    if config.applies_weight and config.correction_level != "token":
        pooled.append(f"is_correction_level: {config.correction_level}")
    if config.truncation == "seq-mask-tis":
        pooled.append("truncated_importance_sampling_type: seq-mask-tis")
    if pooled:
        yield Hit(
            key,
            f"{facts.get(key)}: if a sampled token is outside the training engine's own "
            f"{key.rpartition('.')[2]} set, NeMo-RL gives it the log-prob 0, so its mismatch log-ratio is -log μ: a "
            f"token of probability 0.01 adds {math.log(100):.1f} to the sequence's sum. This is no mismatch, but "
            f"affects {', '.join(pooled)}; sample with top_p: 1.0 and top_k: null, or use masks and weights at token "
            "level",
        )


@rule("GM105", "error", "NeMo-RL `forward_with_post_processing_fn` (megatron/train.py)")
def _temperature_on_fused_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
    """Fused linear log-probs with a temperature other than 1."""
    key = "policy.megatron_cfg.use_fused_linear_logprobs"
    if facts.uses_megatron and facts.is_true(key) and facts.temperature != 1.0:
        yield Hit(
            key,
            f"true: the fused path returns log-probs, and NeMo-RL divides them by the temperature "
            f"({facts.temperature:g}) as if they were logits, so curr and prev are wrong at every token; set "
            "policy.generation.temperature: 1.0, or use_fused_linear_logprobs: false",
        )


@rule("GM308", "error", "NeMo-RL `grpo.setup` (main)")
def _fused_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
    """Fused linear log-probs with incompatible settings."""
    key = fused_key(facts)
    if key and (required := missing_for_fused(facts)):
        yield Hit(key, f"true: the fused path needs {', '.join(required)}; set these, or false")


@rule("GM310", "error", "NeMo-RL `_validate_use_kl_in_reward_compat`")
def _reward_kl_without_prev(facts: RecipeFacts) -> Iterator[Hit]:
    """KL in the reward without `prev_logprobs`."""
    config = facts.config
    has_error_threshold = facts.get(f"{facts.algorithm}.seq_logprob_error_threshold") is not None
    has_reward_kl = config.use_kl_in_reward and config.reference_policy_kl_penalty
    if has_reward_kl and config.force_on_policy_ratio and not has_error_threshold:
        yield Hit(
            "loss_fn.use_kl_in_reward",
            "true needs prev, which NeMo-RL does not compute under force_on_policy_ratio: true; set "
            "force_on_policy_ratio: false, or reference_policy_kl_penalty: 0",
        )


@rule("GM311", "error", "NeMo-RL `grpo.setup`")
def _kl_without_reference(facts: RecipeFacts) -> Iterator[Hit]:
    """KL term without reference log-probs."""
    key = f"{facts.algorithm}.skip_reference_policy_logprobs_calculation"
    penalty = facts.config.reference_policy_kl_penalty
    if facts.is_true(key) and penalty:
        yield Hit(
            key,
            f"true skips the log-probs that loss_fn.reference_policy_kl_penalty: {penalty:g} needs; set the penalty to "
            "0, or this to false",
        )


@rule("GM313", "error", "docs/reference/loss_reference.md")
def _logprob_backend(facts: RecipeFacts) -> Iterator[Hit]:
    """`logprob_backend` with incompatible settings."""
    backend = facts.config.logprob_backend
    required = missing_for_backend(facts, backend)
    if backend == "nemo_rl" or not required:
        return
    # The backend geomask needs neither of these two settings.
    fallback = "geomask" if required in ([f"{_MEGATRON}: true"], [f"{_DTENSOR_CP}: 1"]) else "nemo_rl"
    yield Hit(
        "loss_fn.logprob_backend",
        f"{backend} {_BACKEND_REASON.get(backend, 'takes all logits')}, so it needs {', '.join(required)}; set these, "
        f"or logprob_backend: {fallback}",
    )


@rule("GM315", "error", "docs/reference/nemo_rl.md")
def _prev_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    """Setting that reads `prev_logprobs` although they are not computed."""
    if facts.config.skips_prev:
        for problem in prev_readers(facts.recipe.data):
            yield Hit(problem.keys[0], problem.message)


@rule("GM319", "error", "docs/reference/records.md")
def _entropy_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    """Recorded entropies that no worker computes."""
    if lacks_entropy(facts.config) and "lab" not in facts.recipe.data:
        yield Hit("loss_fn.record.entropy", NO_ENTROPY)


@rule("GM320", "error", "NeMo-RL `_validate_chunking_config` (megatron/setup.py)")
def _chunks_of_float32_logits(facts: RecipeFacts) -> Iterator[Hit]:
    """Log-probs in chunks of float32 logits under Megatron."""
    chunk_size = facts.number(_CHUNK_SIZE) or 0
    if facts.uses_megatron and chunk_size > 0 and not facts.is_true(_DEFERRED):
        yield Hit(
            _CHUNK_SIZE,
            f"{chunk_size:g}: log-probs in chunks need half-precision logits from Megatron; set {_DEFERRED}: true, or "
            "this to null",
        )
