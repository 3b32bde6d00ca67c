r"""What to expect of weights and masks at a given mismatch and length.

For a mismatch of κ nats per token, its mean KL from the generation to the training engine: if a token's log-ratio
Δ = prev − gen is normal and independent of the others', then, since the mean of exp(Δ) is 1,

.. math:: \Delta_t \sim \mathcal N(-\kappa,\, 2\kappa)

so that a sum over T tokens is :math:`\mathcal N(-\kappa T, 2\kappa T)` and a mean
:math:`\mathcal N(-\kappa, 2\kappa/T)`. A weight exp(sum) then has the median :math:`e^{-\kappa T}` and the effective
sample size :math:`e^{-2\kappa T}`. Sums and means of k2 and k3 are taken as normal too, with the moments

.. math:: \mathbb E\,k_2 = \kappa + \kappa^2/2,\quad \mathbb V\,k_2 = 2\kappa^2 + 2\kappa^3,\quad
    \mathbb E\,k_3 = \kappa,\quad \mathbb V\,k_3 = e^{2\kappa} - 1 - 2\kappa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.masks import Level, MaskRule
from nemo_geomask.functional.ratios import log_bound

__all__ = [
    "Judged",
    "clipped_fractions",
    "judged",
    "kept_fraction",
    "median_weight",
    "spread_of_mean",
    "truncation_bounds",
]


@dataclass(frozen=True)
class Judged:
    """A mask whose share can be reckoned: its rule, and ``of`` what it is a share."""

    rule: MaskRule
    of: Literal["tokens", "sequences"]


def judged(config: LossConfig) -> list[Judged]:
    """The masks of a loss that :func:`kept_fraction` can judge, those that a truncation makes included."""
    rules = list(config.mask_rules)
    kind, level = config.truncation, cast(Level, config.correction_level)
    if kind == "seq-mask-tis" or (kind == "icepop" and config.applies_weight and config.own_level is None):
        bounds = truncation_bounds(config)
        pooled: Level = "sequence_mean" if kind == "seq-mask-tis" else level
        key = "loss_fn.truncated_importance_sampling_type"
        rules.append(MaskRule(kind, "mismatch", pooled, "ratio", *bounds, "always", key=key))
    return [
        Judged(rule, "tokens" if rule.level == "token" else "sequences")
        for rule in rules
        if kept_fraction(rule, 1e-3, 1024) is not None
    ]


def truncation_bounds(config: LossConfig) -> tuple[float, float]:
    """Logarithms of the truncation's bounds on the weight."""
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    return log_bound(low, default=-math.inf), log_bound(high, default=math.inf)


def median_weight(kl: float, tokens: int) -> float:
    """Median of exp(Σ Δ) over ``tokens`` tokens with a mean mismatch KL of ``kl`` each."""
    return math.exp(-kl * tokens)


def spread_of_mean(kl: float, tokens: int) -> float:
    """Standard deviation of the mean log-ratio over ``tokens`` tokens."""
    return math.sqrt(2 * kl / tokens)


def clipped_fractions(config: LossConfig, kl: float, tokens: int) -> tuple[float, float]:
    """Expected shares of the sequences, below and above the clip's bounds, whose geometric-mean mismatch ratio is
    clipped: of those with A < 0, and of those with A > 0."""
    low, high = log_bound(1 - config.ratio_clip_min, default=-math.inf), math.log1p(config.ratio_clip_max)
    variance = spread_of_mean(kl, tokens) ** 2
    return _normal(-math.inf, low, -kl, variance), _normal(high, math.inf, -kl, variance)


def kept_fraction(rule: MaskRule, kl: float, tokens: int) -> float | None:
    """Expected share that a mask keeps, of tokens or of sequences of ``tokens`` tokens.

    A mask on ``total`` is taken as on the mismatch alone: what staleness adds removes more. None for what says nothing
    of the mismatch (``policy``), depends on more than the log-ratios, or sets its bound by the batch.
    """
    if (
        rule.budgeted
        or rule.log_ratio == "policy"
        or rule.when == "pushing"
        or rule.statistic not in ("ratio", "k2", "k3")
    ):
        return None
    if rule.level in ("token", "sequence_max"):
        one = sum(_normal(low, high, -kl, 2 * kl) for low, high in _log_ratios(rule))
        return one if rule.level == "token" else one**tokens
    if rule.level not in ("sequence", "sequence_mean"):
        return None
    mean, variance = {
        "ratio": (-kl, 2 * kl),
        "k2": (kl + kl * kl / 2, 2 * kl**2 * (1 + kl)),
        "k3": (kl, math.expm1(2 * kl) - 2 * kl),
    }[rule.statistic]
    if rule.level == "sequence":
        return _normal(rule.low, rule.high, mean * tokens, variance * tokens)
    return _normal(rule.low, rule.high, mean, variance / tokens)


def _log_ratios(rule: MaskRule) -> list[tuple[float, float]]:
    """The log-ratios whose statistic lies within the rule's bounds, as intervals."""
    if rule.statistic == "ratio":
        return [(rule.low, rule.high)]
    inner, outer = (_level_set(rule.statistic, bound) for bound in (rule.low, rule.high))
    return [(outer[0], inner[0]), (inner[1], outer[1])]


def _level_set(statistic: str, value: float) -> tuple[float, float]:
    """Where k2 = x²/2 or k3 = e^x − 1 − x, convex and least at 0, take a value: below 0 and above."""
    if value <= 0:
        return 0.0, 0.0
    if math.isinf(value):
        return -math.inf, math.inf
    if statistic == "k2":
        return -math.sqrt(2 * value), math.sqrt(2 * value)
    return _root(value, -value - 1), _root(value, math.sqrt(2 * value))


def _root(value: float, far: float) -> float:
    """k3(x) = value between 0 and ``far``, beyond it, by bisection."""
    near = 0.0
    for _ in range(100):
        middle = (near + far) / 2
        near, far = (middle, far) if math.expm1(middle) - middle < value else (near, middle)
    return far


def _normal(low: float, high: float, mean: float, variance: float) -> float:
    """P(low ≤ x ≤ high) of a normal variable."""
    scale = math.sqrt(2 * variance)
    # By the tails that are small, so that digits near 1 are kept.
    return 1.0 - 0.5 * (math.erfc((high - mean) / scale) + math.erfc((mean - low) / scale))
