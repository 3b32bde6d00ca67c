"""Table of conflicts in a ``loss_fn:`` block: settings that contradict each other or have no effect.

This table holds the rules that need nothing but the block. ``tools/check`` has the rules on a whole recipe, and the
``Variant`` of each objective names the settings that the objective refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from nemo_geomask.config.loss_settings import PRESTEP_REASONS, LossSettings
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import Problem

Severity = Literal["error", "warning"]
Condition = Callable[[LossSettings], bool]


@dataclass(frozen=True)
class Conflict:
    """Settings of one block that contradict each other.

    Attributes:
        keys: the settings in conflict; the first is the one to change first.
        message: the values of these settings, and how to resolve the conflict.
        depends_on: settings whose values make this a conflict. If one of them is in an earlier conflict, or has
            an invalid value, this conflict may disappear once that is fixed, and it is not reported.
    """

    keys: tuple[str, ...]
    message: str
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConflictRule:
    """One row of :data:`CONFLICTS`.

    Attributes:
        keys: see :class:`Conflict`.
        applies: returns True for settings with this conflict.
        message: template; ``{key}`` stands for the value of that setting, or of that property of the settings.
        severity: ``error``: :class:`~nemo_geomask.config.LossConfig` refuses the settings; ``warning``:
            :func:`nemo_geomask.build_loss` warns.
        depends_on: see :class:`Conflict`.
    """

    keys: tuple[str, ...]
    applies: Condition
    message: str
    severity: Severity = "error"
    depends_on: tuple[str, ...] = ()


def find_conflicts(settings: LossSettings, severity: Severity = "error") -> tuple[Conflict, ...]:
    """Return the conflicts of one severity, without those that may only follow from an earlier conflict."""
    conflicts: list[Conflict] = []
    disputed: set[str] = set()
    for rule in CONFLICTS:
        if rule.severity == severity and disputed.isdisjoint(rule.depends_on) and rule.applies(settings):
            conflicts.append(Conflict(rule.keys, rule.message.format_map(_Values(settings)), rule.depends_on))
            disputed.update(rule.keys)
    return tuple(conflicts)


def whole_batch_problems(settings: LossSettings) -> tuple[Problem, ...]:
    """Return a problem for each setting that needs the whole batch: budgets and the weight's mean."""
    budgets = tuple(rule.key for rule in settings.budget_rules)
    normalize = ("loss_fn.is_correction_batch_normalize",) if settings.is_correction_batch_normalize else ()
    reason = (
        "is computed over the whole batch, but this trainer trains on parts of a batch as they arrive (as NeMo-RL's "
        "single controller does)"
    )
    trainer = "use a trainer that has the whole batch before the step"
    problems = (
        Problem(budgets, f"a budget {reason}; give the mask bounds (min, max), or {trainer}"),
        Problem(normalize, f"the weight's mean {reason}; set false, or {trainer}"),
    )
    return tuple(problem for problem in problems if problem.keys)


class _Values(dict[str, str]):
    """Mapping from a setting's key to its value as text, for ``str.format_map`` on a message template."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings

    def __missing__(self, key: str) -> str:
        value: Any = getattr(self._settings, key)
        if isinstance(value, tuple):
            return ", ".join(value)
        return f"{value:g}" if isinstance(value, float) else as_yaml(value)


def _both_on(first: str, second: str) -> Condition:
    """Return a condition: both switches are on."""
    return lambda s: bool(getattr(s, first)) and bool(getattr(s, second))


def _shapes_weight(key: str) -> Condition:
    """Return a condition: the setting ``key`` changes the weight against the mismatch."""
    if key == "truncated_importance_sampling_type":
        # The base recipes of NeMo-RL v0.6.0 set `tis` without a bound, which truncates nothing.
        return lambda s: s.truncated_importance_sampling_type not in (None, "tis") or s.truncation is not None
    return lambda s: getattr(s, key) not in (None, False)  # None: no level is set; False: no batch normalization


def _on_under_gen(key: str) -> Condition:
    """Return a condition: the switch ``key`` is on under ``ratio_anchor: gen``."""
    return lambda s: s.ratio_anchor == "gen" and bool(getattr(s, key))


def _shapes_weight_while(key: str, applies: Condition) -> Condition:
    """Return a condition: ``key`` changes the weight, which other settings leave out or set to 1."""
    shapes_weight = _shapes_weight(key)
    return lambda s: applies(s) and shapes_weight(s)


def _bounds_without_type(*, low: bool, high: bool) -> Condition:
    """Return a condition: no truncation type is set, and of its bounds exactly those that are passed as True."""
    return lambda s: (
        s.truncated_importance_sampling_type is None
        and (s.truncated_importance_sampling_ratio_min is not None) == low
        and (s.truncated_importance_sampling_ratio is not None) == high
    )


def _needs_prestep_without_prev(key: str) -> Condition:
    """Return a condition: ``key`` needs the pre-step pass, which reads ``prev_logprobs``, but they are not computed."""
    return lambda s: s.force_on_policy_ratio and key in s.prestep_reasons


_NORMALIZATION = (
    ConflictRule(
        ("token_level_loss", "loss_normalization"),
        lambda s: (
            "token_level_loss" in s.model_fields_set
            and s.token_level_loss
            and s.loss_normalization not in (None, "tokens")
        ),
        "token_level_loss: true contradicts loss_normalization: {loss_normalization}; set token_level_loss: false, or "
        "remove loss_normalization",
    ),
    ConflictRule(
        ("token_level_loss", "loss_normalization"),
        lambda s: (
            "token_level_loss" in s.model_fields_set and not s.token_level_loss and s.loss_normalization == "tokens"
        ),
        "token_level_loss: false contradicts loss_normalization: tokens; set token_level_loss: true, or remove "
        "loss_normalization",
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
        "loss_normalization_constant: {loss_normalization_constant} needs loss_normalization: constant; set that, or "
        "remove the constant",
    ),
)

_RATIO = (
    ConflictRule(
        ("token_level_loss", "sequence_level_importance_ratios"),
        lambda s: s.sequence_level_importance_ratios and s.token_level_loss and s.loss_normalization is None,
        "sequence_level_importance_ratios: true needs a sequence-level loss, but token_level_loss is true; set "
        "token_level_loss: false, or state loss_normalization: tokens to weight sequences by their length",
        depends_on=("loss_normalization",),
    ),
    ConflictRule(
        ("ratio_clip_c", "disable_ppo_ratio"),
        lambda s: s.disable_ppo_ratio and s.ratio_clip_c is not None and not s.force_on_policy_ratio,
        "ratio_clip_c: {ratio_clip_c} has no effect, since it bounds the ratio that disable_ppo_ratio: true removes; "
        "set ratio_clip_c: null",
        depends_on=("force_on_policy_ratio",),
        severity="warning",
    ),
)

_POLICY_MASKS = (
    ConflictRule(
        ("masks", "force_on_policy_ratio"),
        lambda s: s.force_on_policy_ratio and any(rule.log_ratio == "policy" for rule in s.mask_rules),
        "a mask on log_ratio: policy compares curr with prev, which force_on_policy_ratio: true takes to be equal, so "
        "it removes nothing, or everything; give the mask log_ratio: total or mismatch, remove it, or set "
        "force_on_policy_ratio: false",
        severity="warning",
    ),
)

_CISPO_ALTERNATIVE = "or use_cispo: false with name: cispo, which takes any normalization"
_CISPO = (
    ConflictRule(
        ("use_cispo", "disable_ppo_ratio"),
        _both_on("use_cispo", "disable_ppo_ratio"),
        "use_cispo: true needs the ratio that disable_ppo_ratio: true removes; unset one of them",
    ),
    ConflictRule(
        ("use_cispo", "force_on_policy_ratio"),
        _both_on("use_cispo", "force_on_policy_ratio"),
        "use_cispo: true clips the ratio that force_on_policy_ratio: true sets to 1; unset one of them",
    ),
    ConflictRule(
        ("use_cispo", "sequence_level_importance_ratios"),
        _both_on("use_cispo", "sequence_level_importance_ratios"),
        "use_cispo: true is defined on token ratios, not with sequence_level_importance_ratios: true; unset one of "
        "them",
    ),
    ConflictRule(
        ("ratio_clip_c", "use_cispo"),
        lambda s: s.use_cispo and s.ratio_clip_c is not None,
        "use_cispo: true has no dual clip, but ratio_clip_c is {ratio_clip_c}; set ratio_clip_c: null",
    ),
    ConflictRule(
        ("use_cispo", "loss_normalization"),
        lambda s: s.use_cispo and s.loss_normalization not in (None, "tokens"),
        "use_cispo: true needs a token-level loss, but loss_normalization is {loss_normalization}; set "
        f"loss_normalization: tokens, {_CISPO_ALTERNATIVE}",
    ),
    ConflictRule(
        ("use_cispo", "token_level_loss"),
        lambda s: s.use_cispo and s.loss_normalization is None and not s.token_level_loss,
        "use_cispo: true needs a token-level loss, but token_level_loss is false; set token_level_loss: true, "
        f"{_CISPO_ALTERNATIVE}",
        depends_on=("loss_normalization",),
    ),
)

_ANCHOR = (
    ConflictRule(
        ("audit_fraction", "ratio_anchor"),
        lambda s: s.audit_fraction > 0 and s.knows_prev and not s.force_on_policy_ratio,
        "audit_fraction: {audit_fraction} has prev_logprobs computed for a sample of the sequences, but this "
        "configuration has them computed for all sequences anyway; set audit_fraction: 0",
    ),
    ConflictRule(
        ("audit_fraction", "force_on_policy_ratio"),
        lambda s: s.audit_fraction > 0 and s.force_on_policy_ratio,
        "audit_fraction: {audit_fraction} has prev_logprobs computed for a sample of the sequences, but "
        "force_on_policy_ratio: true leaves them out; set audit_fraction: 0",
    ),
    ConflictRule(
        ("audit_fraction", "metrics"),
        lambda s: s.audit_fraction > 0 and s.metrics != "full",
        "audit_fraction: {audit_fraction} computes prev_logprobs for metrics that metrics: {metrics} leaves out; set "
        "metrics: full, or audit_fraction: 0",
    ),
    *(
        ConflictRule(
            ("ratio_anchor", key),
            _on_under_gen(key),
            f"ratio_anchor: gen sets the policy that the ratio is taken against, but {key}: true {effect}; unset one "
            "of them (for a gradient that is corrected against the generation engine without ratio and clip, remove "
            "ratio_anchor and set force_on_policy_ratio: true and use_importance_sampling_correction: true)",
        )
        for key, effect in {
            "disable_ppo_ratio": "removes the ratio",
            "force_on_policy_ratio": "sets the ratio to 1",
        }.items()
    ),
    *(
        ConflictRule(
            (key, "ratio_anchor"),
            _shapes_weight_while(key, lambda s: s.ratio_anchor == "gen"),
            f"{key}: {{{key}}} shapes the weight against the mismatch, but under ratio_anchor: gen the ratio itself "
            f"contains the mismatch and the weight is 1; remove {key}, or set ratio_anchor: prev",
        )
        for key in ("is_correction_level", "is_correction_batch_normalize", "truncated_importance_sampling_type")
    ),
    ConflictRule(
        ("ratio_anchor", "name"),
        lambda s: bool(s.objective_masks_on_total) and s.ratio_anchor == "prev" and not s.applies_weight,
        "ratio_anchor: prev takes the ratio against π_old, but mask {objective_masks_on_total} of name: {name} "
        "compares with the generation engine, and no weight corrects the mismatch between the two; the objective's "
        "authors use one policy for both. Remove ratio_anchor, or set use_importance_sampling_correction: true; for "
        "both against π_old, as in verl, choose name: cispo and give the mask log_ratio: policy",
        severity="warning",
    ),
)

_TYPE = "truncated_importance_sampling_type"
_HIGH = "truncated_importance_sampling_ratio"
_LOW = "truncated_importance_sampling_ratio_min"


_TRUNCATION = (
    ConflictRule(
        (_TYPE, _HIGH),
        lambda s: (
            s.truncated_importance_sampling_type not in (None, "tis") and s.truncated_importance_sampling_ratio is None
        ),
        f"{_TYPE}: {{{_TYPE}}} needs {_HIGH}; give the upper bound, or set the type to null",
    ),
    ConflictRule(
        (_TYPE, _LOW),
        lambda s: (
            s.truncated_importance_sampling_type not in (None, "tis")
            and s.truncated_importance_sampling_ratio_min is None
            and s.plugin_truncation is None
        ),
        f"{_TYPE}: {{{_TYPE}}} needs {_LOW}; give the lower bound (0 for none)",
    ),
    ConflictRule(
        (_LOW, _TYPE),
        _bounds_without_type(low=True, high=False),
        f"{_LOW}: {{{_LOW}}} needs {_TYPE}; set it to tis, icepop or seq-mask-tis",
    ),
    ConflictRule(
        (_HIGH, _TYPE),
        _bounds_without_type(low=False, high=True),
        f"{_HIGH}: {{{_HIGH}}} needs {_TYPE}; set it to tis, icepop or seq-mask-tis",
    ),
    ConflictRule(
        (_LOW, _HIGH, _TYPE),
        _bounds_without_type(low=True, high=True),
        f"{_LOW}: {{{_LOW}}} and {_HIGH}: {{{_HIGH}}} need {_TYPE}; set it to tis, icepop or seq-mask-tis",
    ),
    ConflictRule(
        (_LOW, _HIGH),
        lambda s: (
            s.truncated_importance_sampling_type == "tis"
            and s.truncated_importance_sampling_ratio is None
            and s.truncated_importance_sampling_ratio_min is not None
        ),
        f"{_LOW}: {{{_LOW}}} needs {_HIGH}; give the upper bound, or set {_LOW}: null",
    ),
    ConflictRule(
        (_LOW, _HIGH),
        lambda s: (
            s.truncated_importance_sampling_ratio_min is not None
            and s.truncated_importance_sampling_ratio is not None
            and s.truncated_importance_sampling_ratio_min > s.truncated_importance_sampling_ratio
        ),
        f"{_LOW}: {{{_LOW}}} exceeds {_HIGH}: {{{_HIGH}}}; swap them",
    ),
    ConflictRule(
        (_TYPE,),
        lambda s: s.truncated_importance_sampling_type == "tis" and s.truncated_importance_sampling_ratio is None,
        f"{_TYPE}: tis does nothing while {_HIGH} is null; give a ratio, or set the type to null",
        severity="warning",
    ),
)

_SWITCH = "use_importance_sampling_correction"
_CORRECTION = (
    ConflictRule(
        (_TYPE, _SWITCH),
        _shapes_weight_while(_TYPE, lambda s: not s.use_importance_sampling_correction),
        f"{_TYPE}: {{{_TYPE}}} truncates a weight that is not applied while {_SWITCH} is false; set it to true, or the "
        "type to null",
        depends_on=("ratio_anchor",),
    ),
    ConflictRule(
        ("is_correction_batch_normalize", _SWITCH),
        _shapes_weight_while("is_correction_batch_normalize", lambda s: not s.use_importance_sampling_correction),
        f"is_correction_batch_normalize: true has no effect while {_SWITCH} is false; set that to true, or this to "
        "false",
        depends_on=("ratio_anchor",),
    ),
    ConflictRule(
        ("is_correction_level", _SWITCH),
        _shapes_weight_while("is_correction_level", lambda s: not s.use_importance_sampling_correction),
        f"is_correction_level: {{is_correction_level}} has no effect while {_SWITCH} is false; set it to true, or "
        "remove the level",
        depends_on=("ratio_anchor",),
    ),
    ConflictRule(
        (_TYPE, "is_correction_level"),
        lambda s: (
            s.truncated_importance_sampling_type == "seq-mask-tis" and s.is_correction_level not in (None, "token")
        ),
        f"{_TYPE}: seq-mask-tis keeps token weights, but is_correction_level is {{is_correction_level}}; set "
        "is_correction_level: token",
    ),
    ConflictRule(
        (_TYPE, "sequence_level_importance_ratios"),
        lambda s: (
            s.truncated_importance_sampling_type == "seq-mask-tis"
            and s.is_correction_level is None
            and s.sequence_level_importance_ratios
        ),
        f"{_TYPE}: seq-mask-tis keeps token weights, but sequence_level_importance_ratios: true gives each sequence "
        "one weight; set is_correction_level: token",
        depends_on=("is_correction_level", "sequence_level_importance_ratios"),
    ),
)

_MASKS_ONLY = (
    *(
        ConflictRule(
            ("is_correction_level", key),
            _shapes_weight_while(key, lambda s: s.is_correction_level == "masks_only"),
            f"is_correction_level: masks_only has a weight of 1, which {key} would change; remove one of them",
        )
        for key in (_TYPE, "is_correction_batch_normalize")
    ),
    ConflictRule(
        ("is_correction_level", "masks"),
        lambda s: s.is_correction_level == "masks_only" and not s.mask_rules,
        "is_correction_level: masks_only leaves the mismatch to the masks, but there is none; add a mask, or choose "
        "another level",
    ),
)

_KL_AND_NLL = (
    ConflictRule(
        ("kl_ratio_anchor", "use_on_policy_kl_approximation"),
        lambda s: s.kl_ratio_anchor == "prev" and not (s.use_on_policy_kl_approximation and s.kl_coefficient),
        "kl_ratio_anchor: prev weights the KL term by the policy ratio, but there is no such weight without "
        "use_on_policy_kl_approximation: true and a KL term in the loss; set both, or remove kl_ratio_anchor",
    ),
    ConflictRule(
        ("kl_tokens", "masks"),
        lambda s: s.kl_tokens == "kept" and not (s.rules_in_loss and s.kl_coefficient),
        "kl_tokens: kept restricts the KL term to what masks in the loss keep, but there is no such mask, or no KL "
        "term; add one, or remove kl_tokens",
    ),
    ConflictRule(
        ("reference_policy_kl_gradient", "use_kl_in_reward"),
        lambda s: s.reference_policy_kl_gradient is not None and s.use_kl_in_reward,
        "reference_policy_kl_gradient: {reference_policy_kl_gradient} has no effect without a KL term "
        "(use_kl_in_reward: true); set that to false, or remove reference_policy_kl_gradient",
    ),
    ConflictRule(
        ("reference_policy_kl_gradient", "reference_policy_kl_penalty"),
        lambda s: s.reference_policy_kl_gradient is not None and s.reference_policy_kl_penalty == 0,
        "reference_policy_kl_gradient: {reference_policy_kl_gradient} has no effect while reference_policy_kl_penalty "
        "is 0; give a penalty, or remove reference_policy_kl_gradient",
    ),
    ConflictRule(
        ("reference_policy_kl_type", "use_kl_in_reward"),
        lambda s: s.reference_policy_kl_type == "k4" and s.use_kl_in_reward,
        "reference_policy_kl_type: k4 is not known to NeMo-RL, which computes the penalty under use_kl_in_reward: "
        "true; choose k1, k2 or k3",
    ),
    ConflictRule(
        ("positive_example_nll_normalization", "positive_example_nll_weight"),
        lambda s: s.positive_example_nll_normalization != "microbatch" and s.positive_example_nll_weight == 0,
        "positive_example_nll_normalization: {positive_example_nll_normalization} has no effect while "
        "positive_example_nll_weight is 0; give a weight, or remove it",
    ),
)

_PRESTEP = (
    ConflictRule(
        ("denominator", "masks"),
        lambda s: s.denominator == "kept" and not s.rules_before_step,
        "denominator: kept counts what the masks on the mismatch keep, but no entry of masks is on the mismatch; add "
        "one (geometric, icepop, veto, …), or set denominator: original",
    ),
    *(
        ConflictRule(
            (key, "force_on_policy_ratio"),
            _needs_prestep_without_prev(key),
            f"{reason} reads prev_logprobs before the step, which force_on_policy_ratio: true leaves out; unset one of "
            "them",
        )
        for key, reason in PRESTEP_REASONS.items()
    ),
)

# Order matters: find_conflicts checks `depends_on` against the conflicts above only.
CONFLICTS: tuple[ConflictRule, ...] = (
    *_NORMALIZATION,
    *_RATIO,
    *_POLICY_MASKS,
    *_CISPO,
    *_ANCHOR,
    *_TRUNCATION,
    *_CORRECTION,
    *_MASKS_ONLY,
    *_KL_AND_NLL,
    *_PRESTEP,
)
"""Every conflict, in the order in which they are reported."""
