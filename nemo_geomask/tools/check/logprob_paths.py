"""Requirements of each way to compute log-probs: forward passes, and settings that a recipe may lack."""

from __future__ import annotations

from nemo_geomask.hosts.nemo_rl.facts import (
    FUSED_LOGPROBS,
    FUSED_LOGPROBS_UNTIL_V0_7_0,
    reads_setting,
    skips_unread_logprobs,
    trains_on_chunks,
)
from nemo_geomask.tools.check.recipe_facts import RecipeFacts

_MEGATRON = "policy.megatron_cfg.enabled"
_DEFERRED = "policy.megatron_cfg.defer_fp32_logits"
_PACKING = "policy.sequence_packing.enabled"
_MEGATRON_CP = "policy.megatron_cfg.context_parallel_size"
_DTENSOR_CP = "policy.dtensor_cfg.context_parallel_size"
_UNFILTERED = "policy.generation.top_p: 1.0 and top_k: null"


def scoring_passes(facts: RecipeFacts) -> int:
    """Return the number of forward passes without gradient over a batch: for ``prev_logprobs`` and the reference."""
    config, checkout = facts.config, facts.nemo_rl
    skips_unread = checkout is None or skips_unread_logprobs(checkout)
    has_error_threshold = facts.get(f"{facts.algorithm}.seq_logprob_error_threshold") is not None
    # seq_logprob_error_threshold reads prev even if the loss does not.
    reads_prev = has_error_threshold or not config.force_on_policy_ratio
    scores_prev = not config.skips_prev and (reads_prev or not skips_unread)
    skips_reference = facts.is_true(f"{facts.algorithm}.skip_reference_policy_logprobs_calculation")
    scores_reference = not skips_reference and (bool(config.reference_policy_kl_penalty) or not skips_unread)
    return scores_prev + scores_reference


def fused_key(facts: RecipeFacts) -> str | None:
    """Return the key by which a recipe turns on NeMo-RL's fused linear log-probs; None if they are off."""
    checkout = facts.nemo_rl
    keys: tuple[str, ...] = (FUSED_LOGPROBS, FUSED_LOGPROBS_UNTIL_V0_7_0)
    if checkout is not None:
        keys = keys[:1] if reads_setting(checkout, FUSED_LOGPROBS) else keys[1:]
    return next((key for key in keys if facts.uses_megatron and facts.is_true(key)), None)


def missing_for_chunks(facts: RecipeFacts) -> list[str]:
    """Return the settings that a recipe lacks for NeMo-RL to compute training log-probs in chunks."""
    checkout = facts.nemo_rl
    is_missing = {
        f"{_MEGATRON}: true": not facts.uses_megatron,
        f"{_DEFERRED}: true": facts.uses_megatron and not facts.is_true(_DEFERRED),
        _UNFILTERED: facts.filter_key is not None,
        "NeMo-RL v0.7.0 or later": checkout is not None and not trains_on_chunks(checkout),
    }
    return _true_keys(is_missing)


def missing_for_fused(facts: RecipeFacts) -> list[str]:
    """Return the settings that a recipe lacks for NeMo-RL's fused linear log-probs."""
    checkout = facts.nemo_rl
    # Until v0.7.0, only supervised fine-tuning and DPO can use them.
    is_unsupported = checkout is not None and not reads_setting(checkout, FUSED_LOGPROBS)
    is_missing = {
        "NeMo-RL's main and use_fused_linear_logprobs": (
            is_unsupported or fused_key(facts) == FUSED_LOGPROBS_UNTIL_V0_7_0
        ),
        f"{_MEGATRON}: true": not facts.uses_megatron,
        f"{_PACKING}: false": facts.is_true(_PACKING),
        f"{_MEGATRON_CP}: 1": facts.size(_MEGATRON_CP) > 1,
        _UNFILTERED: facts.filter_key is not None,
    }
    return _true_keys(is_missing)


def missing_for_backend(facts: RecipeFacts, backend: str) -> list[str]:
    """Return the settings that a recipe lacks for a ``logprob_backend`` other than ``nemo_rl``."""
    uses_dtensor_cp = not facts.uses_megatron and facts.size(_DTENSOR_CP) > 1
    is_missing = {
        _UNFILTERED: facts.filter_key is not None,
        f"{FUSED_LOGPROBS}: false": facts.uses_megatron and facts.is_true(FUSED_LOGPROBS),
        f"{FUSED_LOGPROBS_UNTIL_V0_7_0}: false": facts.uses_megatron and facts.is_true(FUSED_LOGPROBS_UNTIL_V0_7_0),
        f"{_MEGATRON}: true": backend == "mcore" and not facts.uses_megatron,
        f"{_DTENSOR_CP}: 1": backend == "geomask_linear" and uses_dtensor_cp,
    }
    return _true_keys(is_missing)


def _true_keys(is_missing: dict[str, bool]) -> list[str]:
    """Return the settings whose value is True."""
    return [setting for setting, missing in is_missing.items() if missing]
