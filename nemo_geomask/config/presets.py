"""Mask presets: rejection rules under their papers' names, published bounds, and validation of ``loss_fn.masks``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.config.masks import (
    Allowance,
    Interval,
    LogRatio,
    MaskBase,
    MaskPreset,
    MaskRule,
    RawMask,
    Statistic,
    label_problem,
)
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.strict import nearest, relocated
from nemo_geomask.errors import PluginError

M = TypeVar("M", bound=MaskBase)

PRESETS: dict[str, type[MaskBase]] = {}
"""Model of each built-in preset's settings, by the preset's name."""


@dataclass(frozen=True)
class PublishedSettings:
    """Settings that a paper or another framework uses for a mask preset.

    Attributes:
        settings: the preset's settings without ``preset`` itself.
        source: paper or framework that uses them.
    """

    settings: Mapping[str, Any]
    source: str

    def mask(self, preset: str) -> dict[str, Any]:
        """Return an entry of ``loss_fn.masks``."""
        return {"preset": preset, **self.settings}


PUBLISHED_SETTINGS: dict[str, PublishedSettings] = {}
"""Published settings of each preset.

Recipes have no default bounds and must state their own. Tools that compare presets use these.
"""


def _preset(published_by: str, **settings: Any) -> Callable[[type[M]], type[M]]:
    """Register a class as the preset that its field ``preset`` names, with settings that others have published."""

    def register(model: type[M]) -> type[M]:
        (name,) = get_args(model.model_fields["preset"].annotation)
        PRESETS[name] = model
        PUBLISHED_SETTINGS[name] = PublishedSettings(settings, published_by)
        return model

    return register


@_preset("SkyRL", min=0.99, max=1.01)
class Geometric(Interval):
    """Keep sequences whose geometric-mean mismatch ratio exp(mean(prev - gen)) lies in [min, max]. TRL PR 4891."""

    preset: Literal["geometric"]
    pooled = "sequence_mean"


@_preset("verl decoupled_seq_is_rs", min=0.5, max=2.0)
class Product(Interval):
    """Keep sequences whose mismatch ratio exp(sum(prev - gen)) lies in [min, max]: sequence MIS."""

    preset: Literal["product"]
    pooled = "sequence"


@_preset("IcePop, arXiv:2510.18855", min=0.5, max=5.0)
class IcePop(Interval):
    """Keep tokens whose mismatch ratio lies in [min, max]. arXiv:2510.18855."""

    preset: Literal["icepop"]


@_preset("SkyRL outlier tokens", min=1e-4, max=100.0)
class Veto(Interval):
    """Keep sequences all of whose tokens have a mismatch ratio in [min, max]."""

    preset: Literal["veto"]
    pooled = "sequence_max"


_CurrentLogRatio = Annotated[
    Literal["total", "policy"],
    Field(
        description="'total' compares with the generation engine, 'policy' with the training engine before the batch."
    ),
]


@_preset("TRL off_policy_mask_threshold", delta=0.5)
class Opsm(MaskBase):
    """Drop sequences with a negative mean advantage whose mean log(μ/π) exceeds delta: off-policy sequence masking.

    DeepSeek-V3.2, eq. 9. As a ratio: keep when exp(mean(curr - gen)) ≥ exp(-delta).
    """

    preset: Literal["opsm"]
    delta: float = Field(ge=0, description="Largest mean log-ratio kept, in nats per token.")
    log_ratio: _CurrentLogRatio = "total"

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        rule = self.build_rule(self.log_ratio, "sequence_mean", "ratio", None, None, "negative_advantage")
        return replace(rule, low=-self.delta)


@_preset("verl decoupled_k3_rs", statistic="k3", level="sequence_mean", max=0.01)
class TrustRegion(MaskBase):
    """Keep sequences whose k2 or k3 stays within max, on average or at every token. arXiv:2512.23075."""

    preset: Literal["trust_region"]
    statistic: Literal["k2", "k3"] = Field(description="Divergence estimator per token.")
    level: Literal["sequence_mean", "sequence_max"] = Field(description="Mean over the sequence, or its worst token.")
    max: float = Field(gt=0, description="Largest value kept, in nats.")

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        return self.build_rule("mismatch", self.level, self.statistic, None, self.max)


# Base of the presets that bound the distance between a token's two probabilities. They remove a token only if the
# update would increase the distance.
class _Dppo(MaskBase):
    delta: float = Field(gt=0, description="Largest distance kept where the update would make the token more likely.")
    delta_low: float | None = Field(
        default=None,
        gt=0,
        description="Largest distance kept where the update would make the token less likely; null: as delta.",
    )
    log_ratio: _CurrentLogRatio = "total"
    distance: ClassVar[Statistic]

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        low = -(self.delta if self.delta_low is None else self.delta_low)
        return self.build_rule(self.log_ratio, "token", self.distance, low, self.delta, "pushing")


class _DppoOfDifferences(_Dppo):
    delta: float = Field(
        gt=0,
        lt=1,
        description="Largest difference of probabilities kept where the update would make the token more likely; "
        "common values are 0.15 to 0.2.",
    )
    delta_low: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Largest difference kept where the update would make the token less likely; null: as delta.",
    )
    distance = "prob_diff"


@_preset("verl's example for DPPO, arXiv:2602.04879", delta=0.15)
class DppoTv(_DppoOfDifferences):
    """Drop tokens whose |p - q| exceeds delta, if the update would increase it. arXiv:2602.04879."""

    preset: Literal["dppo_tv"]


@_preset("verl's example for DPPO, arXiv:2602.04879", delta=0.05)
class DppoKl(_Dppo):
    """Drop tokens whose binary KL(μ ‖ π) exceeds delta, if the update would increase it. arXiv:2602.04879.

    delta is in nats.
    """

    preset: Literal["dppo_kl"]
    distance = "binary_kl"


@_preset("CPPO, arXiv:2606.10968", delta=0.15)
class Cppo(_DppoOfDifferences):
    """Drop tokens whose prefix drifts beyond its budget, if the update would increase the drift. arXiv:2606.10968.

    The differences of probabilities are those of dppo_tv, with weights that fall from the first token to the last. A
    token is dropped if its weighted difference exceeds delta, or if the sum over its prefix exceeds delta plus a budget
    for each earlier token.
    """

    preset: Literal["cppo"]
    weight_min: float = Field(default=0.8, gt=0, le=1, description="Weight of the last token; that of the first is 1.")
    budget_min: float = Field(
        default=0.02, gt=0, description="Smallest budget that each token adds; the largest is five times this."
    )
    budget_quantile: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Within these limits, the budget is this quantile of the response's own differences times "
        "budget_scale.",
    )
    budget_scale: float = Field(default=1.0, gt=0, description="Factor of the quantile in the budget.")

    def rule(self) -> MaskRule:
        """Return the mask as a rule of level ``prefix_excess``, which recipes can't write in the raw form."""
        allowance = Allowance(self.weight_min, self.budget_min, self.budget_quantile, self.budget_scale)
        return replace(super().rule(), level="prefix_excess", allowance=allowance)


@_preset("VACO, arXiv:2603.01365, delta as reviewed", statistic="ratio_diff", delta=0.2)
class Vaco(MaskBase):
    """Drop tokens of a sequence whose mean distance exceeds delta, if the update would increase the token's distance.

    The distance of a token is the size of its statistic: |p - q| (binary total variation), a binary KL, or |ρ - 1|. The
    mean of |ρ - 1| over tokens that q sampled estimates twice their total variation. arXiv:2603.01365, as in
    open-instruct PR 1755 (prob_diff, binary_kl) and PR 1681 (ratio_diff).
    """

    preset: Literal["vaco"]
    delta: float = Field(gt=0, description="Largest mean distance of a sequence kept; for binary_kl in nats.")
    statistic: Literal["prob_diff", "binary_kl", "ratio_diff"] = Field(
        description="Distance of a token: prob_diff: |p - q|; binary_kl: KL(q ‖ p) of {the token, any other}; "
        "ratio_diff: |p/q - 1|."
    )
    log_ratio: LogRatio = Field(
        default="mismatch", description="p and q: mismatch: prev and gen; policy: curr and prev; total: curr and gen."
    )

    @model_validator(mode="after")
    def _check_delta(self) -> Vaco:
        if self.statistic == "prob_diff" and self.delta >= 1:
            raise ValueError(f"a delta of {self.delta:g} on prob_diff, which is at most 1, removes nothing")
        return self

    def rule(self) -> MaskRule:
        """Return the mask as a rule of level ``sequence_mean_size``, which recipes can't write in the raw form."""
        rule = self.build_rule(self.log_ratio, "token", self.statistic, None, self.delta, "pushing")
        return replace(rule, level="sequence_mean_size", low=-self.delta)


@_preset("prime-rl PR 3283", max=0.1)
class KPop(MaskBase):
    """Keep tokens whose binary KLs between training and generation engine, in both directions, are at most max.

    Source: prime-rl.
    """

    preset: Literal["kpop"]
    max: float = Field(gt=0, description="Largest binary KL kept, in nats; a common value is 0.1.")

    def rule(self) -> MaskRule:
        """Return the mask in its raw form."""
        return self.build_rule("mismatch", "token", "binary_kl_max", -self.max, self.max)


@_preset("M2PO, arXiv:2510.01161", tau=0.04)
class M2po(MaskBase):
    """Drop the tokens with the largest squared mismatch log-ratio until the batch's mean of the rest is at most tau.

    arXiv:2510.01161, with tau 0.04.
    """

    preset: Literal["m2po"]
    tau: float = Field(default=0.04, gt=0, description="Largest mean of (prev - gen)² over the tokens kept, in nats².")

    def rule(self) -> MaskRule:
        """Return the mask in its raw form, on k2, which is half the square."""
        return replace(self.build_rule("mismatch", "token", "k2", None, None), until_mean=self.tau / 2)


if TYPE_CHECKING:
    MaskSpec = MaskBase
else:
    MaskSpec = Union[(*PRESETS.values(), RawMask)]
"""Entry of ``loss_fn.masks``: a preset's settings, or a raw mask."""

PRESET_GROUP: PluginGroup[type[MaskPreset]] = PluginGroup(
    group="nemo_geomask.mask_presets",
    noun="preset",
    key="loss_fn.masks",
    requirement="a class derived from nemo_geomask.config.MaskPreset, with a rule of its own (see "
    "docs/how_to/plugin_corrections.md)",
    accepts=lambda cls: isinstance(cls, type) and issubclass(cls, MaskPreset) and cls.rule is not MaskBase.rule,
    built_in={name: f"{model.__module__}:{model.__qualname__}" for name, model in PRESETS.items()},
)


def validate_masks(masks: Any) -> tuple[MaskBase, ...]:
    """Return the validated masks; each is an instance of its preset's model, a plugin's included, or a raw mask.

    Raises: PydanticCustomError: ``masks`` is not a list. pydantic.ValidationError: the problems of all masks, each
    located at its own key.
    """
    if not isinstance(masks, (list, tuple)):
        raise PydanticCustomError("masks", "must be a list of masks, such as [{preset: geometric, max: 1.02}]")
    validated: list[MaskBase] = []
    errors: list[InitErrorDetails] = []
    for index, mask in enumerate(masks):
        try:
            model = mask if isinstance(mask, MaskBase) else _mask_model(mask).model_validate(mask)
            # A plugin's rule() may return a label and bounds that no field has validated.
            rule = model.rule()
            if problem := label_problem(rule.label):
                raise _mask_error("label", "{text}", {"text": problem}, rule.label, "label")
            if math.isnan(rule.low) or math.isnan(rule.high):
                text = f"rule() of this preset returns the bounds {rule.low} and {rule.high}; NaN would remove nothing"
                raise _mask_error("bounds", "{text}", {"text": text}, mask)
            validated.append(model)
        except ValidationError as error:
            errors += [relocated(dict(item), (index, *item["loc"])) for item in error.errors()]
    if errors:
        raise ValidationError.from_exception_data("masks", errors)
    return tuple(validated)


def _mask_model(mask: Any) -> type[MaskBase]:
    """Return the model of the mask's preset, or of a raw mask if it has no preset."""
    if not isinstance(mask, Mapping):
        guess = nearest(mask, PRESET_GROUP.names()) if isinstance(mask, str) else None
        example = f"{{preset: {guess}, …}}" if guess else "{preset: geometric, max: 1.02}"
        raise _mask_error("mask", "must be a mapping, such as {example}", {"example": example}, mask)
    if "preset" not in mask:
        return RawMask
    name = mask["preset"]
    if isinstance(name, str) and PRESET_GROUP.is_built_in(name):
        return PRESETS[name]
    if isinstance(name, str) and (":" in name or name in PRESET_GROUP.available()):
        try:
            return PRESET_GROUP.load(name)
        except PluginError as error:
            text = "; ".join(problem.message for problem in error.problems)
            raise _mask_error("preset", "{text}", {"text": text}, name, "preset") from None
    guess = nearest(str(name), PRESET_GROUP.names())
    hint = f"did you mean '{guess}'?" if guess else "known: " + ", ".join(PRESET_GROUP.names())
    raise _mask_error("preset", "unknown preset", {"hint": hint}, name, "preset")


def _mask_error(error_type: Any, message: Any, context: dict[str, Any], value: Any, *key: str) -> ValidationError:
    error = PydanticCustomError(error_type, message, context)
    return ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=key, input=value)])
