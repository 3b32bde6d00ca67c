"""GM308, GM310, GM311, GM313, GM315, GM319, GM320: log-probs and entropies that NeMo-RL can't compute as configured."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import NO_ENTROPY, lacks_entropy, prev_readers
from nemo_geomask.tools.check.logprob_paths import fused_key, missing_for_backend, missing_for_fused
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_MEGATRON = "policy.megatron_cfg.enabled"
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"
_CHUNK_SIZE = "policy.logprob_chunk_size"
_DTENSOR_CP = "policy.dtensor_cfg.context_parallel_size"
# Why a backend needs certain settings; every other backend takes all logits.
_BACKEND_REASON = {"mcore": "works over Megatron's own process groups", "geomask_linear": "takes hidden states"}


def _fused_logprobs(facts: RecipeFacts) -> Iterator[Hit]:
    key = fused_key(facts)
    if key and (required := missing_for_fused(facts)):
        yield Hit(key, f"true: the fused path needs {', '.join(required)}; set these, or false")


def _reward_kl_without_prev(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    has_error_threshold = facts.get(f"{facts.algorithm}.seq_logprob_error_threshold") is not None
    has_reward_kl = config.use_kl_in_reward and config.reference_policy_kl_penalty
    if has_reward_kl and config.force_on_policy_ratio and not has_error_threshold:
        yield Hit(
            "loss_fn.use_kl_in_reward",
            "true needs prev, which NeMo-RL does not compute under force_on_policy_ratio: true; set "
            "force_on_policy_ratio: false, or reference_policy_kl_penalty: 0",
        )


def _kl_without_reference(facts: RecipeFacts) -> Iterator[Hit]:
    key = f"{facts.algorithm}.skip_reference_policy_logprobs_calculation"
    penalty = facts.config.reference_policy_kl_penalty
    if facts.is_true(key) and penalty:
        yield Hit(
            key,
            f"true skips the log-probs that loss_fn.reference_policy_kl_penalty: {penalty:g} needs; set the penalty to "
            "0, or this to false",
        )


def _logprob_backend(facts: RecipeFacts) -> Iterator[Hit]:
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


def _prev_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.config.skips_prev:
        for problem in prev_readers(facts.recipe.data):
            yield Hit(problem.keys[0], problem.message)


def _entropy_not_computed(facts: RecipeFacts) -> Iterator[Hit]:
    if lacks_entropy(facts.config) and "lab" not in facts.recipe.data:
        yield Hit("loss_fn.record.entropy", NO_ENTROPY)


def _chunks_of_float32_logits(facts: RecipeFacts) -> Iterator[Hit]:
    chunk_size = facts.number(_CHUNK_SIZE) or 0
    if facts.uses_megatron and chunk_size > 0 and not facts.is_true(_DEFERRED):
        yield Hit(
            _CHUNK_SIZE,
            f"{chunk_size:g}: log-probs in chunks need half-precision logits from Megatron; set {_DEFERRED}: true, or "
            "this to null",
        )


RULES = (
    Rule(
        "GM308",
        "error",
        "fused linear log-probs with incompatible settings",
        "NeMo-RL `grpo.setup` (main)",
        _fused_logprobs,
    ),
    Rule(
        "GM310",
        "error",
        "KL in the reward without `prev_logprobs`",
        "NeMo-RL `_validate_use_kl_in_reward_compat`",
        _reward_kl_without_prev,
    ),
    Rule("GM311", "error", "KL term without reference log-probs", "NeMo-RL `grpo.setup`", _kl_without_reference),
    Rule(
        "GM313",
        "error",
        "`logprob_backend` with incompatible settings",
        "docs/reference/loss_reference.md",
        _logprob_backend,
    ),
    Rule(
        "GM315",
        "error",
        "setting that reads `prev_logprobs` although they are not computed",
        "docs/reference/nemo_rl.md",
        _prev_not_computed,
    ),
    Rule(
        "GM319",
        "error",
        "recorded entropies that no worker computes",
        "docs/reference/records.md",
        _entropy_not_computed,
    ),
    Rule(
        "GM320",
        "error",
        "log-probs in chunks of float32 logits under Megatron",
        "NeMo-RL `_validate_chunking_config` (megatron/setup.py)",
        _chunks_of_float32_logits,
    ),
)
