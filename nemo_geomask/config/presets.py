"""The list ``loss_fn.masks``: presets, which are rules under the papers' names, and raw rules."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.config.masks import (
    Allowance,
    Interval,
    MaskBase,
    MaskPreset,
    MaskRule,
    RawMask,
    Statistic,
    wrong_label,
)
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.strict import nearest, repeated
from nemo_geomask.errors import PluginError

__all__ = ["PLUGINS", "PRESETS", "MaskSpec", "validate_masks"]


class Geometric(Interval):
    """Keep sequences whose geometric-mean mismatch ratio exp(mean(prev - gen)) lies in [min, max]. TRL PR 4891."""

    preset: Literal["geometric"]
    pooled = "sequence_mean"


class Product(Interval):
    """Keep sequences whose mismatch ratio exp(sum(prev - gen)) lies in [min, max]: sequence MIS."""

    preset: Literal["product"]
    pooled = "sequence"


class IcePop(Interval):
    """Keep tokens whose mismatch ratio lies in [min, max]. arXiv:2510.18855, bounds 0.5 and 5."""

    preset: Literal["icepop"]


class Veto(Interval):
    """Keep sequences all of whose tokens have a mismatch ratio in [min, max]."""

    preset: Literal["veto"]
    pooled = "sequence_max"


_OfCurrent = Annotated[
    Literal["total", "policy"],
    Field(description="'total' compares with the generation engine, 'policy' with the training engine at rollout."),
]


class Opsm(MaskBase):
    """Off-policy sequence masking: drop a sequence with negative mean advantage whose mean log(μ/π) exceeds delta.

    DeepSeek-V3.2, eq. 9. As a ratio: keep when exp(mean(curr - gen)) ≥ exp(-delta).
    """

    preset: Literal["opsm"]
    delta: float = Field(ge=0, description="Largest mean log-ratio kept, in nats per token.")
    log_ratio: _OfCurrent = "total"

    def rule(self) -> MaskRule:
        """The raw rule."""
        rule = self.as_rule(self.log_ratio, "sequence_mean", "ratio", None, None, "negative_advantage")
        return replace(rule, low=-self.delta)


class TrustRegion(MaskBase):
    """Keep sequences whose k2 or k3 stays within max, on average or at every token. arXiv:2512.23075."""

    preset: Literal["trust_region"]
    statistic: Literal["k2", "k3"] = Field(description="Divergence estimator per token.")
    level: Literal["sequence_mean", "sequence_max"] = Field(description="Mean over the sequence, or its worst token.")
    max: float = Field(gt=0, description="Largest value kept, in nats.")

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self.as_rule("mismatch", self.level, self.statistic, None, self.max)


class _Dppo(MaskBase):
    delta: float = Field(gt=0, description="Largest distance kept where the update would make the token likelier.")
    delta_low: float | None = Field(
        default=None, gt=0, description="The same where it would make it less likely; null: as delta."
    )
    log_ratio: _OfCurrent = "total"
    distance: ClassVar[Statistic]

    def rule(self) -> MaskRule:
        """The raw rule."""
        low = -(self.delta if self.delta_low is None else self.delta_low)
        return self.as_rule(self.log_ratio, "token", self.distance, low, self.delta, "pushing")


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


class KPop(MaskBase):
    """Keep tokens whose binary KLs between training and generation engine, both ways, are at most max. prime-rl."""

    preset: Literal["kpop"]
    max: float = Field(gt=0, description="Largest binary KL kept, in nats; 0.1 is in use.")

    def rule(self) -> MaskRule:
        """The raw rule."""
        return self.as_rule("mismatch", "token", "binary_kl_max", -self.max, self.max)


class M2po(MaskBase):
    """Drop the tokens with the largest squared mismatch log-ratio until the batch's mean of the rest is at most tau.

    arXiv:2510.01161, with tau 0.04.
    """

    preset: Literal["m2po"]
    tau: float = Field(default=0.04, gt=0, description="Largest mean of (prev - gen)² over the tokens kept, in nats².")

    def rule(self) -> MaskRule:
        """The raw rule; k2 is half the square."""
        return replace(self.as_rule("mismatch", "token", "k2", None, None), until_mean=self.tau / 2)


MaskSpec = Geometric | Product | IcePop | Veto | Opsm | TrustRegion | DppoTv | DppoKl | Cppo | KPop | M2po | RawMask
PRESETS: Mapping[str, type[MaskBase]] = {
    typing.get_args(model.model_fields["preset"].annotation)[0]: model
    for model in typing.get_args(MaskSpec)
    if model is not RawMask
}
PLUGINS: PluginGroup[type[MaskPreset]] = PluginGroup(
    group="nemo_geomask.mask_presets",
    what="preset",
    key="loss_fn.masks",
    must_be="a class derived from nemo_geomask.config.MaskPreset, with a rule of its own (see docs/plugins.md)",
    fits=lambda found: isinstance(found, type) and issubclass(found, MaskPreset) and found.rule is not MaskBase.rule,
    built_in={name: f"{model.__module__}:{model.__qualname__}" for name, model in PRESETS.items()},
)


def validate_masks(masks: Any) -> tuple[MaskBase, ...]:
    """The masks, each by the model that its preset names, another distribution's too, or in the raw form.

    Raises: PydanticCustomError: it is no list. pydantic.ValidationError: what is wrong with any of them, each at its
    own key.
    """
    if not isinstance(masks, (list, tuple)):
        raise PydanticCustomError("masks", "must be a list of masks, such as [{preset: geometric, max: 1.02}]")
    made: list[MaskBase] = []
    errors: list[InitErrorDetails] = []
    for index, mask in enumerate(masks):
        try:
            found = mask if isinstance(mask, MaskBase) else _model(mask).model_validate(mask)
            # A plugin's rule may have a label that no field has seen.
            label = found.rule().label
            if wrong := wrong_label(label):
                raise _wrong("label", "{text}", {"text": wrong}, label, "label")
            made.append(found)
        except ValidationError as error:
            errors += [repeated(dict(item), (index, *item["loc"])) for item in error.errors()]
    if errors:
        raise ValidationError.from_exception_data("masks", errors)
    return tuple(made)


def _model(mask: Any) -> type[MaskBase]:
    if not isinstance(mask, Mapping):
        guess = nearest(mask, PLUGINS.names()) if isinstance(mask, str) else None
        example = f"{{preset: {guess}, …}}" if guess else "{preset: geometric, max: 1.02}"
        raise _wrong("mask", "must be a mapping, such as {example}", {"example": example}, mask)
    if "preset" not in mask:
        return RawMask
    name = mask["preset"]
    if isinstance(name, str) and PLUGINS.is_own(name):
        return PRESETS[name]
    if isinstance(name, str) and (":" in name or name in PLUGINS.available()):
        try:
            return PLUGINS.load(name)
        except PluginError as error:
            text = "; ".join(problem.message for problem in error.problems)
            raise _wrong("preset", "{text}", {"text": text}, name, "preset") from None
    guess = nearest(str(name), PLUGINS.names())
    hint = f"did you mean '{guess}'?" if guess else "known: " + ", ".join(PLUGINS.names())
    raise _wrong("preset", "unknown preset", {"hint": hint}, name, "preset")


def _wrong(kind: Any, message: Any, context: dict[str, Any], found: Any, *key: str) -> ValidationError:
    error = PydanticCustomError(kind, message, context)
    return ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=key, input=found)])
