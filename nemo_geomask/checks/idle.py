"""GM2: settings that do nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from nemo_geomask.checks.expectation import truncation_bounds
from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule
from nemo_geomask.checks.tree import READ_BY, reads
from nemo_geomask.config.masks import Level, MaskRule

__all__ = ["REACH", "RULES"]

REACH = 0.15
"""Largest mean log-ratio over a sequence that a run is expected to live to see, in nats per token. The mismatch study
gives up a batch at a KL of 0.1 nats per token, and that mean is the KL, up to noise that shrinks with length."""

_STUDY = (
    "the mismatch study (https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-"
    "Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda)"
)


def _bounds_out_of_reach(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    for rule in config.mask_rules:
        # Only here is the size of the statistic known: other levels grow with length or have heavy tails.
        if rule.level == "sequence_mean" and rule.log_ratio == "mismatch":
            yield from _unreachable(rule.key, rule.statistic, rule.low, rule.high)
    pooled = config.applies_weight and config.correction_level == "sequence_mean"
    if config.truncation == "seq-mask-tis" or (config.truncation is not None and pooled):
        yield from _unreachable("loss_fn.truncated_importance_sampling_ratio", "ratio", *truncation_bounds(config))
    if config.batch_veto is not None and config.batch_veto.max > REACH:
        yield Hit(
            "loss_fn.batch_veto.max",
            f"{config.batch_veto.max:g} nats per token: a batch gets there long after the mismatch has ruined the run; "
            "0.1 is the mismatch study's",
        )


def _unreachable(key: str, statistic: str, low: float, high: float) -> Iterator[Hit]:
    finite = [bound for bound in (low, high) if math.isfinite(bound)]
    if finite and all(abs(bound) > REACH for bound in finite):
        if statistic == "ratio":
            bounds = ", ".join(f"{math.exp(bound):.4g}" for bound in finite)
            reach = f"[{math.exp(-REACH):.2f}, {math.exp(REACH):.2f}]"
            example = "0.99 and 1.01 are common"
        else:
            bounds, reach, example = f"{finite[-1]:.4g}", f"[0, {REACH}]", "0.001 to 0.01 are common"
        yield Hit(
            key,
            f"a mean over the sequence, bounded at {bounds}: it stays within {reach} until the mismatch has long "
            f"ruined the run, so this removes nothing; {example}",
        )


def _mask_implied(facts: RecipeFacts) -> Iterator[Hit]:
    rules = facts.config.mask_rules
    for index, rule in enumerate(rules):
        for other_index, other in enumerate(rules):
            first = other_index < index or not _implies(rule, other)
            if other is not rule and first and _implies(other, rule):
                yield Hit(
                    rule.key,
                    f"mask {rule.label} keeps whatever mask {other.label} ({other.key}) keeps, so it removes "
                    "nothing more; drop it, or tighten its bounds",
                )
                break


def _implies(strict: MaskRule, wide: MaskRule) -> bool:
    """Whether all that ``strict`` keeps, ``wide`` keeps."""
    if (strict.log_ratio, strict.statistic) != (wide.log_ratio, wide.statistic) or strict.budgeted or wide.budgeted:
        return False
    same_advantage = strict.when == wide.when and strict.by_token == wide.by_token
    if strict.when != "always" and not same_advantage:
        return False
    levels = {
        ("sequence_max", "token"),
        ("sequence_max", "sequence_mean"),  # a mean of values inside an interval is inside
        *((level, level) for level in get_args(Level)),
        # A mean is its sum shrunk towards 0.
        *([("sequence", "sequence_mean")] if strict.low <= 0 <= strict.high else []),
    }
    return (strict.level, wide.level) in levels and wide.low <= strict.low and strict.high <= wide.high


def _policy_mask_on_policy(facts: RecipeFacts) -> Iterator[Hit]:
    forced = facts.config.force_on_policy_ratio
    if not forced and facts.updates != 1:
        return
    why = "loss_fn.force_on_policy_ratio: true" if forced else "one optimiser step for each rollout batch"
    for rule in facts.config.mask_rules:
        if rule.log_ratio == "policy":
            yield Hit(
                rule.key,
                f"mask {rule.label} looks at curr - prev, which is 0 with {why}; use log_ratio: total, or smaller "
                "policy.train_global_batch_size",
            )


def _sequence_clip_out_of_reach(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    if not config.sequence_level_importance_ratios or config.force_on_policy_ratio or config.disable_ppo_ratio:
        return
    # What the loss itself doubts is reported there.
    doubted = {key for doubt in facts.doubts for key in doubt.keys}
    for key, bound in (("ratio_clip_min", 1 - config.ratio_clip_min), ("ratio_clip_max", 1 + config.ratio_clip_max)):
        # A lower bound of 0 says outright that there is none.
        if bound > 0 and abs(math.log(bound)) > REACH and f"loss_fn.{key}" not in doubted:
            yield Hit(
                f"loss_fn.{key}",
                f"{key}: {getattr(config, key):g} bounds a mean over the sequence at {bound:g}, which a policy reaches "
                f"only after moving by {abs(math.log(bound)):.2f} nats per token within one rollout batch; GSPO's are "
                "3.0e-4 and 4.0e-4",
            )


def _key_not_read(facts: RecipeFacts) -> Iterator[Hit]:
    assert facts.nemo_rl is not None
    for key in READ_BY:
        if facts.get(key) not in (None, False, [], "processed_logprobs") and not reads(facts.nemo_rl, key):
            yield Hit(key, f"the NeMo-RL in {facts.nemo_rl} does not read this key; it takes a newer one")


# The advantage estimator that puts the KL into the reward, by the algorithm's section.
_REWARD_KL = {"grpo": "reinforce_plus_plus", "ppo": "gae"}


def _kl_in_no_reward(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    if not config.use_kl_in_reward or not config.reference_policy_kl_penalty:
        return
    key = f"{facts.algorithm}.adv_estimator.name"
    estimator = facts.get(key, "gae" if facts.algorithm == "ppo" else "grpo")
    wanted = _REWARD_KL[facts.algorithm]
    if estimator != wanted:
        yield Hit(
            "loss_fn.use_kl_in_reward",
            f"takes the KL out of the loss, and the advantage estimator ({estimator}) does not put it into the reward: "
            f"nothing holds the policy to the reference; set {key} to {wanted}, or use_kl_in_reward to false",
        )


def _kl_estimator(facts: RecipeFacts) -> Iterator[Hit]:
    config, value = facts.config, facts.config.reference_policy_kl_type
    if not config.reference_policy_kl_penalty:
        return
    if config.use_kl_in_reward:
        if value in ("k2", "k3"):
            yield Hit(
                "loss_fn.reference_policy_kl_type",
                f"{value} in the reward: there only k1 gives the gradient of the KL; that of {value} is biased"
                + (", and its e^(ref - curr) grows without bound where the policy moves away" if value == "k3" else "")
                + "; set k1",
            )
    elif config.reference_policy_kl_gradient == "k1":
        yield Hit(
            "loss_fn.reference_policy_kl_gradient",
            "k1: the derivative of curr - ref alone is that of curr, which does not look at the reference and has the "
            "mean 0: noise, and no pull; set k2, or null",
        )
    elif value == "k2" and config.reference_policy_kl_gradient is None:
        yield Hit(
            "loss_fn.reference_policy_kl_type",
            "k2 with NeMo-RL's gradient, that of the weighted value: biased, also on-policy; set name: clipped_pg (or "
            "another) and reference_policy_kl_gradient: k2, or reference_policy_kl_type: k3",
        )


def _documents_in_no_loop(facts: RecipeFacts) -> Iterator[Hit]:
    if "lab" not in facts.recipe.data and facts.get("policy.docs_per_step") is not None:
        yield Hit(
            "policy.docs_per_step",
            "the lab's: NeMo-RL's loops form steps of policy.train_global_batch_size sequences and do not read it; set "
            "that and loss_fn.loss_normalization: documents, or call nemo_geomask.parallel.collect_documents in a loop "
            "of your own",
        )


RULES = (
    Rule("GM201", "warning", "bounds on a mean that nothing reaches", _STUDY, _bounds_out_of_reach),
    Rule("GM202", "warning", "a mask that another one implies", "docs/masks.md", _mask_implied),
    Rule(
        "GM203",
        "warning",
        "a mask on curr - prev where these are equal",
        "NeMo-RL `force_on_policy_ratio`; docs/masks.md",
        _policy_mask_on_policy,
    ),
    Rule(
        "GM204",
        "warning",
        "clip bounds on a sequence ratio that nothing reaches",
        "GSPO, arXiv:2507.18071 section 5.1",
        _sequence_clip_out_of_reach,
    ),
    Rule(
        "GM205",
        "warning",
        "a key that this NeMo-RL does not read",
        "the source of NeMo-RL v0.6.0, v0.7.0 and main",
        _key_not_read,
        needs=("nemo_rl",),
    ),
    Rule(
        "GM206",
        "error",
        "KL in a reward that nothing computes",
        "NeMo-RL `GRPOAdvantageEstimator`, `GDPOAdvantageEstimator`, `RawRewardAdvantageEstimator`",
        _kl_in_no_reward,
    ),
    Rule("GM207", "warning", "a KL estimator that trains something else than the KL", "docs/kl.md", _kl_estimator),
    Rule(
        "GM208",
        "error",
        "a step of a number of documents, where nothing forms one",
        "the source of NeMo-RL v0.6.0, v0.7.0 and main",
        _documents_in_no_loop,
        needs_loss=False,
    ),
)
