"""GM101 to GM105: sampling parameters that make the generation engine's log-probs differ from the trainer's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import reads_setting
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_LOGPROBS_MODE = "policy.generation.vllm_cfg.logprobs_mode"


def _temperature_on_half_precision(facts: RecipeFacts) -> Iterator[Hit]:
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


def _raw_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
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


def _bad_words(facts: RecipeFacts) -> Iterator[Hit]:
    bad_words = facts.get("policy.generation.bad_words")
    if bad_words and facts.get(_LOGPROBS_MODE) != "raw_logprobs":
        yield Hit(
            "policy.generation.bad_words",
            f"{len(bad_words)} bad words change the distribution that vLLM samples from and reports, but not the one "
            "that is trained; remove them, or, at temperature 1.0 without top-p and top-k, set vllm_cfg.logprobs_mode: "
            "raw_logprobs",
        )


def _filter_with_pooling(facts: RecipeFacts) -> Iterator[Hit]:
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


def _temperature_on_fused_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.megatron_cfg.use_fused_linear_logprobs"
    if facts.uses_megatron and facts.is_true(key) and facts.temperature != 1.0:
        yield Hit(
            key,
            f"true: the fused path returns log-probs, and NeMo-RL divides them by the temperature "
            f"({facts.temperature:g}) as if they were logits, so curr and prev are wrong at every token; set "
            "policy.generation.temperature: 1.0, or use_fused_linear_logprobs: false",
        )


RULES = (
    Rule(
        "GM101",
        "warning",
        "temperature other than 1 with half-precision logits",
        "NeMo-RL `apply_temperature_scaling` (megatron/train.py)",
        _temperature_on_half_precision,
    ),
    Rule(
        "GM102",
        "error",
        "raw log-probs, although temperature, top-p or top-k change the sampled distribution",
        "vLLM `logprobs_mode`; https://github.com/vllm-project/vllm/issues/42259",
        _raw_logprobs,
    ),
    Rule(
        "GM103",
        "warning",
        "`bad_words`, which change the sampled distribution but not the trained one",
        "NeMo-RL `VllmSpecificArgs.logprobs_mode` (generation/vllm/config.py)",
        _bad_words,
    ),
    Rule(
        "GM104",
        "warning",
        "top-p or top-k with weights or masks that pool over a sequence",
        "NeMo-RL `mask_out_neg_inf_logprobs`; https://github.com/huggingface/trl/issues/6789",
        _filter_with_pooling,
    ),
    Rule(
        "GM105",
        "error",
        "fused linear log-probs with a temperature other than 1",
        "NeMo-RL `forward_with_post_processing_fn` (megatron/train.py)",
        _temperature_on_fused_logprobs,
    ),
)
