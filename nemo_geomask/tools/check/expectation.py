r"""Expected weights and kept fractions of masks at a given mismatch and response length.

Let κ be the mean KL from the generation to the training engine, in nats per token. Assume that a token's log-ratio
Δ = prev − gen is normal and independent of other tokens. Since the mean of exp(Δ) is 1,

.. math:: \Delta_t \sim \mathcal N(-\kappa,\, 2\kappa)

so a sum over T tokens is :math:`\mathcal N(-\kappa T, 2\kappa T)` and a mean is
:math:`\mathcal N(-\kappa, 2\kappa/T)`. A weight exp(sum) then has the median :math:`e^{-\kappa T}` and the effective
sample size :math:`e^{-2\kappa T}`. Sums and means of k2 and k3 are approximated as normal as well, with the moments

.. math:: \mathbb E\,k_2 = \kappa + \kappa^2/2,\quad \mathbb V\,k_2 = 2\kappa^2 + 2\kappa^3,\quad
    \mathbb E\,k_3 = \kappa,\quad \mathbb V\,k_3 = e^{2\kappa} - 1 - 2\kappa.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import Level, MaskRule


class PredictableMask(NamedTuple):
    """Mask whose kept fraction :func:`kept_fraction` can compute, and the unit of that fraction."""

    rule: MaskRule
    unit: Literal["tokens", "sequences"]


def predictable_masks(config: LossConfig) -> list[PredictableMask]:
    """Return the masks of a loss whose kept fraction can be computed, including those that a truncation implies."""
    rules = list(config.mask_rules)
    truncation, level = config.truncation, cast(Level, config.correction_level)
    is_icepop = truncation == "icepop" and config.applies_weight and config.plugin_level is None
    if truncation is not None and (truncation == "seq-mask-tis" or is_icepop):
        pooled: Level = "sequence_mean" if truncation == "seq-mask-tis" else level
        key = "loss_fn.truncated_importance_sampling_type"
        rules.append(MaskRule(truncation, "mismatch", pooled, "ratio", *truncation_bounds(config), "always", key=key))
    return [
        PredictableMask(rule, "tokens" if rule.level == "token" else "sequences")
        for rule in rules
        if kept_fraction(rule, 1e-3, 1024) is not None
    ]


def truncation_bounds(config: LossConfig) -> tuple[float, float]:
    """Return the logarithms of the truncation's bounds on the weight; infinite where there is none."""
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    return math.log(low) if low else -math.inf, math.inf if high is None else math.log(high)


def median_weight(kl: float, tokens: int) -> float:
    """Return the median of exp(Σ Δ) over ``tokens`` tokens, each with a mean mismatch KL of ``kl``."""
    return math.exp(-kl * tokens)


def mean_log_ratio_deviation(kl: float, tokens: int) -> float:
    """Return the standard deviation of the mean log-ratio over ``tokens`` tokens, √(2κ/T)."""
    return math.sqrt(2 * kl / tokens)


def clipped_fractions(config: LossConfig, kl: float, tokens: int) -> tuple[float, float]:
    """Return the expected fractions of sequences whose geometric-mean mismatch ratio is clipped.

    The first is the fraction below the lower bound, among sequences with A < 0; the second is the fraction above the
    upper bound, among those with A > 0.
    """
    lowest_ratio = 1 - config.ratio_clip_min
    low, high = math.log(lowest_ratio) if lowest_ratio > 0 else -math.inf, math.log1p(config.ratio_clip_max)
    variance = mean_log_ratio_deviation(kl, tokens) ** 2
    return _normal_probability(-math.inf, low, -kl, variance), _normal_probability(high, math.inf, -kl, variance)


def kept_fraction(rule: MaskRule, kl: float, tokens: int) -> float | None:
    """Return the expected fraction that a mask keeps, of tokens or of sequences of ``tokens`` tokens.

    A mask on the ``total`` log-ratio is treated as a mask on the mismatch; in fact staleness makes it remove more.

    Returns:
        None if the fraction does not depend on the mismatch (``log_ratio: policy``), if it depends on more than the
        log-ratios, or if the mask's bound is computed from the batch.
    """
    if (
        rule.has_budget
        or rule.log_ratio == "policy"
        or rule.when == "pushing"
        or rule.statistic not in ("ratio", "k2", "k3")
    ):
        return None
    if rule.level in ("token", "sequence_max"):
        token_fraction = sum(_normal_probability(low, high, -kl, 2 * kl) for low, high in _kept_log_ratios(rule))
        return token_fraction if rule.level == "token" else token_fraction**tokens
    if rule.level not in ("sequence", "sequence_mean"):
        return None
    mean, variance = {
        "ratio": (-kl, 2 * kl),
        "k2": (kl + kl * kl / 2, 2 * kl**2 * (1 + kl)),
        "k3": (kl, math.expm1(2 * kl) - 2 * kl),
    }[rule.statistic]
    if rule.level == "sequence":
        return _normal_probability(rule.low, rule.high, mean * tokens, variance * tokens)
    return _normal_probability(rule.low, rule.high, mean, variance / tokens)


def _kept_log_ratios(rule: MaskRule) -> list[tuple[float, float]]:
    """Return the intervals of a token's log-ratio in which its statistic is within the rule's bounds."""
    if rule.statistic == "ratio":
        return [(rule.low, rule.high)]
    inner, outer = (_level_set(rule.statistic, bound) for bound in (rule.low, rule.high))
    return [(outer[0], inner[0]), (inner[1], outer[1])]


def _level_set(statistic: str, value: float) -> tuple[float, float]:
    """Return the negative and the positive x at which k2 = x²/2 or k3 = e^x − 1 − x equals ``value``."""
    if value <= 0:
        return 0.0, 0.0
    if math.isinf(value):
        return -math.inf, math.inf
    if statistic == "k2":
        return -math.sqrt(2 * value), math.sqrt(2 * value)
    return _solve_k3(value, -value - 1), _solve_k3(value, math.sqrt(2 * value))


def _solve_k3(value: float, far: float) -> float:
    """Return x between 0 and ``far`` with k3(x) = ``value``, by bisection; k3(``far``) must be larger."""
    near = 0.0
    for _ in range(100):
        middle = (near + far) / 2
        near, far = (middle, far) if math.expm1(middle) - middle < value else (near, middle)
    return far


def _normal_probability(low: float, high: float, mean: float, variance: float) -> float:
    """Return P(low ≤ x ≤ high) of a normal variable."""
    scale = math.sqrt(2 * variance)
    # 1 minus both tails keeps the digits of a probability close to 1.
    return 1.0 - 0.5 * (math.erfc((high - mean) / scale) + math.erfc((mean - low) / scale))
