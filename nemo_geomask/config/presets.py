"""Mask presets: rules under the papers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from nemo_geomask.config.masks import Allowance, Interval, MaskBase, MaskRule, RawMask, Statistic

__all__ = ["PRESETS", "MaskSpec"]


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
