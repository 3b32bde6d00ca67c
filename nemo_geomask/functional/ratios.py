r"""Log-ratios: their exponentials, bounds on them, statistics that masks pool, and importance-sampling weights.

Pooling and comparing happen on log-ratios; ``exp`` comes last and saturates instead of overflowing. Pooling over a
sequence belongs to :mod:`nemo_geomask.segments`. A weight :math:`w = e^x`, of the mismatch log-ratio x = prev − gen
pooled at the chosen level, multiplies the surrogate and carries no gradient.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_choice, check_layout

__all__ = [
    "LOG_RATIO_LIMIT",
    "BinaryStatistic",
    "Statistic",
    "Weight",
    "binary_statistic",
    "clamp_weight",
    "filter_weight",
    "log_bound",
    "outside",
    "saturating_exp",
    "token_statistic",
]

LOG_RATIO_LIMIT = 40.0
"""Natural logarithm of the largest ratio represented, ``exp(40) = 2.4e17``.

float32 overflows at 88.7, and what a loss multiplies must fit too: a weight, a ratio and an advantage, summed over
thousands of tokens. At 40 a finite input gives a finite loss."""
Statistic = Literal["ratio", "k2", "k3"]
BinaryStatistic = Literal["prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max"]


def within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """x clamped, without gradient beyond the bounds."""
    if torch.compiler.is_compiling():
        return x.clamp(low, high)
    # A clamp's backward pass is four steps on a CPU, hardtanh's is one; but it stops at the bounds themselves.
    return torch.nn.functional.hardtanh(x, -math.inf if low is None else low, math.inf if high is None else high)


def saturating_exp(log_ratio: Tensor) -> Tensor:
    """``exp(min(x, 40))``: a ratio too large to compute with becomes the largest one allowed.

    An overflow to infinity would turn into NaN as soon as it meets a zero, and replacing it by 0 (as NeMo-RL's
    ``nan_to_num(posinf=0)`` does) would silently drop the most over-weighted sample instead of truncating it.

    Args:
        log_ratio: any shape, float32, natural logarithm. NaN stays NaN.

    Returns: the ratio, same shape and dtype; the gradient is 0 above 40 (at 40 itself a graph has one).
    Raises: ShapeError: half precision or integers.
    """
    check_layout(log_ratio=log_ratio)
    return torch.exp(within(log_ratio, None, LOG_RATIO_LIMIT))


def log_bound(bound: float | None, *, default: float) -> float:
    """Natural logarithm of a bound on a ratio; 0 gives -inf and ``None`` gives ``default``."""
    if bound is None:
        return default
    return math.log(bound) if bound > 0 else -math.inf


def outside(value: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where a statistic lies below and above ``[low, high]``; both ends belong to the interval.

    Bounds on a ratio are to be given as logarithms and compared with the log-ratio: a comparison of
    exponentials loses the resolution that bounds such as ``1 + 3e-4`` need and overflows for long sequences.

    Args:
        value: any shape, float32.
        low: lower bound in the units of ``value``, rounded to its dtype; may be -inf.
        high: upper bound, likewise; may be +inf.

    Returns: ``(below, above)``, bool, same shape.
    Raises: ShapeError: half precision or integers.
    """
    check_layout(value=value)
    return value < low, value > high


def token_statistic(log_ratio: Tensor, statistic: str) -> Tensor:
    r"""Per-token value that a mask pools, for a log-ratio x = log ρ.

    ============ ======================== ==========================================================
    statistic    value                    pooled mean estimates
    ============ ======================== ==========================================================
    ``ratio``    :math:`x`                log of the geometric mean of ρ; bounds are taken as logs
    ``k2``       :math:`x^2 / 2`          half the mean squared log-ratio
    ``k3``       :math:`e^x - 1 - x`      KL(sampler ‖ other) with tokens from the sampler
    ============ ======================== ==========================================================

    Means of signed x cancel (ρ = ¼, 1, 4 has geometric mean 1); k2 and k3 are non-negative and don't.

    Args:
        log_ratio: any shape, float32.
        statistic: one of the table.

    Returns: same shape, float32.
    Raises: ArgumentError: an unknown statistic. ShapeError: half precision or integers.
    Source: Schulman, "Approximating KL divergence" (2020); trust-region masking, arXiv:2512.23075.
    """
    check_choice("statistic", statistic, get_args(Statistic))
    check_layout(log_ratio=log_ratio)
    if statistic == "ratio":
        return log_ratio
    if statistic == "k2":
        return log_ratio.square() / 2
    clamped = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(clamped) - clamped


_SURE = math.log1p(-1e-6)


def binary_statistic(log_p: Tensor, log_q: Tensor, statistic: str) -> Tensor:
    r"""Per-token distance of two policies, each seen as {the sampled token, any other}, in the direction of ρ = p/q.

    ===================== ====================================================================
    statistic             value
    ===================== ====================================================================
    ``prob_diff``         :math:`p - q`; its size is the binary total variation
    ``binary_kl``         :math:`\mathrm{sgn}(p-q)\,[q\log\tfrac qp + (1-q)\log\tfrac{1-q}{1-p}]`
    ``binary_kl_reverse`` the same with p and q exchanged within the brackets
    ``binary_kl_max``     the one of the two that is larger in size
    ===================== ====================================================================

    A large ratio of two tiny probabilities is a small distance; a ratio near 1 of two large ones need not be.

    Args:
        log_p: any shape, float32, at most 0 up to rounding.
        log_q: same shape; the policy that sampled.
        statistic: one of the table.

    A KL takes a probability above :math:`1 - 10^{-6}` as that: float32 has a sure token's log-prob at exactly 0 in one
    engine and at -1e-7 in the other, between which the KL would be infinite.

    Returns: same shape, float32, in [-1, 1] or nats, finite.
    Raises: ArgumentError: an unknown statistic. ShapeError: half precision, integers, or shapes that don't fit.
    Source: DPPO, arXiv:2602.04879 (binary TV and binary KL); prime-rl's KPop for the larger of both;
    the bound near 1: prime-rl PR 3283, verl PR 6800.
    """
    check_choice("statistic", statistic, get_args(BinaryStatistic))
    check_layout(log_p=log_p, log_q=log_q)
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    direction = torch.sign(log_p - log_q)
    if statistic == "prob_diff":
        # The larger probability times what is missing to it keeps the digits of a small difference.
        return -direction * torch.maximum(log_p, log_q).exp() * torch.expm1(-(log_p - log_q).abs())
    log_p, log_q = log_p.clamp(max=_SURE), log_q.clamp(max=_SURE)
    if statistic == "binary_kl":
        return direction * _binary_kl(log_q, log_p)
    if statistic == "binary_kl_reverse":
        return direction * _binary_kl(log_p, log_q)
    return direction * torch.maximum(_binary_kl(log_q, log_p), _binary_kl(log_p, log_q))


def _binary_kl(of: Tensor, against: Tensor) -> Tensor:
    others = -torch.expm1(of) * (_log_rest(of) - _log_rest(against))
    return torch.relu(of.exp() * (of - against) + others)


def _log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) with the digits of small and of large p (Mächler, "Accurately computing log(1 - exp(-|a|))", 2012)."""
    return torch.where(log_p > -math.log(2.0), torch.log(-torch.expm1(log_p)), torch.log1p(-log_p.exp()))


class Weight(NamedTuple):
    """A weight after truncation, and where the bounds took effect."""

    value: Tensor
    outside: Tensor
    """bool, True where the log-ratio lies outside the bounds."""


def clamp_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""Truncated importance sampling (TIS): :math:`\min(\max(e^{x}, w_{min}), w_{max})`.

    Args:
        log_ratio: pooled mismatch log-ratio x, any shape, float32.
        min: lower bound on the weight itself; None is 0.
        max: upper bound on the weight itself; None is unbounded.

    Returns: the weight, and where it was outside, decided on x; an x whose exponential overflows gives ``max``.
    Raises: ShapeError: half precision or integers.
    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); NeMo-RL
    ``truncated_importance_sampling_type: tis``.
    """
    return Weight(saturating_exp(log_ratio).clamp(min or 0.0, max), _outside(log_ratio, min, max))


def filter_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""IcePop: :math:`e^{x}` inside ``[min, max]``, 0 outside; arguments and errors are those of :func:`clamp_weight`.

    Source: Ring-1T report, arXiv:2510.18855 (double-sided masking, bounds 0.5 and 5); NeMo-RL
    ``truncated_importance_sampling_type: icepop``.
    """
    removed = _outside(log_ratio, min, max)
    return Weight(torch.where(removed, 0.0, saturating_exp(log_ratio)), removed)


def _outside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    below, above = outside(log_ratio, log_bound(low, default=-math.inf), log_bound(high, default=math.inf))
    return below | above
