"""Bounds, thresholds and sizes that NeMo-RL accepts, but that defeat their purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_geomask.hosts.nemo_rl.source_words import numbers_in_recipes
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import is_switched_off, section_and_name, user_keys
from nemo_geomask.yaml_text import as_yaml

_SMALLEST_TOKEN_CLIP = 0.01  # far below any published clip of token ratios; GSPO's on sequences is 3e-4
# Of 3,932 numbers in NeMo-RL's recipes, 6 are that unusual beside the others at their key.
_FEWEST_SETTINGS = 8  # that tell what is usual
_FEWEST_SIZES = 3  # among them: one repeated number is a default, and no range
_FACTOR = 10  # beyond the smallest and the largest
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
    for key, value, side, bound, is_bound in (
        ("ratio_clip_max", high, "above", 1 + high, 1 <= high <= 2),
        ("ratio_clip_min", low, "below", 1 - low, 0.6 <= low < 1),
    ):
        if is_bound:
            yield Hit(
                f"loss_fn.{key}",
                f"{value:g} is a distance from 1, so the ratio is clipped {side} {bound:.6g}; if the bound itself is "
                "meant, {fix}",
                fix={f"loss_fn.{key}": round(abs(1 - value), 6)},
            )
    if high > 2:  # CISPO's bound is for a weight, and of another size
        yield Hit("loss_fn.ratio_clip_max", f"{high:g}: no ratio above 1 is clipped, as under use_cispo: true alone")


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
                "gradient. GSPO's 3.0e-4 and 4.0e-4 are for the geometric mean of a sequence; {fix}, or "
                "sequence_level_importance_ratios: true and token_level_loss: false",
                fix={f"loss_fn.{key}": 0.2},
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
            f"{effect}; set 3 or more, or {{fix}}",
            fix={f"{'grpo' if facts.get(section) is None else section}.use_leave_one_out_baseline": False},
        )


@rule(
    "GM011",
    "warning",
    "the numbers that NeMo-RL's recipes set the key to",
    needs=("nemo_rl",),
    needs_loss=False,
    applies_to_lab=False,
    gives_way=True,
)
def _unusual_number(facts: RecipeFacts) -> Iterator[Hit]:
    """Number far outside the range of NeMo-RL's own recipes."""
    assert facts.nemo_rl is not None
    for key, origin in user_keys(facts):
        if (value := facts.number(key)) is None:
            continue
        usual = numbers_in_recipes(facts.nemo_rl, *section_and_name(key))
        if is_unusual(value, usual) and not is_switched_off(key, facts):
            yield Hit(
                key,
                f"{as_yaml(facts.get(key))} is far from what NeMo-RL's recipes have here: {min(usual):g} to "
                f"{max(usual):g}, in {len(usual)} settings; if it is meant, say so by a comment, or --ignore",
                origin,
            )


def is_unusual(value: float, usual: Sequence[float]) -> bool:
    """Return True for a 0 or a sign that no recipe has, and for a size many times beyond those of all."""
    if len(usual) < _FEWEST_SETTINGS:
        return False
    sizes = {abs(each) for each in usual if each * value > 0}
    if not sizes:
        return any(usual) if value else 0 not in usual
    return len(sizes) >= _FEWEST_SIZES and not min(sizes) / _FACTOR <= abs(value) <= max(sizes) * _FACTOR
