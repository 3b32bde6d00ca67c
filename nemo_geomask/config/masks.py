"""Mask rules: one raw form, and presets that carry the papers' names.

Every rejection rule is ``(log_ratio, level, statistic, min, max, when)``; a preset fills in most of it. Bounds on a
ratio are always on ρ itself, in the direction that the log-ratio's definition says, both ends inclusive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.strict import StrictModel, nearest, repeated
from nemo_geomask.errors import PluginError

__all__ = ["PRESETS", "MaskPreset", "MaskRule", "MaskSpec", "RawMask", "mask_rules", "validate_masks"]

LogRatio = Literal["mismatch", "policy", "total"]
Statistic = Literal["ratio", "k2", "k3", "prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max"]
Level = Literal[
    "token", "sequence", "sequence_mean", "sequence_max", "prefix_sum", "prefix_mean", "prefix_min", "prefix_max"
]
When = Literal["always", "negative_advantage", "positive_advantage", "pushing"]
SIGNED = ("prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max")
"""Statistics that are negative where the token has become less likely, as lower bounds on them are."""


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


def _wrong_label(label: str) -> str:
    """Why it can't stand in the name of a metric; empty where it can."""
    if "_min" in label or "_max" in label:
        return f"label '{label}' holds '_min' or '_max', which NeMo-RL reads as an extremum; choose another"
    return "" if re.fullmatch(_LABEL, label) else f"label '{label}' does not match {_LABEL}; give the mask another"


class _Bounds(StrictModel):
    label: str | None = Field(
        default=None,
        pattern=_LABEL,
        description="Name of the mask in metrics; the preset's name if not given.",
    )

    @model_validator(mode="after")
    def _check_label(self) -> _Bounds:
        if self.label and (wrong := _wrong_label(self.label)):
            raise ValueError(wrong)
        return self

    def _rule(
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


class _Interval(_Bounds):
    min: float | None = Field(default=None, ge=0, description="Smallest ratio kept; null: no lower bound.")
    max: float | None = Field(default=None, gt=0, description="Largest ratio kept; null: no upper bound.")
    pooled: ClassVar[Level] = "token"

    @model_validator(mode="after")
    def _check_interval(self) -> _Interval:
        if not self.min and self.max is None:
            raise ValueError("a mask without 'max' and without a 'min' above 0 removes nothing; give a bound")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"'min' ({self.min}) exceeds 'max' ({self.max}), which removes everything; swap them")
        return self

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self._rule("mismatch", self.pooled, "ratio", self.min, self.max)


class Geometric(_Interval):
    """Keep sequences whose geometric-mean mismatch ratio exp(mean(prev - gen)) lies in [min, max]. TRL PR 4891."""

    preset: Literal["geometric"]
    pooled = "sequence_mean"


class Product(_Interval):
    """Keep sequences whose mismatch ratio exp(sum(prev - gen)) lies in [min, max]: sequence MIS."""

    preset: Literal["product"]
    pooled = "sequence"


class IcePop(_Interval):
    """Keep tokens whose mismatch ratio lies in [min, max]. arXiv:2510.18855, bounds 0.5 and 5."""

    preset: Literal["icepop"]


class Veto(_Interval):
    """Keep sequences all of whose tokens have a mismatch ratio in [min, max]."""

    preset: Literal["veto"]
    pooled = "sequence_max"


_OfCurrent = Annotated[
    Literal["total", "policy"],
    Field(description="'total' compares with the generation engine, 'policy' with the training engine at rollout."),
]


class Opsm(_Bounds):
    """Off-policy sequence masking: drop a sequence with negative mean advantage whose mean log(μ/π) exceeds delta.

    DeepSeek-V3.2, eq. 9. As a ratio: keep when exp(mean(curr - gen)) ≥ exp(-delta).
    """

    preset: Literal["opsm"]
    delta: float = Field(ge=0, description="Largest mean log-ratio kept, in nats per token.")
    log_ratio: _OfCurrent = "total"

    def rule(self) -> MaskRule:
        """The raw rule."""
        rule = self._rule(self.log_ratio, "sequence_mean", "ratio", None, None, "negative_advantage")
        return replace(rule, low=-self.delta)


class TrustRegion(_Bounds):
    """Keep sequences whose k2 or k3 stays within max, on average or at every token. arXiv:2512.23075."""

    preset: Literal["trust_region"]
    statistic: Literal["k2", "k3"] = Field(description="Divergence estimator per token.")
    level: Literal["sequence_mean", "sequence_max"] = Field(description="Mean over the sequence, or its worst token.")
    max: float = Field(gt=0, description="Largest value kept, in nats.")

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self._rule("mismatch", self.level, self.statistic, None, self.max)


class _Dppo(_Bounds):
    delta: float = Field(gt=0, description="Largest distance kept where the update would make the token likelier.")
    delta_low: float | None = Field(
        default=None, gt=0, description="The same where it would make it less likely; null: as delta."
    )
    log_ratio: _OfCurrent = "total"
    distance: ClassVar[Statistic]

    def rule(self) -> MaskRule:
        """The raw rule."""
        low = -(self.delta if self.delta_low is None else self.delta_low)
        return self._rule(self.log_ratio, "token", self.distance, low, self.delta, "pushing")


class _DppoOfDifferences(_Dppo):
    delta: float = Field(gt=0, lt=1, description="Largest difference of probabilities kept; 0.15 to 0.2 are in use.")
    delta_low: float | None = Field(
        default=None, gt=0, lt=1, description="The same where the update makes it less likely; null: as delta."
    )
    distance = "prob_diff"


class DppoTv(_DppoOfDifferences):
    """Drop tokens whose probability is off by more than delta where the update pushes it further. arXiv:2602.04879."""

    preset: Literal["dppo_tv"]


class DppoKl(_Dppo):
    """The same by the binary KL(μ ‖ π), in nats; 0.05 is in use. arXiv:2602.04879."""

    preset: Literal["dppo_kl"]
    distance = "binary_kl"


class Cppo(_DppoOfDifferences):
    """Drop tokens where the update pushes the probability further off by more than what is left to the prefix.

    As dppo_tv, with differences that weigh less the later the token, and with a budget of the prefix: a token goes
    where its weighted difference exceeds delta, or where the prefix's sum of them exceeds delta and what each earlier
    token brings along. arXiv:2606.10968.
    """

    preset: Literal["cppo"]
    weight_min: float = Field(default=0.8, gt=0, le=1, description="Weight of the last token; that of the first is 1.")
    budget_min: float = Field(default=0.02, gt=0, description="Least that a token brings; five times it is the most.")
    budget_quantile: float = Field(
        default=0.9, ge=0, le=1, description="What it brings is this quantile of the response's own differences…"
    )
    budget_scale: float = Field(default=1.0, gt=0, description="…times this.")

    def rule(self) -> MaskRule:
        """The raw rule, of a level that has no raw form."""
        allowance = Allowance(self.weight_min, self.budget_min, self.budget_quantile, self.budget_scale)
        return replace(super().rule(), level="prefix_excess", allowance=allowance)


class KPop(_Bounds):
    """Keep tokens whose binary KLs between training and generation engine, both ways, are at most max. prime-rl."""

    preset: Literal["kpop"]
    max: float = Field(gt=0, description="Largest binary KL kept, in nats; 0.1 is in use.")

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self._rule("mismatch", "token", "binary_kl_max", -self.max, self.max)


class M2po(_Bounds):
    """Drop the tokens with the largest squared mismatch log-ratio until the batch's mean of the rest is at most tau.

    arXiv:2510.01161, with tau 0.04.
    """

    preset: Literal["m2po"]
    tau: float = Field(default=0.04, gt=0, description="Largest mean of (prev - gen)² over the tokens kept, in nats².")

    def rule(self) -> MaskRule:
        """The raw rule; k2 is half the square."""
        return replace(self._rule("mismatch", "token", "k2", None, None), until_mean=self.tau / 2)


class RawMask(_Bounds):
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
            return self._check_pooling()
        if self.statistic not in SIGNED:
            if self.min is not None and self.min < 0:
                raise ValueError(f"'min' ({self.min:g}) must be at least 0, as {self.statistic} is")
            _Interval(min=self.min, max=self.max)
            if self.when == "pushing" and self.statistic != "ratio":
                raise ValueError(
                    f"when: pushing needs a direction, which {self.statistic} has not; choose ratio, prob_diff or "
                    "binary_kl"
                )
            return self
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
        return self._check_pooling()

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

    def _check_pooling(self) -> RawMask:
        if self.statistic in SIGNED and self.level in ("sequence", "sequence_mean", "prefix_sum", "prefix_mean"):
            raise ValueError(
                f"level '{self.level}' pools {self.statistic}, whose signs cancel; choose token, sequence_max, "
                "prefix_min or prefix_max"
            )
        return self

    def rule(self) -> MaskRule:
        """The rule with bounds in the units of the statistic."""
        rule = self._rule(self.log_ratio, self.level, self.statistic, self.min, self.max, self.when)
        return replace(rule, drop_at_most=self.drop_at_most, until_mean=self.until_mean)


PRESETS = {
    "geometric": Geometric,
    "product": Product,
    "icepop": IcePop,
    "veto": Veto,
    "opsm": Opsm,
    "trust_region": TrustRegion,
    "dppo_tv": DppoTv,
    "dppo_kl": DppoKl,
    "cppo": Cppo,
    "kpop": KPop,
    "m2po": M2po,
}


class MaskPreset(_Bounds):
    """What a preset of another distribution derives from: a model of its settings, and the rule that they make."""

    preset: str

    def rule(self) -> MaskRule:
        """The raw rule, with bounds in the units of its statistic (logarithms for ``ratio``)."""
        raise NotImplementedError


_PLUGINS = PluginGroup(
    group="nemo_geomask.mask_presets",
    what="preset",
    key="loss_fn.masks",
    must_be="a class derived from nemo_geomask.config.MaskPreset (see docs/plugins.md)",
    fits=lambda found: isinstance(found, type) and issubclass(found, MaskPreset),
    built_in={name: f"{model.__module__}:{model.__qualname__}" for name, model in PRESETS.items()},
)


def _tag(value: Any) -> str:
    preset = value.get("preset") if isinstance(value, Mapping) else getattr(value, "preset", None)
    return f"preset:{'raw' if preset is None else preset}"


MaskSpec = Annotated[
    Annotated[Geometric, Tag("preset:geometric")]
    | Annotated[Product, Tag("preset:product")]
    | Annotated[IcePop, Tag("preset:icepop")]
    | Annotated[Veto, Tag("preset:veto")]
    | Annotated[Opsm, Tag("preset:opsm")]
    | Annotated[TrustRegion, Tag("preset:trust_region")]
    | Annotated[DppoTv, Tag("preset:dppo_tv")]
    | Annotated[DppoKl, Tag("preset:dppo_kl")]
    | Annotated[Cppo, Tag("preset:cppo")]
    | Annotated[KPop, Tag("preset:kpop")]
    | Annotated[M2po, Tag("preset:m2po")]
    | Annotated[RawMask, Tag("preset:raw")],
    Discriminator(_tag),
]


def validate_masks(masks: Any, validate: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The masks, each as ``validate`` makes it from a tuple of one.

    Raises: PydanticCustomError: it is no list. pydantic.ValidationError: what is wrong with any of them, each at its
    own key.
    """
    if not isinstance(masks, (list, tuple)):
        raise PydanticCustomError("masks", "must be a list of masks, such as [{preset: geometric, max: 1.02}]")
    made: list[Any] = []
    errors: list[InitErrorDetails] = []
    for index, mask in enumerate(masks):
        place = 1  # where a location begins: after pydantic's own index
        try:
            if isinstance(mask, MaskPreset):
                made.append(_labelled(mask))
            elif (own := _plugin(mask)) is not None:
                place = 0
                made.append(_labelled(own.model_validate(mask)))
            else:
                made += validate((_known_preset(mask),))
        except PluginError as error:
            text = "; ".join(problem.message for problem in error.problems)
            kind = PydanticCustomError("preset", "{text}", {"text": text})
            errors.append(InitErrorDetails(type=kind, loc=(index, "preset"), input=mask["preset"]))
        except ValidationError as error:
            errors += [repeated(dict(item), (index, *item["loc"][place:])) for item in error.errors()]
    if errors:
        raise ValidationError.from_exception_data("masks", errors)
    return tuple(made)


def _labelled(mask: MaskPreset) -> MaskPreset:
    """The mask of a plugin, whose rule may have a label that no field has seen."""
    label = mask.rule().label
    if wrong := _wrong_label(label):
        error = PydanticCustomError("label", "{text}", {"text": wrong})
        raise ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=("label",), input=label)])
    return mask


def _plugin(mask: Any) -> type[MaskPreset] | None:
    """The model of a preset that another distribution brings, or that is given as ``module:attribute``."""
    name = mask.get("preset") if isinstance(mask, Mapping) else None
    if not isinstance(name, str):
        return None
    if ":" not in name:
        claims = _PLUGINS.available().get(name)
        # One of this package's has a model below, unless somebody else claims its name too.
        if claims is None or (name in PRESETS and len(claims) == 1):
            return None
    found: type[MaskPreset] = _PLUGINS.load(name)
    return found


def _known_preset(mask: Any) -> Any:
    if isinstance(mask, StrictModel):
        return mask
    location: tuple[int | str, ...] = (0,)
    if not isinstance(mask, Mapping):
        guess = nearest(mask, PRESETS) if isinstance(mask, str) else None
        example = f"{{preset: {guess}, …}}" if guess else "{preset: geometric, max: 1.02}"
        error = PydanticCustomError("mask", "must be a mapping, such as {example}", {"example": example})
    elif "preset" not in mask or mask["preset"] in tuple(PRESETS):
        return mask
    else:
        guess = nearest(str(mask["preset"]), PRESETS)
        hint = f"did you mean '{guess}'?" if guess else "known: " + ", ".join(PRESETS)
        error = PydanticCustomError("preset", "unknown preset", {"hint": hint})
        location, mask = (0, "preset"), mask["preset"]
    raise ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=location, input=mask)])


def mask_rules(masks: tuple[Any, ...], *, of_objective: int = 0) -> tuple[MaskRule, ...]:
    """Rules of a validated list of masks, of which so many come first that the objective brings; repeated labels are
    numbered: ``geometric``, ``geometric_2``."""
    rules: dict[str, MaskRule] = {}
    for index, mask in enumerate(masks, start=-of_objective):
        rule: MaskRule = mask.rule()
        label, count = rule.label, 1
        while label in rules:
            count += 1
            label = f"{rule.label}_{count}"
        rules[label] = replace(rule, label=label, key="loss_fn.name" if index < 0 else f"loss_fn.masks[{index}]")
    return tuple(rules.values())
