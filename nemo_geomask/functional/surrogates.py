"""Policy-gradient surrogates: the per-token loss of each objective, to be minimised.

Pure functions of log-ratios and advantages in any token layout ([B, T], [N], …), float32 or float64. The caller pools
sequence statistics and repeats them for each of the sequence's tokens, so nothing here depends on the layout of the
sequences. The ratio is r = π_θ/π_old, or r = π_θ/μ if it is taken against the policy μ of the generation engine; ``sg``
stops the gradient. Losses have the advantage's unit; log-ratios are natural logarithms. Every function raises
ShapeError for half precision, integers, and shapes that don't fit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.errors import ArgumentError
from nemo_geomask.functional.entry import check_layout
from nemo_geomask.functional.ratios import log_bound, saturating_exp

__all__ = [
    "Surrogate",
    "clip_log_ratio",
    "clipped",
    "clipped_weight",
    "gamma_weight",
    "geometric_mean",
    "quadratic",
    "score_function",
    "soft_gate",
    "straight_through_ratio",
    "tapered",
    "unclipped",
]


class Surrogate(NamedTuple):
    """Per-token loss and ratios of a surrogate; tensors broadcast against the token layout."""

    loss: Tensor
    """Per-token loss ℓ_t, differentiable."""
    ratio: Tensor
    """Ratio before clipping, for the metrics ``probs_ratio*``."""
    ratio_clamped: Tensor
    """Ratio after clipping, for the metrics ``probs_ratio_clamped*``."""
    advantages: Tensor | None = None
    """A, if the clip acts only in the direction of the update (PPO): the upper bound where A > 0, the lower one where
    A < 0. None if the clip acts wherever it changes the ratio (CISPO)."""
    dual_clipped: Tensor | None = None
    """bool, True where the dual clip's bound decides the loss. None if the objective has no dual clip."""
    penalty: Tensor | None = None
    """Per-token term that is added to the loss with the same coefficients, but without importance-sampling weights and
    rejection masks. None if the objective has no such term."""

    def clips(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: 1 where the lower, and 1 where the upper clip bound decides the token's loss, else 0."""
        excess = self.ratio.detach() - self.ratio_clamped.detach()  # above 0 beyond the upper bound
        # Signs, since comparisons by element take four times as long on a CPU.
        bound = excess.sign()
        if self.advantages is not None:
            bound = (excess * self.advantages).sign().clamp(min=0.0) * self.advantages.sign()
        return (-bound).clamp(min=0.0), bound.clamp(min=0.0)


def clipped(
    log_ratio: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float, dual_clip: float | None = None
) -> Surrogate:
    r"""Return PPO's pessimistic clipped surrogate, optionally with the dual clip.

    .. math::
        \ell_t = \max\bigl(-r_t A_t,\; -\mathrm{clip}(r_t, 1-\epsilon_{min}, 1+\epsilon_{max})\,A_t\bigr),
        \qquad \ell_t \leftarrow \min(\ell_t, -c\,A_t) \text{ where } A_t < 0

    Args:
        log_ratio: log r, any shape, float32 or float64. For GSPO, the sequence's mean, repeated for each of its tokens.
        advantages: A, same layout.
        clip_min: ε_min ≥ 0, distance of the lower bound from 1.
        clip_max: ε_max ≥ 0, distance of the upper bound from 1.
        dual_clip: c > 1, or None.

    Returns: the surrogate; the lower clip decides only where A < 0, the upper one where A > 0.
    Raises: ShapeError. ArgumentError: a bound is out of its range.
    Source: PPO arXiv:1707.06347 eq. 7; asymmetric bounds DAPO arXiv:2503.14476 eq. 10; dual clip
    arXiv:1912.09729 eq. 5; GSPO arXiv:2507.18071 eq. 5.
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    if not (clip_min >= 0 and clip_max >= 0):
        raise ArgumentError(
            f"clip_min and clip_max are distances from 1 of at least 0, but they are {clip_min} and {clip_max}"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ArgumentError(f"dual_clip must be above 1, or None, but it is {dual_clip}")
    ratio = saturating_exp(log_ratio)
    # The clipped ratio has no gradient where it decides, and inside the bounds it equals the ratio.
    clipped_ratio = ratio.detach().clamp(1.0 - clip_min, 1.0 + clip_max)
    # Where both are equal, clamp's gradient is that of the unclipped product; torch.minimum's would be half of it.
    cost = -advantages
    loss = torch.clamp(ratio * cost, min=clipped_ratio * cost)
    if dual_clip is None:
        return Surrogate(loss, ratio, clipped_ratio, advantages)
    dual_bound = dual_clip * cost
    dual_clipped = (advantages < 0) & (loss > dual_bound)
    return Surrogate(torch.where(dual_clipped, dual_bound, loss), ratio, clipped_ratio, advantages, dual_clipped)


def score_function(curr: Tensor, advantages: Tensor) -> Surrogate:
    r"""Return the surrogate of REINFORCE, :math:`\ell_t = -A_t \log\pi_\theta(y_t)`.

    Args:
        curr: log π_θ of the sampled tokens, any shape, float32 or float64.
        advantages: A, same shape.

    Returns: the surrogate; ``ratio`` holds the log-prob itself, as NeMo-RL reports it under ``disable_ppo_ratio``.
    Raises: ShapeError.
    Source: RLOO arXiv:2402.14740 eq. 4; NeMo-RL ``disable_ppo_ratio``.
    """
    check_layout(curr=curr, advantages=advantages)
    return Surrogate(-advantages * curr, curr, curr)


def clipped_weight(
    log_ratio: Tensor, curr: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float
) -> Surrogate:
    r"""Return CISPO's surrogate, which clips the ratio as a weight and so keeps every token's gradient.

    .. math:: \ell_t = -\mathrm{sg}\bigl(\mathrm{clip}(r_t, 1-\epsilon_{min}, 1+\epsilon_{max})\bigr)\,A_t
        \log\pi_\theta(y_t)

    Args:
        log_ratio: log r, any shape, float32 or float64.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.
        clip_min: ε_min, distance of the lower bound from 1; with 1 or more, as in the paper, there is no lower bound.
        clip_max: ε_max, distance of the upper bound from 1.

    Returns: the surrogate; the clip acts wherever it changes the weight, whatever the sign of the advantage.
    Raises: ShapeError.
    Source: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; NeMo-RL ``use_cispo``.
    """
    check_layout(curr=curr, log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio.detach())
    clipped_ratio = ratio.clamp(1.0 - clip_min, 1.0 + clip_max)
    return Surrogate(-clipped_ratio * advantages * curr, ratio, clipped_ratio)


def unclipped(log_ratio: Tensor, advantages: Tensor, *, penalty: float = 0.0) -> Surrogate:
    r"""Return the importance-weighted policy gradient, :math:`\ell_t = -r_t A_t`, and a penalty on the log-ratio.

    The penalty is :math:`\tau (\log r_t)^2`.

    Args:
        log_ratio: log r, any shape, float32 or float64.
        advantages: A, same shape.
        penalty: τ ≥ 0; 0 for no penalty.

    Returns: the surrogate. Nothing is clipped, so the caller should bound the ratio with a mask.
    Raises: ShapeError.
    Source: prime-rl's IPO (`loss.py`, 559b44772), whose mask is |π_θ - μ| ≤ ε.
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio)
    return Surrogate(-ratio * advantages, ratio, ratio, penalty=penalty * log_ratio.square() if penalty else None)


def gamma_weight(
    sequence_log_ratio: Tensor,
    curr: Tensor,
    advantages: Tensor,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Surrogate:
    r"""Return VESPO's surrogate: REINFORCE under a smooth weight of the sequence's ratio W.

    .. math:: \ell_t = -\mathrm{sg}\bigl(\varphi(W)\bigr)\,A_t \log\pi_\theta(y_t),\qquad
        \varphi(W) = e^{\lambda}\,W^{k}\,e^{-\lambda W}

    φ(1) = 1, φ peaks at W = k/λ, and it vanishes as W → 0 and as W → ∞. So neither W nor the exponent needs a clip.

    Args:
        sequence_log_ratio: log W, the sum over the sequence, repeated for each of its tokens; float32 or float64.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.
        k_pos, lambda_pos: k > 0 and λ > 0 where A ≥ 0.
        k_neg, lambda_neg: k > 0 and λ > 0 where A < 0.

    Returns: the surrogate; its ratio is W.
    Raises: ShapeError.
    Source: VESPO, arXiv:2602.10693; its authors' code and TRL ``loss_type: vespo``, which clamp log W.
    """
    check_layout(curr=curr, sequence_log_ratio=sequence_log_ratio, advantages=advantages)
    log_ratio = sequence_log_ratio.detach()
    ratio = saturating_exp(log_ratio)
    k = _where(advantages < 0, k_neg, k_pos, like=log_ratio)
    lambda_ = _where(advantages < 0, lambda_neg, lambda_pos, like=log_ratio)
    weight = torch.exp(lambda_ * (1 - ratio) + k * log_ratio)
    return Surrogate(-weight * advantages * curr, ratio, ratio)


def tapered(sequence_log_ratio: Tensor, curr: Tensor, advantages: Tensor) -> Surrogate:
    r"""Return TOPR's surrogate: REINFORCE, with the sequence's ratio W as a weight of at most 1 where A < 0.

    .. math:: \ell_t = -w\,A_t \log\pi_\theta(y_t),\qquad
        w = 1 \text{ where } A_t > 0,\; \mathrm{sg}\bigl(\min(W, 1)\bigr) \text{ elsewhere}

    Args:
        sequence_log_ratio: log W, the sum over the sequence, repeated for each of its tokens; float32 or float64.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.

    Returns: the surrogate; its ratio is W.
    Raises: ShapeError.
    Source: TOPR, arXiv:2503.14286, whose weight depends on the sign of the reward.
    """
    check_layout(curr=curr, sequence_log_ratio=sequence_log_ratio, advantages=advantages)
    ratio = saturating_exp(sequence_log_ratio.detach())
    weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0))
    return Surrogate(-weight * advantages * curr, ratio, ratio)


def quadratic(log_ratio: Tensor, curr: Tensor, advantages: Tensor, *, beta: float) -> Surrogate:
    r"""Return DRO's surrogate as in verl, REINFORCE with a quadratic penalty on the log-ratio.

    .. math:: \ell_t = -\bigl(A_t \log\pi_\theta(y_t) - \tfrac{\beta}{2} (\log r_t)^2\bigr)

    This is a regression of the log-ratio on A/β: the gradient is 0 where log r = A/β.

    Args:
        log_ratio: log r, any shape, float32 or float64.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.
        beta: β > 0.

    Returns: the surrogate; nothing is ever clipped.
    Raises: ShapeError.
    Source: verl ``loss_mode: dro`` (`core_algos.py`, 1dda039b9).
    """
    check_layout(curr=curr, log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio.detach())
    return Surrogate(-(advantages * curr - 0.5 * beta * log_ratio.square()), ratio, ratio)


def soft_gate(log_ratio: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float) -> Surrogate:
    r"""Return SAPO's surrogate, with a smooth gate in place of the clip.

    .. math:: \ell_t = -\tfrac{4}{\tau_t}\,\sigma\bigl(\tau_t (r_t - 1)\bigr)\,A_t,\qquad
        \tau_t = \tau_{pos} \text{ if } A_t > 0 \text{ else } \tau_{neg}

    At r = 1 the derivative of the gate by r is 1, so the first update equals the unclipped policy gradient.

    Args:
        log_ratio: log r, any shape, float32 or float64.
        advantages: A, same shape.
        tau_pos: τ_pos > 0, the gate's temperature where A > 0.
        tau_neg: τ_neg > 0, the gate's temperature elsewhere.

    Returns: the surrogate; nothing is ever clipped.
    Raises: ShapeError.
    Source: SAPO, arXiv:2511.20347 eq. 5 and 6.
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio)
    tau = _where(advantages > 0, tau_pos, tau_neg, like=ratio)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return Surrogate(loss, ratio, ratio)


def straight_through_ratio(sequence_log_ratio: Tensor, curr: Tensor) -> Tensor:
    r"""Return GSPO-token's log-ratio, which has the sequence's value and the token's gradient.

    :math:`\log s_{i,t} = \mathrm{sg}[\log s_i] + \log\pi_\theta(y_t) - \mathrm{sg}[\log\pi_\theta(y_t)]`

    Args:
        sequence_log_ratio: log s_i, repeated for each token of the sequence; any shape, float32 or float64.
        curr: log π_θ of the sampled tokens, same shape.

    Returns: same shape, differentiable in ``curr`` only.
    Raises: ShapeError.
    Source: GSPO, arXiv:2507.18071 eq. 13 and 14.
    """
    check_layout(curr=curr, sequence_log_ratio=sequence_log_ratio)
    return sequence_log_ratio.detach() + (curr - curr.detach())


def clip_log_ratio(log_ratio: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float) -> Tensor:
    r"""Return GMPO's token log-ratios, clipped where the clip lowers the objective, as in PPO.

    :math:`\min(x_t, \log(1+\epsilon_{max}))` where A > 0, :math:`\max(x_t, \log(1-\epsilon_{min}))` where
    A < 0, and :math:`x_t` where A = 0. There the loss is 0 in any case.

    Args:
        log_ratio: x = log r, any shape, float32 or float64.
        advantages: A, same shape.
        clip_min: ε_min, distance of the ratio's lower bound from 1; with 1 or more there is no lower bound.
        clip_max: ε_max, distance of the ratio's upper bound from 1.

    Returns: the clipped log-ratio, same shape, differentiable.
    Raises: ShapeError.
    Source: GMPO, arXiv:2507.20673 eq. 4; its bounds are (e^{-0.4}, e^{0.4}).
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    low, high = log_bound(1.0 - clip_min, default=-math.inf), math.log1p(clip_max)
    clipped_below = torch.where(advantages < 0, log_ratio.clamp(min=low), log_ratio)
    return torch.where(advantages > 0, log_ratio.clamp(max=high), clipped_below)


def geometric_mean(mean_clipped_log_ratio: Tensor, advantages: Tensor) -> Tensor:
    r"""Return GMPO's loss, :math:`\ell_i = -A_i\,\exp\bigl(\tfrac1{n_i}\sum_t x_{i,t}\bigr)`.

    Args:
        mean_clipped_log_ratio: mean over the sequence of the clipped log-ratios x from :func:`clip_log_ratio`, repeated
            for each of its tokens; any shape, float32 or float64.
        advantages: the sequence's advantage A_i, same shape.

    Returns: the loss of each token, same shape, differentiable.
    Raises: ShapeError.
    Source: GMPO, arXiv:2507.20673 eq. 4.
    """
    check_layout(mean_clipped_log_ratio=mean_clipped_log_ratio, advantages=advantages)
    return -advantages * saturating_exp(mean_clipped_log_ratio)


def _where(condition: Tensor, if_true: float, if_false: float, *, like: Tensor) -> Tensor:
    """Return ``torch.where`` of two numbers in the dtype of ``like``; from two floats torch would make float32."""
    return torch.where(condition, if_true, like.new_full((), if_false))
