"""Bounds, thresholds and sizes that NeMo-RL accepts, but that defeat their purpose."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_SMALLEST_TOKEN_CLIP = 0.01  # far below any published clip of token ratios; GSPO's on sequences is 3e-4
_CLIP_BOUNDS = ("ratio_clip_min", "ratio_clip_max")


def _has_clip(facts: RecipeFacts) -> bool:
    """Return True if the objective clips its ratio in PPO's way, to [1 - ratio_clip_min, 1 + ratio_clip_max]."""
    config = facts.config
    is_clipped = config.name in ("clipped_pg", "gspo", "gspo_token") and not config.use_cispo
    return is_clipped and not config.disable_ppo_ratio and not config.force_on_policy_ratio


@rule("GM210", "warning", "NeMo-RL `ClippedPGLossFn`: `ratios.clamp(1 - ratio_clip_min, 1 + ratio_clip_max)`")
def _bound_instead_of_distance(facts: RecipeFacts) -> Iterator[Hit]:
    """Clip bound on the ratio where a distance from 1 is meant."""
    config = facts.config
    if not _has_clip(facts):
        return
    low, high = config.ratio_clip_min, config.ratio_clip_max
    # Both bounds are distances from 1. 1.2 for ratio_clip_max, or 0.8 for ratio_clip_min, is the bound itself.
    # A ratio_clip_min of exactly 1 is not reported, since it is a common way to have no lower bound.
    if 1 <= high <= 2:
        yield Hit(
            "loss_fn.ratio_clip_max",
            f"{high:g} is a distance from 1, so the ratio is clipped above {1 + high:g}; if the bound itself is "
            f"meant, set {high - 1:.6g}",
        )
    if 0.6 <= low < 1:
        yield Hit(
            "loss_fn.ratio_clip_min",
            f"{low:g} is a distance from 1, so the ratio is clipped below {1 - low:.6g}; if the bound itself is "
            f"meant, set {1 - low:.6g}",
        )


@rule("GM211", "warning", "GSPO, arXiv:2507.18071 section 5.1, whose bounds are for a sequence's mean")
def _sequence_clip_on_tokens(facts: RecipeFacts) -> Iterator[Hit]:
    """GSPO's clip bounds on the ratios of tokens."""
    config = facts.config
    if not _has_clip(facts) or config.sequence_level_importance_ratios:
        return
    for key in _CLIP_BOUNDS:
        bound = getattr(config, key)
        if bound < _SMALLEST_TOKEN_CLIP:
            yield Hit(
                f"loss_fn.{key}",
                f"{bound:g} clips each token's ratio, so that almost every token that an update has moved loses its "
                "gradient. GSPO's 3.0e-4 and 4.0e-4 are for the geometric mean of a sequence; set 0.2, or "
                "sequence_level_importance_ratios: true and token_level_loss: false",
            )


@rule("GM212", "warning", "NeMo-RL `ClippedPGLossFn` (`truncated_importance_sampling_ratio`)")
def _weight_bounds_without_one(facts: RecipeFacts) -> Iterator[Hit]:
    """Bounds on the weights that exclude 1."""
    config = facts.config
    if config.truncation is None or config.plugin_truncation is not None:
        return
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    effect = "is scaled by the bound" if config.truncation == "tis" else "is removed from the loss"
    for key, bound, is_wrong in (
        ("truncated_importance_sampling_ratio", high, high is not None and high < 1),
        ("truncated_importance_sampling_ratio_min", low, low is not None and low > 1),
    ):
        if is_wrong:
            yield Hit(
                f"loss_fn.{key}",
                f"{bound:g}: weights are close to 1, which these bounds exclude, so almost everything {effect}; choose "
                "bounds around 1, such as 0.5 and 2.0 for tokens",
            )


@rule("GM213", "warning", "NeMo-RL `GRPOAdvantageEstimator`, `calculate_baseline_and_std_per_prompt`")
def _few_responses_per_prompt(facts: RecipeFacts) -> Iterator[Hit]:
    """So few responses per prompt that all advantages, or all their deviations, are 0."""
    section, key = "grpo.adv_estimator", "grpo.num_generations_per_prompt"
    responses, estimator = facts.number(key), facts.get(f"{section}.name", "grpo")
    subtracts_mean = estimator in ("grpo", "gdpo") or (
        estimator == "reinforce_plus_plus" and facts.get(f"{section}.minus_baseline", True) is True
    )
    if facts.algorithm != "grpo" or not subtracts_mean:
        return
    if responses == 1:
        yield Hit(
            key,
            f"1: the estimator {estimator} subtracts the mean reward of a prompt's responses, so every advantage is 0 "
            "and only a KL term would train; set 2 or more, usually 8 or 16",
        )
    leaves_one_out = facts.is_true(f"{section}.use_leave_one_out_baseline") or (
        facts.get(section) is None and facts.is_true("grpo.use_leave_one_out_baseline")
    )
    if responses == 2 and leaves_one_out and estimator in ("grpo", "gdpo"):
        drops_all = facts.is_true("grpo.use_dynamic_sampling")
        effect = (
            "dynamic sampling drops every prompt" if drops_all else "rewards are not normalised (normalize_rewards)"
        )
        yield Hit(
            key,
            "2: with a leave-one-out baseline, NeMo-RL computes a standard deviation of 0 from one other response, so "
            f"{effect}; set 3 or more, or use_leave_one_out_baseline: false",
        )


@rule("GM222", "error", "NeMo-RL `_clip_grpo_advantages`", applies_to_lab=False)
def _advantages_of_one_sign(facts: RecipeFacts) -> Iterator[Hit]:
    """Advantages clipped to one sign."""
    low_key, high_key = "grpo.advantage_clip_low", "grpo.advantage_clip_high"
    low, high = facts.number(low_key), facts.number(high_key)
    if facts.algorithm != "grpo":
        return
    if low is not None and high is not None and low >= high:
        yield Hit(low_key, f"{low:g} is not below advantage_clip_high: {high:g}, so all advantages are {high:g}")
    elif low is not None and low >= 0:
        yield Hit(low_key, f"{low:g} is the lower bound itself, so the worst response gets {low:g}; set {-low or -5:g}")
    elif high is not None and high <= 0:
        yield Hit(
            high_key, f"{high:g} is the upper bound itself, so the best response gets {high:g}; set {-high or 5:g}"
        )


@rule("GM214", "warning", "NeMo-RL `compute_and_apply_seq_logprob_error_masking`")
def _unreachable_error_threshold(facts: RecipeFacts) -> Iterator[Hit]:
    """Error threshold that every sequence exceeds."""
    key = f"{facts.algorithm}.seq_logprob_error_threshold"
    threshold = facts.number(key)
    if threshold is not None and threshold <= 1:
        yield Hit(
            key,
            f"{threshold:g}: the error is the mean of exp(|prev - gen|), which is at least 1, so every sequence with a "
            "mismatch is removed; NeMo-RL's recipes set 1.5 to 2, the scale of token_mult_prob_error",
        )


@rule("GM215", "warning", "NeMo-RL rollouts end at `max_total_sequence_length`; vLLM `max_model_len`")
def _response_longer_than_context(facts: RecipeFacts) -> Iterator[Hit]:
    """Responses longer than the sequences may be."""
    key, context_key = "policy.generation.max_new_tokens", "policy.max_total_sequence_length"
    response, context = facts.number(key), facts.number(context_key)
    if response and context and response > context:
        yield Hit(
            key,
            f"{response:g} tokens of a response, and a prompt, don't fit into {context_key}: {context:g}, at which "
            f"sequences end; lower it to at most {context:g}, or raise {context_key}",
        )
