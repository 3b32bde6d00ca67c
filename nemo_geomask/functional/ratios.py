r"""Log-ratios: their exponentials, bounds on them, statistics that masks pool, and importance-sampling weights.

Log-ratios are pooled and compared as they are. Their exponential is taken last, and saturates instead of overflowing.
:mod:`nemo_geomask.segments` pools over sequences. The mismatch log-ratio x = log π_prev − log π_gen compares the
training engine with the generation engine. Pooled over a token, sequence or other level, it gives the importance weight
:math:`w = e^x`, which multiplies the surrogate and carries no gradient.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nemo_geomask.errors import ArgumentError
from nemo_geomask.functional.entry import check_choice, check_layout

__all__ = [
    "LOG_RATIO_LIMIT",
    "BinaryStatistic",
    "Statistic",
    "Weight",
    "binary_statistic",
    "clamp_weight",
    "filter_weight",
    "interpolated_logprobs",
    "k3",
    "log_bound",
    "saturating_exp",
    "token_statistic",
]

LOG_RATIO_LIMIT = 40.0
"""Natural logarithm of the largest ratio represented, ``exp(40) = 2.4e17``.

float32 overflows at 88.7, and the loss multiplies a ratio by a weight and an advantage and sums the products over
thousands of tokens. With ratios of at most ``exp(40)``, finite inputs give a finite loss."""
Statistic = Literal["ratio", "k2", "k3", "ratio_diff", "ratio_abs"]
BinaryStatistic = Literal["prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max"]


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Return x clamped to [low, high]; the gradient is 0 at the bounds and outside them.

    ``hardtanh`` is torch's clamp whose backward pass is one operation; that of ``Tensor.clamp`` is four on a CPU.
    """
    return torch.nn.functional.hardtanh(x, low, high)


def saturating_exp(log_ratio: Tensor) -> Tensor:
    r"""Return :math:`e^{\min(x, 40)}`: the ratio, but at most the largest one represented.

    Infinity times 0 would be NaN. To replace infinity by 0, as NeMo-RL's ``nan_to_num(posinf=0)`` does, would silently
    drop the sample with the largest weight instead of truncating the weight.

    Args:
        log_ratio: x, any shape, float32 or float64, natural logarithm. NaN stays NaN.

    Returns: the ratio, same shape and dtype, differentiable; the gradient is 0 where x > 40.
    Raises: ShapeError: half precision or integers.
    """
    check_layout(log_ratio=log_ratio)
    return torch.exp(clamp(log_ratio, -math.inf, LOG_RATIO_LIMIT))


def log_bound(bound: float | None, *, default: float) -> float:
    """Return the natural logarithm of a bound on a ratio: -inf for 0, and ``default`` for None."""
    if bound is None:
        return default
    return math.log(bound) if bound > 0 else -math.inf


def k3(log_ratio: Tensor) -> Tensor:
    r"""Return :math:`e^x - 1 - x` for x = log(p/q): the estimate k3 of KL(q ‖ p) from a token sampled from q.

    For KL(π_θ ‖ π_ref) with tokens from π_θ, x is log π_ref − log π_θ.

    Args:
        log_ratio: x, any shape, float32 or float64, natural logarithm.

    Returns: same shape and dtype, at least 0, nats, differentiable; the value is constant where x > 40.
    Raises: ShapeError: half precision or integers.
    Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    check_layout(log_ratio=log_ratio)
    x = clamp(log_ratio, -math.inf, LOG_RATIO_LIMIT)
    return torch.expm1(x) - x


def token_statistic(log_ratio: Tensor, statistic: str) -> Tensor:
    r"""Return the per-token value that a mask pools, for a log-ratio x = log ρ with the sampler in the denominator.

    ============== ==================== ==========================================================
    statistic      value                pooled mean estimates
    ============== ==================== ==========================================================
    ``ratio``      :math:`x`            log of the geometric mean of ρ; bounds are taken as logs
    ``k2``         :math:`x^2 / 2`      half the mean squared log-ratio
    ``k3``         :math:`e^x - 1 - x`  KL(sampler ‖ other) with tokens from the sampler
    ``ratio_abs``  :math:`e^{|x|}`      the larger of ρ and 1/ρ
    ``ratio_diff`` :math:`e^x - 1`      its size :math:`|e^x - 1|`: twice the total variation
    ============== ==================== ==========================================================

    In a mean, positive and negative x cancel (the geometric mean of ρ = ¼, 1, 4 is 1); k2 and k3, which are
    non-negative, don't. ``ratio_diff`` is constant where x > 40, and ``ratio_abs`` where abs(x) > 40.

    Args:
        log_ratio: x, any shape, float32 or float64.
        statistic: name from the table.

    Returns: same shape and dtype, nats (k2: nats²).
    Raises: ArgumentError: an unknown statistic. ShapeError: half precision or integers.
    Source: Schulman, "Approximating KL divergence" (2020); trust-region masking, arXiv:2512.23075; ``ratio_diff``:
    VACO, arXiv:2603.01365, as in open-instruct PR 1681; ``ratio_abs``: NeMo-RL PR 4171.
    """
    check_choice("statistic", statistic, get_args(Statistic))
    check_layout(log_ratio=log_ratio)
    if statistic == "ratio":
        return log_ratio
    if statistic == "k2":
        return log_ratio.square() / 2
    if statistic == "ratio_abs":
        return saturating_exp(log_ratio.abs())
    if statistic == "ratio_diff":
        return torch.expm1(clamp(log_ratio, -math.inf, LOG_RATIO_LIMIT))
    return k3(log_ratio)


_LOG_MAX_PROBABILITY = math.log1p(-1e-6)  # limit of the binary KLs' log-probs, see binary_statistic


def binary_statistic(log_p: Tensor, log_q: Tensor, statistic: str) -> Tensor:
    r"""Return the per-token distance of two policies, each reduced to {the sampled token, any other}.

    The distance has the sign of log(p/q): positive where p > q.

    ===================== ====================================================================
    statistic             value
    ===================== ====================================================================
    ``prob_diff``         :math:`p - q`, in absolute value the binary total variation
    ``binary_kl``         :math:`\mathrm{sgn}(p-q)\,[q\log\tfrac qp + (1-q)\log\tfrac{1-q}{1-p}]`
    ``binary_kl_reverse`` the same with p and q exchanged within the brackets
    ``binary_kl_max``     the one of the two KLs that is larger in absolute value
    ===================== ====================================================================

    A large ratio of two tiny probabilities is a small distance; a ratio near 1 of two large ones need not be.

    In the KLs, a probability above :math:`1 - 10^{-6}` counts as :math:`1 - 10^{-6}`. For a token that is certain, one
    engine may return a float32 log-prob of exactly 0 and another -1e-7; without this limit their KL would be infinite.

    Args:
        log_p: log-prob of the sampled token under p, any shape, float32 or float64, at most 0 up to rounding.
        log_q: its log-prob under q, the policy that sampled; same shape.
        statistic: name from the table.

    Returns: same shape and dtype, finite; a probability difference in [-1, 1], or nats.
    Raises: ArgumentError: an unknown statistic. ShapeError: half precision, integers, or shapes that don't fit.
    Source: DPPO, arXiv:2602.04879 (binary TV and binary KL); prime-rl's KPop for the larger of both;
    the bound near 1: prime-rl PR 3283, verl PR 6800.
    """
    check_choice("statistic", statistic, get_args(BinaryStatistic))
    check_layout(log_p=log_p, log_q=log_q)
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    direction = torch.sign(log_p - log_q)
    if statistic == "prob_diff":
        # |p − q| = max(p, q)·(1 − e^−|log p − log q|): expm1 keeps the digits of a small difference.
        return -direction * torch.maximum(log_p, log_q).exp() * torch.expm1(-(log_p - log_q).abs())
    log_p, log_q = log_p.clamp(max=_LOG_MAX_PROBABILITY), log_q.clamp(max=_LOG_MAX_PROBABILITY)
    if statistic == "binary_kl":
        return direction * _binary_kl(log_q, log_p)
    if statistic == "binary_kl_reverse":
        return direction * _binary_kl(log_p, log_q)
    return direction * torch.maximum(_binary_kl(log_q, log_p), _binary_kl(log_p, log_q))


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) = p log(p/q) + (1 − p) log((1 − p)/(1 − q)), at least 0 despite rounding."""
    complement = -torch.expm1(log_p)
    divergence = log_p.exp() * (log_p - log_q) + complement * (_log_complement(log_p) - _log_complement(log_q))
    return divergence.clamp(min=0.0)


def _log_complement(log_p: Tensor) -> Tensor:
    """Return log(1 − p), accurate for small and for large p.

    Source: Mächler, "Accurately computing log(1 - exp(-|a|))" (2012).
    """
    return torch.where(log_p > -math.log(2.0), torch.log(-torch.expm1(log_p)), torch.log1p(-log_p.exp()))


def interpolated_logprobs(old: Tensor, curr: Tensor, *, version: Tensor | int, sampled_at: Tensor) -> Tensor:
    r"""Return log-probs of A-3PO's proximal policy, between the policy that sampled and the current one.

    .. math:: \log\pi_{prox} = \log\pi_b + \alpha\,(\log\pi_\theta - \log\pi_b), \qquad
        \alpha = \mathrm{clamp}\Bigl(\frac{v_\theta - 1 - v_b}{v_\theta - v_b}, 0, 1\Bigr)

    In place of ``prev_logprobs``, they save the pass of the training engine over stale samples.

    Args:
        old: log π_b of the sampled tokens, any shape, float32 or float64.
        curr: log π_θ, same shape.
        version: v_θ, number of updates behind the current policy.
        sampled_at: v_b, number of updates behind the policy that sampled each token, broadcastable to ``old``; where it
            is v_θ or more, α is 0.

    Returns: same shape, without gradient.
    Raises: ShapeError: half precision, integers, or shapes that don't fit.
    Source: A-3PO, arXiv:2512.06547; AReaL ``prox_logp_method: loglinear``.
    """
    check_layout(old=old, curr=curr)
    lag = (version - sampled_at).to(old.dtype)
    alpha = torch.where(lag > 0, ((lag - 1) / lag.clamp(min=1.0)).clamp(0.0, 1.0), 0.0)
    return (old + alpha * (curr - old)).detach()


class Weight(NamedTuple):
    """Importance-sampling weight after truncation, and where its bounds took effect."""

    value: Tensor
    """The weight, at least 0; no unit."""
    outside: Tensor
    """bool, same shape, True where the log-ratio is out of bounds."""


def clamp_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""Return the weight of truncated importance sampling (TIS), :math:`\min(\max(e^{x}, w_{min}), w_{max})`.

    Args:
        log_ratio: pooled mismatch log-ratio x, any shape, float32 or float64.
        min: lower bound on the weight itself; None is 0.
        max: upper bound on the weight itself; None is unbounded.

    Returns: the weight, and where x was out of bounds. For x above 40 the weight is ``exp(40)``, or ``max`` if that is
    smaller.
    Raises: ShapeError: half precision or integers. ArgumentError: ``min`` exceeds ``max``.
    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); NeMo-RL
    ``truncated_importance_sampling_type: tis``.
    """
    return Weight(saturating_exp(log_ratio).clamp(min or 0.0, max), _weight_out_of_bounds(log_ratio, min, max))


def filter_weight(log_ratio: Tensor, *, min: float | None, max: float | None) -> Weight:
    r"""Return IcePop's weight: :math:`e^{x}` if it is within ``[min, max]``, else 0.

    Arguments and errors are those of :func:`clamp_weight`.

    Source: Ring-1T report, arXiv:2510.18855 (double-sided masking, bounds 0.5 and 5); NeMo-RL
    ``truncated_importance_sampling_type: icepop``.
    """
    removed = _weight_out_of_bounds(log_ratio, min, max)
    return Weight(torch.where(removed, 0.0, saturating_exp(log_ratio)), removed)


def _weight_out_of_bounds(log_ratio: Tensor, min: float | None, max: float | None) -> Tensor:
    if min is not None and max is not None and min > max:
        raise ArgumentError(f"min ({min}) exceeds max ({max}), so that no weight is within the bounds; swap them")
    # In log space: exponentials overflow for long sequences, and are too coarse for bounds such as 1 + 3e-4.
    return log_ratio.clamp(log_bound(min, default=-math.inf), log_bound(max, default=math.inf)) != log_ratio
