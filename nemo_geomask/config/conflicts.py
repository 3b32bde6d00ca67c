"""Table of conflicts in a ``loss_fn:`` block: settings that contradict each other or have no effect.

This table holds the rules that need nothing but the block. ``tools/check`` has the rules on a whole recipe, and the
``Variant`` of each objective names the settings that the objective refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_geomask.config.conflict_rule import ConflictRule, Severity
from nemo_geomask.config.correction_conflicts import ANCHOR, CORRECTION, MASKS_ONLY, TRUNCATION
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.config.ratio_conflicts import CISPO, KL_AND_NLL, NORMALIZATION, POLICY_MASKS, PRESTEP, RATIO
from nemo_geomask.errors import Problem
from nemo_geomask.yaml_text import as_yaml

# Order matters: find_conflicts checks `depends_on` against the conflicts above only.
CONFLICTS: tuple[ConflictRule, ...] = (
    *NORMALIZATION,
    *RATIO,
    *POLICY_MASKS,
    *CISPO,
    *ANCHOR,
    *TRUNCATION,
    *CORRECTION,
    *MASKS_ONLY,
    *KL_AND_NLL,
    *PRESTEP,
)
"""Every conflict, in the order in which they are reported."""


class Conflict(NamedTuple):
    """Settings of one block that contradict each other; :class:`ConflictRule` describes the attributes."""

    keys: tuple[str, ...]
    template: str  # the values of these settings, and how to resolve the conflict, with ``{fix}`` for ``fix``
    fix: Mapping[str, Any] = {}
    depends_on: tuple[str, ...] = ()


def find_conflicts(settings: LossSettings, severity: Severity = "error") -> tuple[Conflict, ...]:
    """Return the conflicts of one severity, without those that may only follow from an earlier conflict."""
    conflicts: list[Conflict] = []
    disputed: set[str] = set()
    for rule in CONFLICTS:
        if rule.severity == severity and disputed.isdisjoint(rule.depends_on) and rule.applies(settings):
            values = {key: value(settings) if callable(value) else value for key, value in rule.fix.items()}
            fix = {key: value for key, value in values.items() if getattr(settings, key) != value}
            conflicts.append(Conflict(rule.keys, rule.message.format_map(_Values(settings)), fix, rule.depends_on))
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
    fix = dict.fromkeys(normalize, False)
    problems = (
        Problem(budgets, f"a budget {reason}; give the mask bounds (min, max), or {trainer}"),
        Problem(normalize, f"the weight's mean {reason}; {{fix}}, or {trainer}", fix=fix),
    )
    return tuple(problem for problem in problems if problem.keys)


class _Values(dict[str, str]):
    """Mapping from a setting's key to its value as text, for ``str.format_map`` on a message template."""

    def __init__(self, settings: LossSettings) -> None:
        super().__init__(fix="{fix}")
        self._settings = settings

    def __missing__(self, key: str) -> str:
        value: Any = getattr(self._settings, key)
        if isinstance(value, tuple):
            return ", ".join(value)
        return f"{value:g}" if isinstance(value, float) else as_yaml(value)
