"""GM225, GM345, GM410: changes of the rewards that never apply, or that stop the run."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.hosts.nemo_rl.facts import calls_dynamic_sampling_in_ppo, single_controller_lacks
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


def _ignored_reward_step(facts: RecipeFacts) -> Iterator[Hit]:
    if facts.uses_single_controller:
        for key, word in _REWARD_STEPS.items():
            if facts.is_true(key) and (facts.nemo_rl is None or single_controller_lacks(facts.nemo_rl, word)):
                yield Hit(
                    key,
                    "true has no effect: NeMo-RL's single controller, which a section async_rl selects, does not "
                    "implement it; set false, or remove async_rl and start examples/run_grpo.py",
                )
    key = "ppo.use_dynamic_sampling"
    if facts.is_true(key) and (facts.nemo_rl is None or not calls_dynamic_sampling_in_ppo(facts.nemo_rl)):
        yield Hit(key, "true has no effect: NeMo-RL's PPO keeps every prompt; set false, and ppo.batch_multiplier: 1.0")


def _shapes_by_length(facts: RecipeFacts) -> bool:
    """Return True if DAPO's penalty on the length shapes the rewards.

    Asynchronous trainers refuse shaped rewards (GM328), and the single controller ignores them (GM225).
    """
    section = f"{facts.algorithm}.reward_shaping"
    is_applied = facts.is_true(f"{section}.enabled") and not (facts.is_async or facts.uses_single_controller)
    return is_applied and facts.get(f"{section}.stop_properly_penalty_coef") is None


def _shaping_that_fails(facts: RecipeFacts) -> Iterator[Hit]:
    section = f"{facts.algorithm}.reward_shaping"
    if not _shapes_by_length(facts):
        return
    missing = [name for name in _SHAPING if facts.get(f"{section}.{name}") is None]
    if missing:
        yield Hit(
            f"{section}.{missing[0]}",
            f"{' and '.join(missing)} not set: {section}.enabled: true needs all of {', '.join(_SHAPING)}, or "
            "stop_properly_penalty_coef alone; without them NeMo-RL stops at the first training batch",
        )
    buffer, penalty = (facts.number(f"{section}.{name}") for name in _SHAPING[:2])
    if buffer is not None and buffer <= 0:
        yield Hit(
            f"{section}.overlong_buffer_length",
            f"{buffer:g} is not above 0, and NeMo-RL divides by it; set the number of tokens over which the penalty "
            "grows",
        )
    if penalty is not None and penalty < 0:
        yield Hit(
            f"{section}.overlong_buffer_penalty",
            f"{as_yaml(penalty)} is negative, and NeMo-RL stops at the first training batch; set {-penalty:g}",
        )


def _length_penalty_out_of_reach(facts: RecipeFacts) -> Iterator[Hit]:
    section = f"{facts.algorithm}.reward_shaping"
    buffer, _, longest = (facts.number(f"{section}.{name}") for name in _SHAPING)
    context = "policy.generation.vllm_cfg.max_model_len"
    if not facts.uses_vllm or facts.number(context) is None:
        context = "policy.max_total_sequence_length"
    limits = {key: limit for key in ("policy.generation.max_new_tokens", context) if (limit := facts.number(key))}
    if not _shapes_by_length(facts) or buffer is None or longest is None or buffer <= 0 or not limits:
        return
    key = min(limits, key=lambda key: limits[key])
    limit = limits[key]
    if limit <= longest - buffer:
        fix = f"set {limit:g}" if buffer < limit else f"set {limit:g}, and overlong_buffer_length: {limit // 4:g} or so"
        yield Hit(
            f"{section}.max_response_length",
            f"{longest:g}: the penalty begins at {longest - buffer:g} tokens (max_response_length - "
            f"overlong_buffer_length), but {key} limits responses to {limit:g}, so it never applies; {fix}",
        )


_SHAPE = "NeMo-RL `apply_reward_shaping` (algorithms/reward_functions.py)"
RULES = (
    Rule(
        "GM225",
        "error",
        "change of the rewards that NeMo-RL's trainer ignores",
        "NeMo-RL `SingleController` (algorithms/single_controller.py), `ppo_train`",
        _ignored_reward_step,
        applies_to_lab=False,
    ),
    Rule(
        "GM345",
        "error",
        "shaped rewards with missing or impossible settings",
        _SHAPE,
        _shaping_that_fails,
        applies_to_lab=False,
    ),
    Rule(
        "GM410",
        "warning",
        "length penalty that no response can reach",
        _SHAPE,
        _length_penalty_out_of_reach,
        applies_to_lab=False,
    ),
)
