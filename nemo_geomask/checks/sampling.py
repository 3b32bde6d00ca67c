"""GM1, first part: sampling parameters of the generation engine against what training computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.tree import reads

__all__ = ["RULES"]

_TEMPERATURE = "policy.generation.temperature"
_MODE = "policy.generation.vllm_cfg.logprobs_mode"


def _scaled_in_half_precision(facts: RecipeFacts) -> Iterator[Hit]:
    # Megatron's logits are float32 unless that is deferred, and so are those of the DTensor trainer.
    key = "policy.megatron_cfg.defer_fp32_logits"
    if facts.megatron and facts.on(key) and facts.temperature != 1.0:
        # bfloat16 keeps 8 bits: between 16 and 32 its values are 2^-3 apart.
        yield Hit(
            key,
            f"training divides half-precision logits by the temperature ({facts.temperature:g}) in place, which "
            "rounds them a second time, by up to 0.06 at logits of 16 to 32; vLLM samples from float32. Set "
            "temperature: 1.0, or defer_fp32_logits: false",
        )


def _raw_log_probs(facts: RecipeFacts) -> Iterator[Hit]:
    tree = facts.nemo_rl
    if not facts.vllm or (tree is not None and not reads(tree, _MODE)):
        return
    # Where NeMo-RL reads the key, its absence means vLLM's own default.
    mode = facts.get(_MODE, "raw_logprobs" if tree is not None else None)
    reshaped = [f"temperature {facts.temperature:g}"] if facts.temperature != 1.0 else []
    reshaped += [f"{facts.filtered.rpartition('.')[2]} {facts.get(facts.filtered)}"] if facts.filtered else []
    if mode == "raw_logprobs" and reshaped:
        yield Hit(
            _MODE,
            f"vLLM returns log-probs of the model before {' and '.join(reshaped)} (raw_logprobs), but training "
            "computes them after, so every mismatch ratio is off; set logprobs_mode: processed_logprobs",
        )


def _processors_only_when_sampling(facts: RecipeFacts) -> Iterator[Hit]:
    words = facts.get("policy.generation.bad_words")
    if words and facts.get(_MODE) != "raw_logprobs":
        yield Hit(
            "policy.generation.bad_words",
            f"bad_words ({len(words)} given) change the distribution that vLLM samples from and reports, but not the "
            "one that is trained; with temperature 1.0 and no top-p or top-k set vllm_cfg.logprobs_mode: raw_logprobs, "
            "or remove bad_words",
        )


def _filtered_and_pooled(facts: RecipeFacts) -> Iterator[Hit]:
    key, config = facts.filtered, facts.config
    if key is None:
        return
    users = [f"mask {rule.label}" for rule in config.mask_rules if rule.level != "token" and rule.log_ratio != "policy"]
    if config.applies_weight and config.correction_level != "token":
        users.append(f"is_correction_level: {config.correction_level}")
    if config.truncation == "seq-mask-tis":
        users.append("truncated_importance_sampling_type: seq-mask-tis")
    if users:
        yield Hit(
            key,
            f"{key.rpartition('.')[2]}: {facts.get(key)}: a sampled token that falls outside the training engine's "
            "own top-p or top-k gets the log-prob 0 from NeMo-RL, so its mismatch log-ratio is -log μ: a token of "
            f"probability 0.01 adds {math.log(100):.1f} to the sequence's sum. What pools over a sequence takes it for "
            f"mismatch ({', '.join(users)}); sample with top_p: 1.0 and top_k: null, or correct by token",
        )


def _temperature_on_log_probs(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.megatron_cfg.use_fused_linear_logprobs"
    if facts.megatron and facts.on(key) and facts.temperature != 1.0:
        yield Hit(
            key,
            f"with temperature {facts.temperature:g}, NeMo-RL divides what the fused path returns by it; those are "
            "log-probs already, which makes curr and prev wrong at every token; set temperature: 1.0, or "
            "use_fused_linear_logprobs: false",
        )


RULES = (
    Rule(
        "GM101",
        "warning",
        "a temperature other than 1 on half-precision logits",
        "NeMo-RL `apply_temperature_scaling` (megatron/train.py)",
        _scaled_in_half_precision,
    ),
    Rule(
        "GM102",
        "error",
        "raw log-probs of a distribution reshaped by temperature, top-p or top-k",
        "vLLM `logprobs_mode`; https://github.com/vllm-project/vllm/issues/42259",
        _raw_log_probs,
    ),
    Rule(
        "GM103",
        "warning",
        "logits processed only when sampling (`bad_words`)",
        "NeMo-RL `VllmSpecificArgs.logprobs_mode` (generation/vllm/config.py)",
        _processors_only_when_sampling,
    ),
    Rule(
        "GM104",
        "warning",
        "top-p or top-k together with weights or masks pooled over a sequence",
        "NeMo-RL `mask_out_neg_inf_logprobs`; https://github.com/huggingface/trl/issues/6789",
        _filtered_and_pooled,
    ),
    Rule(
        "GM105",
        "error",
        "fused linear log-probs with a temperature other than 1",
        "NeMo-RL `forward_with_post_processing_fn` (megatron/train.py)",
        _temperature_on_log_probs,
    ),
)
