"""Log-probs of the sampler that are not the trainer's, and log-probs that can't be computed as configured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import reads_setting
from nemo_geomask.hosts.nemo_rl.honoured_settings import NO_ENTROPY, lacks_entropy, own_loop_settings, prev_readers
from nemo_geomask.tools.check.logprob_paths import missing_for_backend
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_LOGPROBS_MODE = "policy.generation.vllm_cfg.logprobs_mode"


_MEGATRON = "policy.megatron_cfg.enabled"
_DTENSOR_CP = "policy.dtensor_cfg.context_parallel_size"
# Why a backend needs certain settings; every other backend takes all logits.
_BACKEND_REASON = {"mcore": "works over Megatron's own process groups", "geomask_linear": "takes hidden states"}


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
            "computes them after it, so every mismatch ratio is wrong",
            fix={_LOGPROBS_MODE: "processed_logprobs"},
        )


@rule("GM104", "warning", "NeMo-RL `mask_out_neg_inf_logprobs`; https://github.com/huggingface/trl/issues/6789")
def _filter_with_pooling(facts: RecipeFacts) -> Iterator[Hit]:
    """Top-p or top-k with weights or masks that pool over a sequence."""
    key, config = facts.filter_key, facts.config
    if key is None or config.drop_filtered_tokens:
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
            f"affects {', '.join(pooled)}; set loss_fn.drop_filtered_tokens: true, which leaves such tokens out, or "
            "sample with top_p: 1.0 and top_k: null",
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
        "or {fix}",
        fix={"loss_fn.logprob_backend": fallback},
    )


@rule("GM315", "error", "docs/reference/nemo_rl.md")
def _prev_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    """Setting that reads `prev_logprobs` although they are not computed."""
    for problem in prev_readers(facts.config, facts.recipe.data):
        yield Hit(problem.keys[0], problem.template, fix=problem.fix)


@rule("GM347", "error", "docs/reference/nemo_rl.md", applies_to_lab=False)
def _own_loop_needed(facts: RecipeFacts) -> Iterator[Hit]:
    """Loss settings that need a training loop of your own."""
    for problem in own_loop_settings(facts.config):
        yield Hit(problem.keys[0], problem.template, fix=problem.fix)


@rule("GM319", "error", "docs/reference/records.md")
def _entropy_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    """Recorded entropies that no worker computes."""
    if lacks_entropy(facts.config) and "lab" not in facts.recipe.data:
        yield Hit("loss_fn.record.entropy", NO_ENTROPY, fix={"loss_fn.record.entropy": False})
