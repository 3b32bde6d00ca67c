"""Rejection masks in their raw form, which the presets of ``config.presets`` fill in.

Every rejection rule is ``(log_ratio, level, statistic, min, max, when)``; a preset fills in most of it. Recipes write
bounds on a ratio, not on its logarithm: for ``mismatch``, whose log-ratio is prev − gen, on π_old/μ. Values equal to a
bound are kept.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from nemo_geomask.config.corrections import SIGNED, STATISTICS, MaskStatistic
from nemo_geomask.config.strict import StrictModel

LogRatio = Literal["mismatch", "policy", "total"]
Statistic = Annotated[str, STATISTICS]
Level = Literal[
    "token",
    "turn",
    "turn_mean",
    "sequence",
    "sequence_mean",
    "sequence_max",
    "prefix_sum",
    "prefix_mean",
    "prefix_min",
    "prefix_max",
]
When = Literal["always", "negative_advantage", "positive_advantage", "pushing"]


@dataclass(frozen=True)
class Allowance:
    """Settings of CPPO's limit on the drift of a prefix; :class:`~.presets.Cppo` documents the four fields."""

    weight_min: float
    budget_min: float
    quantile: float
    scale: float


@dataclass(frozen=True)
class MaskRule:
    """One rejection mask in the form that the loss evaluates.

    Attributes:
        label: the mask's name in metrics, unique among the masks of a loss.
        log_ratio: log-ratio that the statistic is computed from.
        level: what the statistic is pooled over. Recipes can't write two levels, each of one preset alone:
            ``prefix_excess`` of ``cppo``, which needs ``allowance``, and ``sequence_mean_size`` of ``vaco``, where a
            token's value is the mean size of the statistic over its sequence, with the sign of its own log-ratio.
        statistic: what is compared with the bounds.
        low: smallest value kept, in the units of the pooled statistic (a logarithm for ``ratio``); -inf: no bound.
        high: largest value kept, in the same units; inf: no bound.
        when: the signs of the advantage under which the rule removes anything.
        allowance: settings of CPPO's limit, for level ``prefix_excess``.
        plugin_statistic: the statistic itself if a plugin provides it.
        drop_at_most: in place of bounds, the largest fraction of the batch to remove.
        until_mean: in place of bounds, the mean that the rest of the batch must not exceed.
        key: the setting that the rule comes from, such as ``loss_fn.masks[0]``.
    """

    label: str
    log_ratio: LogRatio
    level: Level | Literal["prefix_excess", "sequence_mean_size"]
    statistic: Statistic
    low: float
    high: float
    when: When
    allowance: Allowance | None = None
    plugin_statistic: MaskStatistic | None = None
    drop_at_most: float | None = None
    until_mean: float | None = None
    key: str = ""

    @property
    def has_budget(self) -> bool:
        """True if the bound is computed from the batch, to meet ``drop_at_most`` or ``until_mean``."""
        return self.drop_at_most is not None or self.until_mean is not None

    @property
    def is_prefix(self) -> bool:
        """True if the rule pools over each token's prefix."""
        return self.level.startswith("prefix")

    @property
    def is_per_token(self) -> bool:
        """True if the rule judges tokens, False if it judges sequences."""
        return self.level in ("token", "turn", "turn_mean", "sequence_mean_size") or self.is_prefix

    def implies(self, other: MaskRule) -> bool:
        """Return True if ``other`` keeps everything that this rule keeps, whatever the batch."""
        if (
            (self.log_ratio, self.statistic) != (other.log_ratio, other.statistic)
            or self.has_budget
            or other.has_budget
        ):
            return False
        same_tokens = self.when == other.when and self.is_per_token == other.is_per_token
        if self.when != "always" and not same_tokens:
            return False
        implied_levels = {
            ("sequence_max", "token"),
            ("sequence_max", "sequence_mean"),  # a mean of values inside an interval is inside
            *((level, level) for level in get_args(Level)),
        }
        if self.low <= 0 <= self.high:
            implied_levels.add(("sequence", "sequence_mean"))  # a mean is its sum shrunk towards 0
        return (self.level, other.level) in implied_levels and other.low <= self.low and self.high <= other.high


_LABEL = r"^[a-z][a-z0-9_]*$"


def label_problem(label: str) -> str:
    """Return why a mask's label can't be part of a metric's name; empty if it can."""
    if "_min" in label or "_max" in label:
        return f"label '{label}' contains '_min' or '_max', by which NeMo-RL recognises extrema; choose another"
    return "" if re.fullmatch(_LABEL, label) else f"label '{label}' does not match {_LABEL}; give the mask another"


class MaskBase(StrictModel):
    """Settings that every mask has."""

    label: str | None = Field(
        default=None,
        pattern=_LABEL,
        description="Name of the mask in metrics; null: the preset's name.",
    )

    @model_validator(mode="after")
    def _check_label(self) -> MaskBase:
        if self.label and (problem := label_problem(self.label)):
            raise ValueError(problem)
        return self

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        raise NotImplementedError

    def build_rule(
        self,
        log_ratio: LogRatio,
        level: Level,
        statistic: Statistic,
        low: float | None,
        high: float | None,
        when: When = "always",
    ) -> MaskRule:
        """Return the rule for bounds as a recipe writes them; those on a ratio become bounds on its logarithm.

        None means no bound, and so does 0, except on a statistic that can be negative.
        """
        to_pooled_unit = math.log if statistic == "ratio" else float
        low, high = (None if bound == 0 and statistic not in SIGNED else bound for bound in (low, high))
        bounds = -math.inf if low is None else to_pooled_unit(low), math.inf if high is None else to_pooled_unit(high)
        label = str(self.label or getattr(self, "preset", "mask"))
        return MaskRule(label, log_ratio, level, statistic, *bounds, when)


class Interval(MaskBase):
    """A mask that keeps tokens or sequences whose mismatch ratio lies in [min, max]."""

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
        """Return the mask in its raw form."""
        return self.build_rule("mismatch", self.pooled, "ratio", self.min, self.max)


class RawMask(MaskBase):
    """A mask without a preset: every part of the rule is a setting."""

    log_ratio: LogRatio = Field(description="mismatch: prev - gen; policy: curr - prev; total: curr - gen.")
    level: Level = Field(
        description="What the statistic is pooled over. sequence_max: every token must be within the bounds; turn "
        "(sum), turn_mean: the contiguous run of trained tokens, which is kept or removed as a whole; prefix_…: the "
        "sequence's tokens up to this one, which alone is kept or removed."
    )
    statistic: Statistic = Field(default="ratio", description="What is compared with the bounds.")
    min: float | None = Field(
        default=None, description="Smallest value kept, below 0 on prob_diff and binary_kl…; null: no lower bound."
    )
    max: float | None = Field(default=None, gt=0, description="Largest value kept; null: no upper bound.")
    drop_at_most: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="In place of bounds: remove at most this fraction of the batch's tokens or sequences, the ones "
        "with the largest absolute statistic; ties are removed together or not at all.",
    )
    until_mean: float | None = Field(
        default=None,
        gt=0,
        description="In place of bounds: remove tokens or sequences, the one with the largest absolute statistic "
        "first, until its mean over the rest of the batch is at most this.",
    )
    when: When = Field(
        default="always",
        description="Restrict the rule by the sign of the advantage (the sequence's mean, at sequence levels). "
        "pushing: max applies where the advantage is positive, min where it is negative.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> RawMask:
        if self.drop_at_most is not None or self.until_mean is not None:
            self._check_budget()
        elif self._is_signed:
            self._check_signed_bounds()
        else:
            if self.min is not None and self.min < 0:
                raise ValueError(f"'min' ({self.min:g}) must be at least 0, as {self.statistic} is")
            Interval(min=self.min, max=self.max)
            if self.when == "pushing" and self.statistic != "ratio":
                raise ValueError(
                    f"when: pushing needs a direction, which {self.statistic} does not have; choose ratio, prob_diff "
                    "or binary_kl"
                )
        if self._is_signed and self.level in (
            "turn",
            "turn_mean",
            "sequence",
            "sequence_mean",
            "prefix_sum",
            "prefix_mean",
        ):
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
    def _is_signed(self) -> bool:
        plugin = STATISTICS.load_plugin(self.statistic)
        return self.statistic in SIGNED if plugin is None else bool(plugin.signed)

    def _check_budget(self) -> None:
        budget, *rest = (key for key in ("drop_at_most", "until_mean", "min", "max") if getattr(self, key) is not None)
        if rest:
            raise ValueError(f"'{budget}' takes the place of bounds, but '{rest[0]}' is set, too; remove one of them")
        if self.log_ratio != "mismatch":
            raise ValueError(
                f"'{budget}' is computed over the batch before its step, when the log-probs of the current policy, "
                f"which log_ratio: {self.log_ratio} needs, are not known; set log_ratio: mismatch, or min and max"
            )
        if self.when != "always":
            raise ValueError(
                f"'{budget}' ranks the whole batch, but when: {self.when} restricts the mask to a part of it; remove "
                "one of them"
            )

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        return replace(
            self.build_rule(self.log_ratio, self.level, self.statistic, self.min, self.max, self.when),
            drop_at_most=self.drop_at_most,
            until_mean=self.until_mean,
            plugin_statistic=STATISTICS.load_plugin(self.statistic),
        )


class MaskPreset(MaskBase):
    """Base class of a plugin's preset: a model of its settings, with :meth:`rule` to turn them into a raw rule."""

    preset: str


def mask_rules(masks: tuple[MaskBase, ...], *, objective_masks: int = 0) -> tuple[MaskRule, ...]:
    """Return the raw rules of validated masks; repeated labels are numbered: ``geometric``, ``geometric_2``.

    Args:
        masks: the objective's masks, then the recipe's.
        objective_masks: how many of them are the objective's.
    """
    rules: dict[str, MaskRule] = {}
    for index, mask in enumerate(masks, start=-objective_masks):
        rule = mask.rule()
        label, count = rule.label, 1
        while label in rules:
            count += 1
            label = f"{rule.label}_{count}"
        rules[label] = replace(rule, label=label, key="loss_fn.name" if index < 0 else f"loss_fn.masks[{index}]")
    return tuple(rules.values())
