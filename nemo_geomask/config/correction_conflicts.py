"""Conflicts about the policy that ratios are taken against, and the weight against the mismatch."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from nemo_geomask.config.conflict_rule import Condition, ConflictRule, shapes_weight_while, while_set

_TYPE = "truncated_importance_sampling_type"
_HIGH = "truncated_importance_sampling_ratio"
_LOW = "truncated_importance_sampling_ratio_min"
_SWITCH = "use_importance_sampling_correction"
_NO_TRUNCATION = {_TYPE: None, _HIGH: None, _LOW: None}
_NO_WEIGHT: dict[str, dict[str, Any]] = {
    "is_correction_level": {"is_correction_level": None},
    "is_correction_batch_normalize": {"is_correction_batch_normalize": False},
    _TYPE: _NO_TRUNCATION,
}
"""Settings that shape the weight, and what leaves each of them out."""

_AUDIT = "audit_fraction: {audit_fraction} has prev_logprobs computed for a sample of the sequences, but"
ANCHOR = (
    ConflictRule(
        ("audit_fraction", "ratio_anchor"),
        lambda s: s.audit_fraction > 0 and s.needs_prev,
        f"{_AUDIT} this configuration has them computed for all sequences anyway; {{fix}}",
        {"audit_fraction": 0.0},
    ),
    ConflictRule(
        ("audit_fraction", "force_on_policy_ratio"),
        lambda s: s.audit_fraction > 0 and s.force_on_policy_ratio,
        f"{_AUDIT} force_on_policy_ratio: true leaves them out; {{fix}}",
        {"audit_fraction": 0.0},
    ),
    ConflictRule(
        ("audit_fraction", "metrics"),
        lambda s: s.audit_fraction > 0 and s.metrics != "full",
        "audit_fraction: {audit_fraction} computes prev_logprobs for metrics that metrics: {metrics} leaves out; "
        "{fix}, or audit_fraction: 0",
        {"metrics": "full"},
    ),
    *(
        ConflictRule(
            ("ratio_anchor", key),
            lambda s, key=key: s.ratio_anchor == "gen" and bool(getattr(s, key)),  # type: ignore[misc]
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
            shapes_weight_while(key, lambda s: s.ratio_anchor == "gen"),
            f"{key}: {{{key}}} shapes the weight against the mismatch, but under ratio_anchor: gen the ratio itself "
            f"contains the mismatch and the weight is 1; {{fix}}, or ratio_anchor: prev",
            fix,
        )
        for key, fix in _NO_WEIGHT.items()
    ),
    *(
        ConflictRule(
            ("proximal_policy", key),
            while_set("proximal_policy", "interpolated", applies),
            f"proximal_policy: interpolated replaces prev_logprobs, but {key}: {{{key}}} {effect}; {{fix}}",
            {"proximal_policy": "recomputed"},
        )
        for key, applies, effect in (
            ("ratio_anchor", lambda s: s.ratio_anchor == "gen", "takes the ratio against the generation engine"),
            ("force_on_policy_ratio", lambda s: s.force_on_policy_ratio, "takes π_old to be the current policy"),
            ("use_kl_in_reward", lambda s: s.use_kl_in_reward, "reads prev_logprobs"),
        )
    ),
    ConflictRule(
        ("ratio_anchor", "name"),
        lambda s: bool(s.objective_masks_on_total) and s.ratio_anchor == "prev" and not s.applies_weight,
        "ratio_anchor: prev takes the ratio against π_old, but mask {objective_masks_on_total} of name: {name} "
        "compares with the generation engine, and no weight corrects the mismatch between the two; the objective's "
        "authors use one policy for both. Remove ratio_anchor, or {fix}; for both against π_old, as in verl, choose "
        "name: cispo and give the mask log_ratio: policy",
        {_SWITCH: True},
        severity="warning",
    ),
)


def _bounds_without_type(*, low: bool, high: bool) -> Condition:
    """Return a condition: no truncation type is set, and of its bounds exactly those that are passed as True."""
    return lambda s: (
        s.truncated_importance_sampling_type is None
        and (s.truncated_importance_sampling_ratio_min is not None) == low
        and (s.truncated_importance_sampling_ratio is not None) == high
    )


_NAMES = "tis, icepop or seq-mask-tis"
TRUNCATION = (
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
        f"{_LOW}: {{{_LOW}}} needs {_TYPE}; set it to {_NAMES}",
    ),
    ConflictRule(
        (_HIGH, _TYPE),
        _bounds_without_type(low=False, high=True),
        f"{_HIGH}: {{{_HIGH}}} needs {_TYPE}; {{fix}}, or another type ({_NAMES})",
        {_TYPE: "tis", _SWITCH: True},
    ),
    ConflictRule(
        (_LOW, _HIGH, _TYPE),
        _bounds_without_type(low=True, high=True),
        f"{_LOW}: {{{_LOW}}} and {_HIGH}: {{{_HIGH}}} need {_TYPE}; set it to {_NAMES}",
    ),
    ConflictRule(
        (_LOW, _HIGH),
        lambda s: (
            s.truncated_importance_sampling_type == "tis"
            and s.truncated_importance_sampling_ratio is None
            and s.truncated_importance_sampling_ratio_min is not None
        ),
        f"{_LOW}: {{{_LOW}}} needs {_HIGH}; give the upper bound, or {{fix}}",
        {_LOW: None},
    ),
    ConflictRule(
        (_LOW, _HIGH),
        lambda s: (
            s.truncated_importance_sampling_ratio_min is not None
            and s.truncated_importance_sampling_ratio is not None
            and s.truncated_importance_sampling_ratio_min > s.truncated_importance_sampling_ratio
        ),
        f"{_LOW}: {{{_LOW}}} exceeds {_HIGH}: {{{_HIGH}}}; swap them",
        {_LOW: attrgetter(_HIGH), _HIGH: attrgetter(_LOW)},
    ),
    ConflictRule(
        (_TYPE,),
        lambda s: s.truncated_importance_sampling_type == "tis" and s.truncated_importance_sampling_ratio is None,
        f"{_TYPE}: tis does nothing while {_HIGH} is null; give a ratio, or {{fix}}",
        _NO_TRUNCATION,
        severity="warning",
    ),
)

CORRECTION = (
    ConflictRule(
        (_TYPE, _SWITCH),
        shapes_weight_while(_TYPE, lambda s: not s.use_importance_sampling_correction),
        f"{_TYPE}: {{{_TYPE}}} truncates a weight that is not applied while {_SWITCH} is false; {{fix}}, or the type "
        "to null",
        {_SWITCH: True},
        depends_on=("ratio_anchor",),
    ),
    *(
        ConflictRule(
            (key, _SWITCH),
            shapes_weight_while(key, lambda s: not s.use_importance_sampling_correction),
            f"{key}: {{{key}}} has no effect while {_SWITCH} is false; {{fix}}, or remove {key}",
            {_SWITCH: True},
            depends_on=("ratio_anchor",),
        )
        for key in ("is_correction_batch_normalize", "is_correction_level")
    ),
    ConflictRule(
        (_TYPE, "is_correction_level"),
        lambda s: (
            s.truncated_importance_sampling_type == "seq-mask-tis" and s.is_correction_level not in (None, "token")
        ),
        f"{_TYPE}: seq-mask-tis keeps token weights, but is_correction_level is {{is_correction_level}}; {{fix}}",
        {"is_correction_level": "token"},
    ),
    ConflictRule(
        (_TYPE, "sequence_level_importance_ratios"),
        lambda s: (
            s.truncated_importance_sampling_type == "seq-mask-tis"
            and s.is_correction_level is None
            and s.sequence_level_importance_ratios
        ),
        f"{_TYPE}: seq-mask-tis keeps token weights, but sequence_level_importance_ratios: true gives each sequence "
        "one weight; {fix}",
        {"is_correction_level": "token"},
        depends_on=("is_correction_level", "sequence_level_importance_ratios"),
    ),
)

MASKS_ONLY = (
    *(
        ConflictRule(
            ("is_correction_level", key),
            shapes_weight_while(key, lambda s: s.is_correction_level == "masks_only"),
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
