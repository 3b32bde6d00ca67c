"""GM225, GM345, GM410: changes of the rewards that never apply, or lack a setting."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import single_controller_mentions
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

_REWARD_STEPS = {
    "grpo.use_dynamic_sampling": "use_dynamic_sampling",
    "grpo.overlong_filtering": "overlong_filtering",
    "grpo.reward_scaling.enabled": "reward_scaling",
    "grpo.reward_shaping.enabled": "reward_shaping",
}
"""Switches of what `grpo_train` does with a batch's rewards, and the word for it in NeMo-RL's source."""
_SHAPING = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")


def _ignored_by_the_single_controller(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.get("async_rl") is None:
        return
    for key, word in _REWARD_STEPS.items():
        if facts.is_true(key) and not (facts.nemo_rl and single_controller_mentions(facts.nemo_rl, word)):
            yield Hit(
                key,
                "true, but the single controller (section async_rl) does not read it, and trains on all rewards as "
                "they are; set false, or remove the section async_rl for the synchronous trainer",
            )


def _uses_length_penalty(facts: RecipeFacts) -> bool:
    """Return True if rewards are shaped by DAPO's penalty on the length, not scaled where a response is cut off."""
    section = f"{facts.algorithm}.reward_shaping"
    return facts.is_true(f"{section}.enabled") and facts.get(f"{section}.stop_properly_penalty_coef") is None


def _shaping_without_settings(facts: RecipeFacts) -> Iterator[Hit]:
    section = f"{facts.algorithm}.reward_shaping"
    missing = [name for name in _SHAPING if facts.get(f"{section}.{name}") is None]
    if _uses_length_penalty(facts) and missing:
        yield Hit(
            f"{section}.{missing[0]}",
            f"null, but {section}.enabled: true needs {', '.join(_SHAPING)}, or "
            "stop_properly_penalty_coef; NeMo-RL stops after the first rollout; set it",
        )


def _length_penalty_out_of_reach(facts: RecipeFacts) -> Iterator[Hit]:
    section = f"{facts.algorithm}.reward_shaping"
    buffer, _, longest = (facts.number(f"{section}.{name}") for name in _SHAPING)
    keys = ("policy.generation.max_new_tokens", "policy.max_total_sequence_length")
    limits = {key: limit for key in keys if (limit := facts.number(key))}
    if not _uses_length_penalty(facts) or buffer is None or longest is None or not limits:
        return
    key = min(limits, key=lambda key: limits[key])
    if limits[key] <= longest - buffer:
        yield Hit(
            f"{section}.max_response_length",
            f"{longest:g}: the penalty begins above {longest:g} - overlong_buffer_length: {buffer:g} = "
            f"{longest - buffer:g} tokens, and {key}: {limits[key]:g} allows no longer response, so no reward changes; "
            f"set {limits[key]:g}",
        )


_SHAPE = "NeMo-RL `apply_reward_shaping` (algorithms/reward_functions.py)"
RULES = (
    Rule(
        "GM225",
        "error",
        "change of the rewards that the single controller ignores",
        "NeMo-RL `SingleController` (algorithms/single_controller.py)",
        _ignored_by_the_single_controller,
        applies_to_lab=False,
    ),
    Rule(
        "GM345",
        "error",
        "shaped rewards without the settings that they need",
        _SHAPE,
        _shaping_without_settings,
        applies_to_lab=False,
    ),
    Rule(
        "GM410",
        "warning",
        "penalty on the length of responses that none can reach",
        _SHAPE,
        _length_penalty_out_of_reach,
        applies_to_lab=False,
    ),
)
