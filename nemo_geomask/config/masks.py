"""Mask rules: one raw form, which the presets fill in.

Every rejection rule is ``(log_ratio, level, statistic, min, max, when)``; a preset fills in most of it. Bounds on a
ratio are always on ρ itself, in the direction that the log-ratio's definition says, both ends inclusive.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from nemo_geomask.config.corrections import SIGNED, STATISTICS, MaskStatistic
from nemo_geomask.config.strict import StrictModel

__all__ = [
    "Allowance",
    "Interval",
    "Level",
    "LogRatio",
    "MaskBase",
    "MaskPreset",
    "MaskRule",
    "RawMask",
    "Statistic",
    "When",
    "mask_rules",
    "wrong_label",
]

LogRatio = Literal["mismatch", "policy", "total"]
Statistic = Annotated[str, STATISTICS]
Level = Literal[
    "token", "sequence", "sequence_mean", "sequence_max", "prefix_sum", "prefix_mean", "prefix_min", "prefix_max"
]
When = Literal["always", "negative_advantage", "positive_advantage", "pushing"]


@dataclass(frozen=True)
class Allowance:
    """How far a prefix may drift, of level ``prefix_excess``: see :class:`Cppo`."""

    weight_min: float
    budget_min: float
    quantile: float
    scale: float


@dataclass(frozen=True)
class MaskRule:
    """A rule in the form that the loss evaluates; ``low`` and ``high`` are in the units of the pooled statistic
    (logarithms for ``ratio``)."""

    label: str
    log_ratio: LogRatio
    level: Level | Literal["prefix_excess"]
    statistic: Statistic
    low: float
    high: float
    when: When
    allowance: Allowance | None = None
    measure: MaskStatistic | None = None
    """The statistic itself, where another distribution brings it."""
    drop_at_most: float | None = None
    until_mean: float | None = None
    key: str = ""
    """The setting that it comes from."""

    @property
    def budgeted(self) -> bool:
        """Whether its bound is set by the batch: the largest size of the pooled statistic within the budget."""
        return self.drop_at_most is not None or self.until_mean is not None

    @property
    def prefix(self) -> bool:
        """Whether it pools over each token's prefix."""
        return self.level.startswith("prefix")

    @property
    def by_token(self) -> bool:
        """Whether it judges tokens, and not sequences."""
        return self.level == "token" or self.prefix


_LABEL = r"^[a-z][a-z0-9_]*$"


def wrong_label(label: str) -> str:
    """Why it can't stand in the name of a metric; empty where it can."""
    if "_min" in label or "_max" in label:
        return f"label '{label}' holds '_min' or '_max', which NeMo-RL reads as an extremum; choose another"
    return "" if re.fullmatch(_LABEL, label) else f"label '{label}' does not match {_LABEL}; give the mask another"


class MaskBase(StrictModel):
    """What every mask has."""

    label: str | None = Field(
        default=None,
        pattern=_LABEL,
        description="Name of the mask in metrics; the preset's name if not given.",
    )

    @model_validator(mode="after")
    def _check_label(self) -> MaskBase:
        if self.label and (wrong := wrong_label(self.label)):
            raise ValueError(wrong)
        return self

    def rule(self) -> MaskRule:
        """The raw rule, with bounds in the units of its statistic (logarithms for ``ratio``)."""
        raise NotImplementedError

    def as_rule(
        self,
        log_ratio: LogRatio,
        level: Level,
        statistic: Statistic,
        low: float | None,
        high: float | None,
        when: When = "always",
    ) -> MaskRule:
        """Of bounds as they are written: None is none, and on a ratio neither is 0."""
        units = math.log if statistic == "ratio" else float
        low, high = (None if bound == 0 and statistic not in SIGNED else bound for bound in (low, high))
        bounds = -math.inf if low is None else units(low), math.inf if high is None else units(high)
        label = str(self.label or getattr(self, "preset", "mask"))
        return MaskRule(label, log_ratio, level, statistic, *bounds, when)


class Interval(MaskBase):
    """A mask on the mismatch ratio between two bounds."""

    min: float | None = Field(default=None, ge=0, description="Smallest ratio kept; null: no lower bound.")
    max: float | None = Field(default=None, gt=0, description="Largest ratio kept; null: no upper bound.")
    pooled: ClassVar[Level] = "token"

    @model_validator(mode="after")
    def _check_interval(self) -> Interval:
        if not self.min and self.max is None:
            raise ValueError("a mask without 'max' and without a 'min' above 0 removes nothing; give a bound")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"'min' ({self.min}) exceeds 'max' ({self.max}), which removes everything; swap them")
        return self

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self.as_rule("mismatch", self.pooled, "ratio", self.min, self.max)


class RawMask(MaskBase):
    """The form behind every preset."""

    log_ratio: LogRatio = Field(description="mismatch: prev - gen; policy: curr - prev; total: curr - gen.")
    level: Level = Field(
        description="Over what the statistic is pooled; sequence_max: every token must be inside; prefix_…: over the "
        "sequence's tokens up to this one, which alone is judged."
    )
    statistic: Statistic = Field(default="ratio", description="What is compared with the bounds.")
    min: float | None = Field(
        default=None, description="Smallest value kept, at most 0 on prob_diff and binary_kl…; null: no lower bound."
    )
    max: float | None = Field(default=None, gt=0, description="Largest value kept; null: no upper bound.")
    drop_at_most: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="In place of bounds: remove this share of the batch's tokens or sequences, those whose statistic "
        "is largest in size; of equal ones all or none, so that no more go.",
    )
    until_mean: float | None = Field(
        default=None,
        gt=0,
        description="In place of bounds: remove from the largest on, until the mean size over the batch's rest is at "
        "most this.",
    )
    when: When = Field(
        default="always",
        description="Restrict the rule by the sign of the advantage (the sequence's mean, at sequence levels). "
        "pushing: above max where it is positive, below min where it is negative.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> RawMask:
        if budget := {"drop_at_most", "until_mean"} & {key for key, value in self if value is not None}:
            self._check_budget(budget)
        elif self._signed:
            self._check_signed_bounds()
        else:
            if self.min is not None and self.min < 0:
                raise ValueError(f"'min' ({self.min:g}) must be at least 0, as {self.statistic} is")
            Interval(min=self.min, max=self.max)
            if self.when == "pushing" and self.statistic != "ratio":
                raise ValueError(
                    f"when: pushing needs a direction, which {self.statistic} has not; choose ratio, prob_diff or "
                    "binary_kl"
                )
        if self._signed and self.level in ("sequence", "sequence_mean", "prefix_sum", "prefix_mean"):
            raise ValueError(
                f"level '{self.level}' pools {self.statistic}, whose signs cancel; choose token, sequence_max, "
                "prefix_min or prefix_max"
            )
        return self

    def _check_signed_bounds(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("a mask without 'min' and 'max' removes nothing; give a bound")
        if self.min is not None and self.min >= 0:
            raise ValueError(
                f"'min' ({self.min:g}) must be below 0: {self.statistic} is negative where the token has become less "
                "likely"
            )
        beyond = [bound for bound in (self.min, self.max) if bound is not None and abs(bound) >= 1]
        if self.statistic == "prob_diff" and beyond:
            raise ValueError(f"a bound of {beyond[0]:g} on prob_diff, which lies in [-1, 1], removes nothing")

    @property
    def _signed(self) -> bool:
        own = STATISTICS.find(self.statistic)
        return self.statistic in SIGNED if own is None else bool(own.signed)

    def _check_budget(self, budget: set[str]) -> None:
        first = min(budget)
        given = sorted(budget - {first}) + [key for key in ("min", "max") if getattr(self, key) is not None]
        if given:
            raise ValueError(f"'{first}' takes the place of bounds, but '{given[0]}' is given too; remove one of them")
        if self.log_ratio != "mismatch":
            raise ValueError(
                f"'{first}' is decided over the batch before its step, when the current policy that log_ratio: "
                f"{self.log_ratio} compares is not known; set log_ratio: mismatch, or give min and max"
            )
        if self.when != "always":
            raise ValueError(f"'{first}' ranks all of the batch, which when: {self.when} does not; remove one of them")

    def rule(self) -> MaskRule:
        """The rule with bounds in the units of the statistic."""
        rule = self.as_rule(self.log_ratio, self.level, self.statistic, self.min, self.max, self.when)
        measure = STATISTICS.find(self.statistic)
        return replace(rule, drop_at_most=self.drop_at_most, until_mean=self.until_mean, measure=measure)


class MaskPreset(MaskBase):
    """What a preset of another distribution derives from: a model of its settings, and the rule that they make."""

    preset: str


def mask_rules(masks: tuple[MaskBase, ...], *, of_objective: int = 0) -> tuple[MaskRule, ...]:
    """Rules of a validated list of masks, of which so many come first that the objective brings; repeated labels are
    numbered: ``geometric``, ``geometric_2``."""
    rules: dict[str, MaskRule] = {}
    for index, mask in enumerate(masks, start=-of_objective):
        rule = mask.rule()
        label, count = rule.label, 1
        while label in rules:
            count += 1
            label = f"{rule.label}_{count}"
        rules[label] = replace(rule, label=label, key="loss_fn.name" if index < 0 else f"loss_fn.masks[{index}]")
    return tuple(rules.values())
