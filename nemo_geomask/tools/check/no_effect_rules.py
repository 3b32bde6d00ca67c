"""Settings without effect, or with an unintended effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.hosts.nemo_rl.facts import (
    SETTING_READERS,
    has_dtensor_v1,
    has_kl_score_function,
    reads_setting,
    resets_reference_on_resume,
)
from nemo_geomask.tools.check.expectation import truncation_bounds
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

LARGEST_MEAN = 0.15
"""Largest absolute mean log-ratio over a sequence that the rules expect in a working run, in nats per token.

The mismatch study skips batches above a KL of 0.1 nats per token, and the mean of -log-ratio estimates this KL. A run
with larger means is assumed to have collapsed already.
"""

_GSPO_CLIP = {"ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}
_MISMATCH_STUDY = (
    "the mismatch study (https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-"
    "Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda)"
)
_NEMO_RL_SOURCE = "the source of NeMo-RL v0.6.0, v0.7.0 and main"


@rule("GM201", "warning", _MISMATCH_STUDY)
def _unreachable_mean_bounds(facts: RecipeFacts) -> Iterator[Hit]:
    """Bounds on a sequence mean that no run reaches."""
    config = facts.config
    for mask in config.mask_rules:
        # Statistics at other levels grow with the length or have heavy tails, so no bound is out of their reach.
        if mask.level == "sequence_mean" and mask.log_ratio == "mismatch":
            yield from _unreachable_bounds(mask.key, mask.statistic, mask.low, mask.high)
    truncates_mean = config.applies_weight and config.correction_level == "sequence_mean"
    if config.truncation == "seq-mask-tis" or (config.truncation is not None and truncates_mean):
        key = "loss_fn.truncated_importance_sampling_ratio"
        yield from _unreachable_bounds(key, "ratio", *truncation_bounds(config))
    if config.batch_veto is not None and config.batch_veto.max > LARGEST_MEAN:
        yield Hit(
            "loss_fn.batch_veto.max",
            f"{config.batch_veto.max:g}: a run collapses long before a batch's mismatch KL reaches so many nats per "
            "token; {fix} as in the mismatch study",
            fix={"loss_fn.batch_veto.max": 0.1},
        )


def _unreachable_bounds(key: str, statistic: str, low: float, high: float) -> Iterator[Hit]:
    """Yield a hit if a working run reaches none of the finite bounds on a mean; bounds on a ratio are logarithms."""
    finite = [bound for bound in (low, high) if math.isfinite(bound)]
    if not finite or any(abs(bound) <= LARGEST_MEAN for bound in finite):
        return
    # Both bounds on one side of the reachable means keep nothing; otherwise they remove nothing.
    removes_all = low > LARGEST_MEAN or high < (-LARGEST_MEAN if statistic == "ratio" else 0)
    if statistic == "ratio":
        bounds = " and ".join(f"{math.exp(bound):.4g}" for bound in finite)
        reach = f"[{math.exp(-LARGEST_MEAN):.2f}, {math.exp(LARGEST_MEAN):.2f}]"
        example = "0.99 and 1.01"
    else:
        bounds, reach, example = f"{finite[-1]:.4g}", f"[0, {LARGEST_MEAN}]", "0.001 to 0.01"
    effect = "keeps only means that no working run has" if removes_all else "removes nothing"
    yield Hit(
        key,
        f"the bound {bounds} on a sequence mean {effect}, because a run whose means leave {reach} has collapsed "
        f"already; common bounds are {example}",
    )


@rule("GM202", "warning", "docs/reference/masks.md")
def _implied_mask(facts: RecipeFacts) -> Iterator[Hit]:
    """Mask that removes nothing beyond another mask."""
    rules = facts.config.mask_rules
    for index, mask in enumerate(rules):
        for other_index, other in enumerate(rules):
            # Of two masks that imply each other, the later one is reported.
            is_reported = other_index < index or not mask.implies(other)
            if other is not mask and is_reported and other.implies(mask):
                yield Hit(
                    mask.key,
                    f"mask {mask.label} keeps everything that mask {other.label} ({other.key}) keeps, so it removes "
                    "nothing more; remove it, or tighten its bounds",
                )
                break


@rule("GM203", "warning", "NeMo-RL `force_on_policy_ratio`; docs/reference/masks.md")
def _policy_mask_on_policy(facts: RecipeFacts) -> Iterator[Hit]:
    """Mask on curr - prev although both are equal."""
    is_forced = facts.config.force_on_policy_ratio
    if not is_forced and facts.steps_per_rollout != 1:
        return
    cause = "loss_fn.force_on_policy_ratio: true" if is_forced else "one optimiser step per rollout batch"
    for mask in facts.config.mask_rules:
        if mask.log_ratio == "policy":
            yield Hit(
                mask.key,
                f"mask {mask.label} tests curr - prev, which is 0 with {cause}; set log_ratio: total, or lower "
                "policy.train_global_batch_size",
            )


@rule("GM204", "warning", "GSPO, arXiv:2507.18071 section 5.1")
def _unreachable_sequence_clip(facts: RecipeFacts) -> Iterator[Hit]:
    """Clip bounds on a sequence ratio that no run reaches."""
    config = facts.config
    if not config.sequence_level_importance_ratios or config.force_on_policy_ratio or config.disable_ppo_ratio:
        return
    # GM002 already reports the bounds that the loss itself warns of.
    reported = {key for warning in facts.warnings for key in warning.keys}
    for key, bound in (("ratio_clip_min", 1 - config.ratio_clip_min), ("ratio_clip_max", 1 + config.ratio_clip_max)):
        # A lower bound of 0 states openly that there is none.
        if bound > 0 and abs(math.log(bound)) > LARGEST_MEAN and f"loss_fn.{key}" not in reported:
            yield Hit(
                f"loss_fn.{key}",
                f"{getattr(config, key):g} bounds a sequence mean at {bound:g}, which a policy reaches only after it "
                f"has moved by {abs(math.log(bound)):.2f} nats per token within one rollout batch; {{fix}} as in GSPO",
                fix={f"loss_fn.{key}": _GSPO_CLIP[key]},
            )


@rule("GM205", "warning", _NEMO_RL_SOURCE, needs=("nemo_rl",))
def _unread_key(facts: RecipeFacts) -> Iterator[Hit]:
    """Key that this version of NeMo-RL does not read."""
    assert facts.nemo_rl is not None
    for key in SETTING_READERS:
        value = facts.get(key)
        if value not in (None, False, [], "processed_logprobs") and not reads_setting(facts.nemo_rl, key):
            yield Hit(key, f"{value}: the NeMo-RL in {facts.nemo_rl} does not read this key; use a newer version")


@rule("GM207", "warning", "docs/background/kl.md")
def _biased_kl_gradient(facts: RecipeFacts) -> Iterator[Hit]:
    """KL estimator whose gradient is not that of the KL."""
    config, estimator = facts.config, facts.config.reference_policy_kl_type
    if not config.reference_policy_kl_penalty:
        return
    if config.use_kl_in_reward:
        # GM206 reports other estimators, which add no KL to the reward.
        adds_kl = facts.get(f"{facts.algorithm}.adv_estimator.name") in (None, "reinforce_plus_plus", "gae")
        if adds_kl and estimator in ("k2", "k3"):
            growth = (
                ", and its e^(ref - curr) grows without bound as the policy moves away" if estimator == "k3" else ""
            )
            yield Hit(
                "loss_fn.reference_policy_kl_type",
                f"{estimator}: in the reward, its gradient is a biased estimate of the KL's{growth}; {{fix}}, the only "
                "unbiased one there",
                fix={"loss_fn.reference_policy_kl_type": "k1"},
            )
    elif facts.trains_nemo_rl_loss and facts.nemo_rl is not None and not has_kl_score_function(facts.nemo_rl):
        if estimator == "k1":  # there, k2 is unbiased
            yield Hit(
                "loss_fn.reference_policy_kl_type",
                "k1: this NeMo-RL differentiates curr - ref without the score function that later ones add. That is "
                "the derivative of curr alone, whose mean is 0, so it adds noise and does not pull towards the "
                "reference; {fix}, or a name such as clipped_pg, whose KL term has the score function",
                fix={"loss_fn.reference_policy_kl_type": "k2"},
            )
    elif config.reference_policy_kl_gradient == "k1":
        yield Hit(
            "loss_fn.reference_policy_kl_gradient",
            "k1: the derivative of curr - ref is that of curr alone, whose mean is 0, so it adds noise and does not "
            "pull towards the reference; {fix}, or k2",
            fix={"loss_fn.reference_policy_kl_gradient": None},
        )
    elif estimator == "k2" and config.reference_policy_kl_gradient is None:
        yield Hit(
            "loss_fn.reference_policy_kl_type",
            "k2: NeMo-RL differentiates the weighted value, which is biased even on-policy; {fix}, or "
            "reference_policy_kl_gradient: k2 with a name such as clipped_pg",
            fix={"loss_fn.reference_policy_kl_type": "k3"},
        )


@rule("GM209", "warning", "https://github.com/NVIDIA-NeMo/RL/issues/2955")
def _reset_reference(facts: RecipeFacts) -> Iterator[Hit]:
    """Reference policy replaced by the checkpoint's when a run is resumed."""
    key, penalty = "policy.dtensor_cfg._v2", facts.config.reference_policy_kl_penalty
    uses_v2 = facts.uses_dtensor and facts.is_true(key)
    if not (uses_v2 and penalty and facts.is_true("checkpointing.enabled")):
        return
    if facts.nemo_rl is not None and not resets_reference_on_resume(facts.nemo_rl):
        return
    # DTensor v1 lacks LoRA and replicas of shards, and takes no format of checkpoints. Later versions lack v1.
    dtensor = "policy.dtensor_cfg"
    is_possible = not facts.is_true(f"{dtensor}.lora_cfg.enabled") and facts.size(f"{dtensor}.dp_replicate_size") == 1
    has_v1 = facts.nemo_rl is not None and has_dtensor_v1(facts.nemo_rl)
    fix = {key: False, "checkpointing.model_save_format": None} if is_possible and has_v1 else {}
    yield Hit(
        key,
        "true: DTensor v2's workers copy the reference policy after they have loaded a checkpoint, so when a run is "
        f"resumed (checkpointing.enabled: true), loss_fn.reference_policy_kl_penalty: {penalty:g} applies to the "
        "distance to the checkpoint's policy instead of the original one; "
        + ("{fix} (DTensor v1), " if fix else "")
        + "train with policy.megatron_cfg.enabled: true, set the penalty to 0, or start such a run anew",
        fix=fix,
    )
