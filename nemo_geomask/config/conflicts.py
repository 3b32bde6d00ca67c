"""Settings of a loss that contradict each other, or that do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_geomask.config.loss import LossConfig

__all__ = ["conflicts"]


def conflicts(config: LossConfig) -> list[tuple[bool, str]]:
    """Every rule: whether it is broken, and a message that names the keys and the way out."""
    given = config.model_fields_set
    kind = config.truncated_importance_sampling_type
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    by_token = config.normalization == "tokens"
    return [
        (
            "token_level_loss" in given
            and config.loss_normalization is not None
            and config.token_level_loss != (config.loss_normalization == "tokens"),
            f"token_level_loss: {str(config.token_level_loss).lower()} contradicts loss_normalization: "
            f"{config.loss_normalization}; set token_level_loss: {str(not config.token_level_loss).lower()}, or leave "
            "one of the two out",
        ),
        (
            (config.loss_normalization == "constant") != (config.loss_normalization_constant is not None),
            "loss_normalization: constant and loss_normalization_constant go together; set both or neither",
        ),
        (
            config.sequence_level_importance_ratios and by_token and config.loss_normalization is None,
            "sequence_level_importance_ratios: true needs a sequence-level loss, but token_level_loss is true; set "
            "token_level_loss: false, or state loss_normalization: tokens to weight sequences by their length",
        ),
        (
            config.use_cispo and config.disable_ppo_ratio,
            "use_cispo: true needs the ratio that disable_ppo_ratio: true removes; unset one of them",
        ),
        (
            config.use_cispo and config.force_on_policy_ratio,
            "use_cispo: true clips the ratio that force_on_policy_ratio: true sets to 1; unset one of them",
        ),
        (
            config.use_cispo and config.sequence_level_importance_ratios,
            "use_cispo: true is defined on token ratios, not with sequence_level_importance_ratios: true; unset "
            "one of them",
        ),
        (
            config.use_cispo and config.ratio_clip_c is not None,
            f"use_cispo: true has no dual clip, but ratio_clip_c is {config.ratio_clip_c}; set ratio_clip_c: null",
        ),
        (
            config.use_cispo and not by_token,
            "use_cispo: true needs a token-level loss, but token_level_loss is false; set token_level_loss: true, "
            "or use_cispo: false with name: cispo, which takes any normalization",
        ),
        (
            config.disable_ppo_ratio and config.ratio_clip_c is not None and not config.force_on_policy_ratio,
            f"ratio_clip_c: {config.ratio_clip_c} bounds the ratio that disable_ppo_ratio: true removes; set "
            "ratio_clip_c: null",
        ),
        (
            kind is not None and high is not None and not config.use_importance_sampling_correction,
            f"truncated_importance_sampling_type: {kind} truncates a weight that is not applied while "
            "use_importance_sampling_correction is false; set it to true",
        ),
        (
            kind in ("icepop", "seq-mask-tis") and high is None,
            f"truncated_importance_sampling_type: {kind} needs truncated_importance_sampling_ratio; give the upper "
            "bound, or set the type to null",
        ),
        (
            kind in ("icepop", "seq-mask-tis") and low is None,
            f"truncated_importance_sampling_type: {kind} needs truncated_importance_sampling_ratio_min; give the "
            "lower bound (0 for none)",
        ),
        (
            kind is None and high is not None,
            f"truncated_importance_sampling_ratio: {high} needs truncated_importance_sampling_type; set it to tis, "
            "icepop or seq-mask-tis",
        ),
        (
            low is not None and high is not None and low > high,
            f"truncated_importance_sampling_ratio_min: {low} exceeds truncated_importance_sampling_ratio: {high}; "
            "swap them",
        ),
        (
            kind == "seq-mask-tis" and config.correction_level != "token",
            f"truncated_importance_sampling_type: seq-mask-tis keeps token weights, but the level in force is "
            f"{config.correction_level}; set is_correction_level: token",
        ),
        (
            config.is_correction_level is not None and not config.use_importance_sampling_correction,
            f"is_correction_level: {config.is_correction_level} has no effect while "
            "use_importance_sampling_correction is false; set it to true, or remove the level",
        ),
        (
            config.reference_policy_kl_gradient is not None and config.kl_coefficient == 0,
            f"reference_policy_kl_gradient: {config.reference_policy_kl_gradient} has no effect without a KL term "
            "(reference_policy_kl_penalty: 0 or use_kl_in_reward: true); give a penalty, or remove it",
        ),
        (
            config.reference_policy_kl_type == "k4" and config.use_kl_in_reward,
            "reference_policy_kl_type: k4 is not known to NeMo-RL, which computes the penalty under "
            "use_kl_in_reward: true; choose k1, k2 or k3",
        ),
        (
            config.positive_example_nll_normalization != "microbatch" and config.positive_example_nll_weight == 0,
            "positive_example_nll_normalization has no effect while positive_example_nll_weight is 0; give a "
            "weight, or remove it",
        ),
        (
            config.denominator == "kept" and not config.rules_before_step,
            "denominator: kept counts what the masks on the mismatch keep, but masks has none such; add one "
            "(geometric, icepop, veto, …), or set denominator: original",
        ),
        (
            config.force_on_policy_ratio and (config.denominator == "kept" or config.batch_veto is not None),
            f"{'batch_veto' if config.batch_veto is not None else 'denominator: kept'} looks at prev_logprobs before "
            "the step, which force_on_policy_ratio: true does without; unset one of them",
        ),
    ]
