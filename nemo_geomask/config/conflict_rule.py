"""Rule on settings of a ``loss_fn:`` block that contradict each other, and conditions that several rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_geomask.config.loss_settings import LossSettings

Severity = Literal["error", "warning"]
Condition = Callable[[LossSettings], bool]


@dataclass(frozen=True)
class ConflictRule:
    """One row of :data:`~nemo_geomask.config.conflicts.CONFLICTS`.

    Attributes:
        keys: the settings in conflict; the first is the one to change first.
        applies: returns True for settings with this conflict.
        message: template; ``{key}`` stands for the value of that setting, or of that property of the settings, and
            ``{fix}`` for the settings of ``fix``.
        fix: settings that resolve the conflict, by key: a value, or a function of the settings that returns it; empty
            if only the user can know them.
        severity: ``error``: :class:`~nemo_geomask.config.LossConfig` refuses the settings; ``warning``:
            :func:`nemo_geomask.build_loss` warns.
        depends_on: settings whose values make this a conflict. If one of them is in an earlier conflict, or has
            an invalid value, this conflict may disappear once that is fixed, and it is not reported.
    """

    keys: tuple[str, ...]
    applies: Condition
    message: str
    fix: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = "error"
    depends_on: tuple[str, ...] = ()


def while_set(key: str, value: str | bool, condition: Callable[[LossSettings], Any]) -> Condition:
    """Return a condition: the setting ``key`` has the value, and the given condition is met."""
    return lambda s: getattr(s, key) == value and bool(condition(s))


def shapes_weight_while(key: str, applies: Condition) -> Condition:
    """Return a condition: ``key`` changes the weight, which other settings leave out or set to 1."""
    if key == "truncated_importance_sampling_type":
        # The base recipes of NeMo-RL v0.6.0 set `tis` without a bound, which truncates nothing.
        return lambda s: applies(s) and (getattr(s, key) not in (None, "tis") or s.truncation is not None)
    return lambda s: applies(s) and getattr(s, key) not in (None, False)  # no level is set; no batch normalization
