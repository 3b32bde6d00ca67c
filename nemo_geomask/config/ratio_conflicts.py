"""Conflicts about the policy ratio and what the loss is divided by, the KL and NLL terms, and the pre-step pass."""

from __future__ import annotations

from operator import attrgetter

from nemo_geomask.config.conflict_rule import Condition, ConflictRule, while_set
from nemo_geomask.config.loss_settings import PRESTEP_REASONS

NORMALIZATION = (
    ConflictRule(
        ("token_level_loss", "loss_normalization"),
        lambda s: (
            "token_level_loss" in s.model_fields_set
            and s.token_level_loss
            and s.loss_normalization not in (None, "tokens")
        ),
        "token_level_loss: true contradicts loss_normalization: {loss_normalization}; {fix}, or remove "
        "loss_normalization",
        {"token_level_loss": False},
    ),
    ConflictRule(
        ("token_level_loss", "loss_normalization"),
        lambda s: (
            "token_level_loss" in s.model_fields_set and not s.token_level_loss and s.loss_normalization == "tokens"
        ),
        "token_level_loss: false contradicts loss_normalization: tokens; {fix}, or remove loss_normalization",
        {"token_level_loss": True},
    ),
    ConflictRule(
        ("loss_normalization", "loss_normalization_constant"),
        lambda s: s.loss_normalization == "constant" and s.loss_normalization_constant is None,
        "loss_normalization: constant needs loss_normalization_constant; give it (in tokens, usually the longest "
        "response allowed)",
    ),
    ConflictRule(
        ("loss_normalization_constant", "loss_normalization"),
        lambda s: s.loss_normalization != "constant" and s.loss_normalization_constant is not None,
        "loss_normalization_constant: {loss_normalization_constant} needs loss_normalization: constant; {fix}, or "
        "remove the constant",
        {"loss_normalization": "constant", "token_level_loss": False},
    ),
)

RATIO = (
    ConflictRule(
        ("token_level_loss", "sequence_level_importance_ratios"),
        lambda s: s.sequence_level_importance_ratios and s.token_level_loss and s.loss_normalization is None,
        "sequence_level_importance_ratios: true needs a sequence-level loss, but token_level_loss is true; {fix}, or "
        "give loss_fn a name and loss_normalization: tokens to weight sequences by their length",
        {"token_level_loss": False},
        depends_on=("loss_normalization",),
    ),
    ConflictRule(
        ("ratio_clip_c", "disable_ppo_ratio"),
        lambda s: s.disable_ppo_ratio and s.ratio_clip_c is not None and not s.force_on_policy_ratio,
        "ratio_clip_c: {ratio_clip_c} has no effect, since it bounds the ratio that disable_ppo_ratio: true removes; "
        "{fix}",
        {"ratio_clip_c": None},
        severity="warning",
        depends_on=("force_on_policy_ratio",),
    ),
)

POLICY_MASKS = (
    ConflictRule(
        ("masks", "force_on_policy_ratio"),
        lambda s: s.force_on_policy_ratio and any(rule.log_ratio == "policy" for rule in s.mask_rules),
        "a mask on log_ratio: policy compares curr with prev, which force_on_policy_ratio: true takes to be equal, so "
        "it removes nothing, or everything; give the mask log_ratio: total or mismatch, remove it, or set "
        "force_on_policy_ratio: false",
        severity="warning",
    ),
)

_MEAN_OVER_TOKENS = {"loss_normalization": "tokens", "token_level_loss": True, "loss_normalization_constant": None}
_NLL = "positive_example_nll_weight"
_ALTERNATIVE = "or use_cispo: false with name: cispo, which takes any normalization"
_CISPO_AGAINST = {
    "disable_ppo_ratio": "needs the ratio that disable_ppo_ratio: true removes",
    "force_on_policy_ratio": "clips the ratio that force_on_policy_ratio: true sets to 1",
    "sequence_level_importance_ratios": "is defined on token ratios, not with sequence_level_importance_ratios: true",
}
CISPO = (
    *(
        ConflictRule(
            ("use_cispo", key),
            while_set("use_cispo", True, attrgetter(key)),
            f"use_cispo: true {reason}; unset one of them",
        )
        for key, reason in _CISPO_AGAINST.items()
    ),
    ConflictRule(
        ("ratio_clip_c", "use_cispo"),
        lambda s: s.use_cispo and s.ratio_clip_c is not None,
        "use_cispo: true has no dual clip, but ratio_clip_c is {ratio_clip_c}; {fix}",
        {"ratio_clip_c": None},
    ),
    ConflictRule(
        ("use_cispo", "loss_normalization"),
        lambda s: s.use_cispo and s.loss_normalization not in (None, "tokens"),
        f"use_cispo: true needs a token-level loss, but loss_normalization is {{loss_normalization}}; {{fix}}, "
        f"{_ALTERNATIVE}",
        _MEAN_OVER_TOKENS,
    ),
    ConflictRule(
        ("use_cispo", "token_level_loss"),
        lambda s: s.use_cispo and s.loss_normalization is None and not s.token_level_loss,
        f"use_cispo: true needs a token-level loss, but token_level_loss is false; {{fix}}, {_ALTERNATIVE}",
        {"token_level_loss": True},
        depends_on=("loss_normalization",),
    ),
)

KL_AND_NLL = (
    ConflictRule(
        ("kl_ratio_anchor", "use_on_policy_kl_approximation"),
        lambda s: s.kl_ratio_anchor == "prev" and not (s.use_on_policy_kl_approximation and s.kl_coefficient),
        "kl_ratio_anchor: prev weights the KL term by the policy ratio, but there is no such weight without "
        "use_on_policy_kl_approximation: true and a KL term in the loss; set both, or {fix}",
        {"kl_ratio_anchor": "gen"},
    ),
    ConflictRule(
        ("kl_tokens", "masks"),
        lambda s: s.kl_tokens == "kept" and not (s.rules_in_loss and s.kl_coefficient),
        "kl_tokens: kept restricts the KL term to what masks in the loss keep, but there is no such mask, or no KL "
        "term; add one, or {fix}",
        {"kl_tokens": "trained"},
    ),
    ConflictRule(
        ("reference_policy_kl_gradient", "use_kl_in_reward"),
        lambda s: s.reference_policy_kl_gradient is not None and s.use_kl_in_reward,
        "reference_policy_kl_gradient: {reference_policy_kl_gradient} has no effect without a KL term "
        "(use_kl_in_reward: true); set that to false, or {fix}",
        {"reference_policy_kl_gradient": None},
    ),
    ConflictRule(
        ("reference_policy_kl_gradient", "reference_policy_kl_penalty"),
        lambda s: s.reference_policy_kl_gradient is not None and s.reference_policy_kl_penalty == 0,
        "reference_policy_kl_gradient: {reference_policy_kl_gradient} has no effect while reference_policy_kl_penalty "
        "is 0; give a penalty, or {fix}",
        {"reference_policy_kl_gradient": None},
    ),
    ConflictRule(
        ("reference_policy_kl_type", "use_kl_in_reward"),
        lambda s: s.reference_policy_kl_type == "k4" and s.use_kl_in_reward,
        "reference_policy_kl_type: k4 is not known to NeMo-RL, which computes the penalty under use_kl_in_reward: "
        "true; {fix}, which alone is unbiased there",
        {"reference_policy_kl_type": "k1"},
    ),
    ConflictRule(
        ("positive_example_nll_normalization", "positive_example_nll_weight"),
        lambda s: s.positive_example_nll_normalization != "microbatch" and s.positive_example_nll_weight == 0,
        "positive_example_nll_normalization: {positive_example_nll_normalization} has no effect while "
        "positive_example_nll_weight is 0; give a weight, or {fix}",
        {"positive_example_nll_normalization": "microbatch"},
    ),
)


def _needs_prestep_without_prev(key: str, switch: str) -> Condition:
    """Return a condition: ``key`` needs the pre-step pass, but ``switch`` leaves out what it reads, prev_logprobs."""
    return lambda s: getattr(s, switch) in (True, "interpolated") and key in s.prestep_reasons


PRESTEP = (
    ConflictRule(
        ("denominator", "masks"),
        lambda s: s.denominator == "kept" and not s.rules_before_step,
        "denominator: kept counts what the masks on the mismatch keep, but no entry of masks is on the mismatch; add "
        "one (geometric, icepop, veto, …), or {fix}",
        {"denominator": "original"},
    ),
    *(
        ConflictRule(
            ("denominator", key),
            while_set("denominator", "kept_in_loss", applies),
            "denominator: kept_in_loss multiplies the gradient by G/K, the step's tokens by those that its masks keep, "
            "which is right for a mean over tokens that all terms share; {fix}",
            fix,
        )
        for key, applies, fix in (
            ("masks", lambda s: not s.rules_in_loss, {"denominator": "original"}),
            ("loss_normalization", lambda s: s.normalization != "tokens", _MEAN_OVER_TOKENS),
            ("kl_tokens", lambda s: s.kl_coefficient and s.kl_tokens != "kept", {"kl_tokens": "kept"}),
            (_NLL, attrgetter(_NLL), {_NLL: 0.0}),
        )
    ),
    *(
        ConflictRule(
            (key, switch),
            _needs_prestep_without_prev(key, switch),
            f"{reason} reads prev_logprobs before the step, which {switch}: {{{switch}}} leaves out; unset one of them",
        )
        for key, reason in PRESTEP_REASONS.items()
        for switch in ("force_on_policy_ratio", "proximal_policy")
    ),
)
