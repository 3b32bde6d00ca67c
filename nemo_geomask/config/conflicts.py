"""Settings of a loss that contradict each other, or that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_geomask.config.strict import as_yaml

if TYPE_CHECKING:
    from nemo_geomask.config.loss import LossSettings

__all__ = ["Conflict", "conflicts"]


@dataclass(frozen=True)
class Conflict:
    """A contradiction.

    Attributes:
        keys: the settings that are at odds, the one to change first.
        message: their values, and the way out.
        rests_on: settings whose value counts only through what is derived from it. Where one of them is at odds with
            yet another, this contradiction is but a consequence.
    """

    keys: tuple[str, ...]
    message: str
    rests_on: tuple[str, ...] = ()


def conflicts(settings: LossSettings) -> tuple[Conflict, ...]:
    """The contradictions between settings, without those that are the consequence of another."""
    found: list[Conflict] = []
    # Causes come before consequences.
    for rules in (_normalization, _ratio, _anchor, _truncation, _correction, _rest):
        for conflict in rules(settings):
            disputed = {key for other in found for key in other.keys}
            if disputed.isdisjoint(conflict.rests_on):
                found.append(conflict)
    return tuple(found)


def _normalization(settings: LossSettings) -> Iterator[Conflict]:
    chosen, by_token = settings.loss_normalization, settings.token_level_loss
    if "token_level_loss" in settings.model_fields_set and chosen is not None and by_token != (chosen == "tokens"):
        yield Conflict(
            ("token_level_loss", "loss_normalization"),
            f"token_level_loss: {as_yaml(by_token)} contradicts loss_normalization: {chosen}; set token_level_loss: "
            f"{as_yaml(not by_token)}, or remove loss_normalization",
        )
    constant = settings.loss_normalization_constant
    if chosen == "constant" and constant is None:
        yield Conflict(
            ("loss_normalization", "loss_normalization_constant"),
            "loss_normalization: constant needs loss_normalization_constant; give it (in tokens, usually the longest "
            "response allowed)",
        )
    elif chosen != "constant" and constant is not None:
        yield Conflict(
            ("loss_normalization_constant", "loss_normalization"),
            f"loss_normalization_constant: {constant:g} needs loss_normalization: constant; set that, or remove the "
            "constant",
        )


def _ratio(settings: LossSettings) -> Iterator[Conflict]:
    chosen = settings.loss_normalization
    if settings.sequence_level_importance_ratios and settings.token_level_loss and chosen is None:
        yield Conflict(
            ("token_level_loss", "sequence_level_importance_ratios"),
            "sequence_level_importance_ratios: true needs a sequence-level loss, but token_level_loss is true; set "
            "token_level_loss: false, or state loss_normalization: tokens to weight sequences by their length",
            rests_on=("loss_normalization",),
        )
    dual_clip = settings.ratio_clip_c
    if settings.disable_ppo_ratio and dual_clip is not None and not settings.force_on_policy_ratio:
        yield Conflict(
            ("ratio_clip_c", "disable_ppo_ratio"),
            f"ratio_clip_c: {dual_clip:g} bounds the ratio that disable_ppo_ratio: true removes; set ratio_clip_c: "
            "null",
            rests_on=("force_on_policy_ratio",),
        )
    if settings.use_cispo:
        yield from _cispo(settings)


def _anchor(settings: LossSettings) -> Iterator[Conflict]:
    fraction = settings.audit_fraction
    if fraction and settings.knows_prev:
        all_of_them = "leaves them out" if settings.force_on_policy_ratio else "has all of them computed"
        yield Conflict(
            ("audit_fraction", "ratio_anchor"),
            f"audit_fraction: {fraction:g} scores a sample where prev_logprobs are not computed, but this "
            f"configuration {all_of_them}; set audit_fraction: 0",
        )
    if fraction and settings.metrics != "full":
        yield Conflict(
            ("audit_fraction", "metrics"),
            f"audit_fraction: {fraction:g} computes prev_logprobs for metrics that metrics: {settings.metrics} leaves "
            "out; set metrics: full, or audit_fraction: 0",
        )
    if settings.ratio_anchor != "gen":
        return
    for key, why in {
        "disable_ppo_ratio": "removes the ratio",
        "force_on_policy_ratio": "sets the ratio to 1",
    }.items():
        if getattr(settings, key):
            yield Conflict(
                ("ratio_anchor", key),
                f"ratio_anchor: gen says what the ratio is taken against, but {key}: true {why}; unset one of them "
                "(without ratio or clip, force_on_policy_ratio: true with use_importance_sampling_correction: true is "
                "anchored on the generation engine)",
            )
    for key, value in _shaping(settings).items():
        yield Conflict(
            (key, "ratio_anchor"),
            f"{key}: {as_yaml(value)} shapes the weight against the mismatch, which ratio_anchor: gen has in its "
            f"ratio (the weight is 1); remove {key}, or set ratio_anchor: prev",
        )


def _cispo(settings: LossSettings) -> Iterator[Conflict]:
    at_odds = {
        "disable_ppo_ratio": "needs the ratio that disable_ppo_ratio: true removes",
        "force_on_policy_ratio": "clips the ratio that force_on_policy_ratio: true sets to 1",
        "sequence_level_importance_ratios": "is defined on token ratios, not with sequence_level_importance_ratios: "
        "true",
    }
    for key, why in at_odds.items():
        if getattr(settings, key):
            yield Conflict(("use_cispo", key), f"use_cispo: true {why}; unset one of them")
    if settings.ratio_clip_c is not None:
        yield Conflict(
            ("ratio_clip_c", "use_cispo"),
            f"use_cispo: true has no dual clip, but ratio_clip_c is {settings.ratio_clip_c:g}; set ratio_clip_c: null",
        )
    chosen = settings.loss_normalization
    otherwise = "or use_cispo: false with name: cispo, which takes any normalization"
    if chosen not in (None, "tokens"):
        yield Conflict(
            ("use_cispo", "loss_normalization"),
            f"use_cispo: true needs a token-level loss, but loss_normalization is {chosen}; set loss_normalization: "
            f"tokens, {otherwise}",
        )
    elif chosen is None and not settings.token_level_loss:
        yield Conflict(
            ("use_cispo", "token_level_loss"),
            "use_cispo: true needs a token-level loss, but token_level_loss is false; set token_level_loss: true, "
            f"{otherwise}",
            rests_on=("loss_normalization",),
        )


def _truncation(settings: LossSettings) -> Iterator[Conflict]:
    kind_key, high_key = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
    low_key = f"{high_key}_min"
    kind, high, low = (getattr(settings, key) for key in (kind_key, high_key, low_key))
    if kind not in (None, "tis"):
        if high is None:
            yield Conflict(
                (kind_key, high_key),
                f"{kind_key}: {kind} needs {high_key}; give the upper bound, or set the type to null",
            )
        if low is None and settings.own_truncation is None:
            yield Conflict(
                (kind_key, low_key), f"{kind_key}: {kind} needs {low_key}; give the lower bound (0 for none)"
            )
    given = {key: value for key, value in {low_key: low, high_key: high}.items() if value is not None}
    if kind is None and given:
        found = " and ".join(f"{key}: {value:g}" for key, value in given.items())
        needs = "needs" if len(given) == 1 else "need"
        yield Conflict((*given, kind_key), f"{found} {needs} {kind_key}; set it to tis, icepop or seq-mask-tis")
    if kind == "tis" and high is None and low is not None:
        yield Conflict(
            (low_key, high_key), f"{low_key}: {low:g} needs {high_key}; give the upper bound, or set {low_key}: null"
        )
    if low is not None and high is not None and low > high:
        yield Conflict((low_key, high_key), f"{low_key}: {low:g} exceeds {high_key}: {high:g}; swap them")


def _shaping(settings: LossSettings) -> dict[str, Any]:
    """Settings that shape the weight against the mismatch, as they stand."""
    kind = settings.truncated_importance_sampling_type
    # A tis without a ratio truncates nothing; v0.6.0's base recipes have it.
    truncates = kind != "tis" or settings.truncated_importance_sampling_ratio is not None
    shapes = {
        "is_correction_level": settings.is_correction_level,
        "is_correction_batch_normalize": settings.is_correction_batch_normalize or None,
        "truncated_importance_sampling_type": kind if truncates else None,
    }
    return {key: value for key, value in shapes.items() if value is not None}


def _correction(settings: LossSettings) -> Iterator[Conflict]:
    switch, level = "use_importance_sampling_correction", settings.is_correction_level
    kind = settings.truncated_importance_sampling_type
    off = f"while {switch} is false; set"
    why = {
        "truncated_importance_sampling_type": f"truncates a weight that is not applied {off} it to true, or the type "
        "to null",
        "is_correction_batch_normalize": f"has no effect {off} that to true, or this to false",
        "is_correction_level": f"has no effect {off} it to true, or remove the level",
    }
    if not settings.use_importance_sampling_correction:
        given = _shaping(settings)
        for key in (key for key in why if key in given):
            yield Conflict((key, switch), f"{key}: {as_yaml(given[key])} {why[key]}", rests_on=("ratio_anchor",))
    if kind == "seq-mask-tis" and settings.correction_level != "token":
        key, found = "is_correction_level", f"is_correction_level is {level}"
        if level is None:
            key = "sequence_level_importance_ratios"
            found = f"{key}: true makes them one a sequence"
        yield Conflict(
            ("truncated_importance_sampling_type", key),
            f"truncated_importance_sampling_type: seq-mask-tis keeps token weights, but {found}; set "
            "is_correction_level: token",
            rests_on=("is_correction_level", key) if level is None else (),
        )


def _rest(settings: LossSettings) -> Iterator[Conflict]:
    gradient = settings.reference_policy_kl_gradient
    if gradient is not None and settings.use_kl_in_reward:
        yield Conflict(
            ("reference_policy_kl_gradient", "use_kl_in_reward"),
            f"reference_policy_kl_gradient: {gradient} has no effect without a KL term (use_kl_in_reward: true); set "
            "that to false, or remove reference_policy_kl_gradient",
        )
    if settings.reference_policy_kl_type == "k4" and settings.use_kl_in_reward:
        yield Conflict(
            ("reference_policy_kl_type", "use_kl_in_reward"),
            "reference_policy_kl_type: k4 is not known to NeMo-RL, which computes the penalty under use_kl_in_reward: "
            "true; choose k1, k2 or k3",
        )
    if settings.positive_example_nll_normalization != "microbatch" and settings.positive_example_nll_weight == 0:
        yield Conflict(
            ("positive_example_nll_normalization", "positive_example_nll_weight"),
            f"positive_example_nll_normalization: {settings.positive_example_nll_normalization} has no effect while "
            "positive_example_nll_weight is 0; give a weight, or remove it",
        )
    if settings.denominator == "kept" and not settings.rules_before_step:
        yield Conflict(
            ("denominator", "masks"),
            "denominator: kept counts what the masks on the mismatch keep, but masks has none such; add one "
            "(geometric, icepop, veto, …), or set denominator: original",
        )
    for key, what in settings.looks.items():
        if settings.force_on_policy_ratio:
            yield Conflict(
                (key, "force_on_policy_ratio"),
                f"{what} looks at prev_logprobs before the step, which force_on_policy_ratio: true does without; unset "
                "one of them",
            )
