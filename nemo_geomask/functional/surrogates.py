"""Policy-gradient surrogates: the per-token loss of each objective, to be minimised.

Pure functions of log-ratios and advantages in any token layout ([B, T], [N], …), float32 or float64. Sequence
statistics come in already pooled and spread over the tokens, so nothing here knows how sequences are laid out.
r = π_θ/π_old, or π_θ/μ where it is taken against the policy that sampled. ShapeError is raised for half precision,
integers, and shapes that don't fit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
    "unclipped",
]


class Surrogate(NamedTuple):
    """What a surrogate gives for each token; tensors broadcast against the token layout."""

    loss: Tensor
    """Per-token loss ℓ_t, differentiable."""
    ratio: Tensor
    """Ratio before clipping, for the metrics ``probs_ratio*``."""
    ratio_clamped: Tensor
    """Ratio after clipping, for the metrics ``probs_ratio_clamped*``."""
    advantages: Tensor | None = None
    """Where a clip acts only if it makes the update smaller: the advantages by whose sign it does. None: it acts
    wherever it changes the ratio."""
    dual_clipped: Tensor | None = None
    """bool, True where the dual clip's bound decides. None: the objective has none."""
    penalty: Tensor | None = None
    """Per-token term that the same coefficients sum, but that no weight and no mask touches. None: there is none."""

    def clips(self) -> tuple[Tensor, Tensor]:
        """Above 0 where the lower, and above 0 where the upper clip bound decides the token's loss."""
        # No comparisons, each of which costs four times as much on a CPU.
        low = self.ratio_clamped.detach() - self.ratio.detach()  # above 0 where the bound is above the ratio
        if self.advantages is None:
            return low, -low
        return torch.minimum(low, -self.advantages), torch.minimum(-low, self.advantages)


def clipped(
    log_ratio: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float, dual_clip: float | None = None
) -> Surrogate:
    r"""PPO's pessimistic clip, optionally with dual clip.

    .. math::
        \ell_t = \max\bigl(-r_t A_t,\; -\mathrm{clip}(r_t, 1-\epsilon_{min}, 1+\epsilon_{max})\,A_t\bigr),
        \qquad \ell_t \leftarrow \min(\ell_t, -c\,A_t) \text{ where } A_t < 0

    Args:
        log_ratio: log r, any shape, float32. Spread from the sequence mean it gives GSPO.
        advantages: A, broadcastable.
        clip_min: ε_min ≥ 0, distance of the lower bound from 1.
        clip_max: ε_max ≥ 0, distance of the upper bound from 1.
        dual_clip: c > 1, or None.

    Returns: the surrogate; the lower clip decides only where A < 0, the upper one where A > 0.
    Raises: ShapeError.
    Source: PPO arXiv:1707.06347 eq. 7; asymmetric bounds DAPO arXiv:2503.14476 eq. 10; dual clip
    arXiv:1912.09729 eq. 5; GSPO arXiv:2507.18071 eq. 5.
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio)
    ratio_clamped = ratio.detach().clamp(1.0 - clip_min, 1.0 + clip_max)
    # min(r·A, clip(r)·A), with the gradient of r·A on ties, which inside the bounds all are; torch.minimum splits it.
    loss = -(ratio * advantages).clamp(max=ratio_clamped * advantages)
    if dual_clip is None:
        return Surrogate(loss, ratio, ratio_clamped, advantages)
    bound = dual_clip * torch.relu(-advantages)  # 0 where A ≥ 0, and there the loss is at most 0
    return Surrogate(loss.clamp(max=bound), ratio, ratio_clamped, advantages, loss.detach() > bound)


def score_function(curr: Tensor, advantages: Tensor) -> Surrogate:
    r"""REINFORCE: :math:`\ell_t = -A_t \log\pi_\theta(y_t)`.

    Args:
        curr: log-probs of the sampled tokens, any shape, float32.
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
    r"""CISPO: clip the weight, keep every token's gradient.

    .. math:: \ell_t = -\mathrm{sg}\bigl(\mathrm{clip}(r_t, 1-\epsilon_{min}, 1+\epsilon_{max})\bigr)\,A_t
        \log\pi_\theta(y_t)

    Args:
        log_ratio: log r, any shape, float32.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.
        clip_min: ε_min; 1 and above is no lower bound, as in the paper.
        clip_max: ε_max.

    Returns: the surrogate; a clip counts as deciding wherever it changes the weight, whatever the advantage.
    Raises: ShapeError.
    Source: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; NeMo-RL ``use_cispo``.
    """
    check_layout(curr=curr, log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio.detach())
    clamped = ratio.clamp(1.0 - clip_min, 1.0 + clip_max)
    return Surrogate(-clamped * advantages * curr, ratio, clamped)


def unclipped(log_ratio: Tensor, advantages: Tensor, *, penalty: float = 0.0) -> Surrogate:
    r"""The importance-weighted policy gradient, :math:`\ell_t = -r_t A_t`, with the penalty :math:`\tau (\log r_t)^2`.

    Args:
        log_ratio: log r, any shape, float32.
        advantages: A, same shape.
        penalty: τ ≥ 0; 0 is none.

    Returns: the surrogate; what bounds the ratio is a mask's business.
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
    r"""VESPO: REINFORCE under a smooth weight of the sequence's whole ratio W.

    .. math:: \ell_t = -\mathrm{sg}\bigl(\varphi(W)\bigr)\,A_t \log\pi_\theta(y_t),\qquad
        \varphi(W) = e^{\lambda}\,W^{k}\,e^{-\lambda W}

    φ(1) = 1, its peak is at W = k/λ, and it vanishes at both ends: no clip is needed, nor a clamp of the exponent.

    Args:
        sequence_log_ratio: log W, the sum over the sequence's tokens, spread over them, float32.
        curr: log π_θ of the sampled tokens, same shape.
        advantages: A, same shape.
        k_pos, lambda_pos: k and λ where A ≥ 0, > 0.
        k_neg, lambda_neg: those where A < 0.

    Returns: the surrogate; its ratio is W.
    Raises: ShapeError.
    Source: VESPO, arXiv:2602.10693; its authors' code and TRL ``loss_type: vespo``, which clamp log W.
    """
    check_layout(curr=curr, sequence_log_ratio=sequence_log_ratio, advantages=advantages)
    log_w = sequence_log_ratio.detach()
    ratio = saturating_exp(log_w)
    negative = torch.relu(-torch.sign(advantages))  # 1 where A < 0
    k, rate = (pos + (neg - pos) * negative for pos, neg in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    weight = torch.exp(rate * (1 - ratio) + k * log_w)
    return Surrogate(-weight * advantages * curr, ratio, ratio)


def quadratic(log_ratio: Tensor, curr: Tensor, advantages: Tensor, *, beta: float) -> Surrogate:
    r"""DRO as in verl: :math:`\ell_t = -\bigl(A_t \log\pi_\theta(y_t) - \tfrac{\beta}{2} (\log r_t)^2\bigr)`.

    A regression: it holds the policy where the log-ratio is A/β, and pulls to ratio 1 where A = 0.

    Args:
        log_ratio: log r, any shape, float32.
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
    r"""SAPO: a smooth gate in place of the clip.

    .. math:: \ell_t = -\tfrac{4}{\tau_t}\,\sigma\bigl(\tau_t (r_t - 1)\bigr)\,A_t,\qquad
        \tau_t = \tau_{pos} \text{ if } A_t > 0 \text{ else } \tau_{neg}

    The gate's slope at r = 1 is 1, so the first update equals the unclipped policy gradient.

    Args:
        log_ratio: log r, any shape, float32.
        advantages: A, same shape.
        tau_pos: gate temperature for A > 0, > 0.
        tau_neg: gate temperature for A ≤ 0, > 0.

    Returns: the surrogate; nothing is ever clipped.
    Raises: ShapeError.
    Source: SAPO, arXiv:2511.20347 eq. 5 and 6.
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    ratio = saturating_exp(log_ratio)
    # Both as tensors of the input's dtype: torch.where on two Python floats would round them to float32.
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return Surrogate(loss, ratio, ratio)


def straight_through_ratio(sequence_log_ratio: Tensor, curr: Tensor) -> Tensor:
    r"""GSPO-token's log-ratio: the value of the sequence, the gradient of the token.

    :math:`\log s_{i,t} = \mathrm{sg}[\log s_i] + \log\pi_\theta(y_t) - \mathrm{sg}[\log\pi_\theta(y_t)]`

    Args:
        sequence_log_ratio: log s_i spread over the tokens.
        curr: log π_θ of the sampled tokens, same shape.

    Returns: same shape, differentiable in ``curr`` only.
    Raises: ShapeError.
    Source: GSPO, arXiv:2507.18071 eq. 13 and 14.
    """
    check_layout(curr=curr, sequence_log_ratio=sequence_log_ratio)
    return sequence_log_ratio.detach() + (curr - curr.detach())


def clip_log_ratio(log_ratio: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float) -> Tensor:
    r"""GMPO's token clip in log space, pessimistic in the advantage's direction.

    :math:`x_t = \min(x, \log(1+\epsilon_{max}))` where A > 0, :math:`\max(x, \log(1-\epsilon_{min}))` where
    A < 0, and x itself where A = 0 (where it does not matter).

    Args:
        log_ratio: x = log r, any shape, float32.
        advantages: A, same shape.
        clip_min: ε_min; 1 and above is no lower bound.
        clip_max: ε_max.

    Returns: the clipped log-ratio.
    Raises: ShapeError.
    Source: GMPO, arXiv:2507.20673 eq. 4; its bounds are (e^{-0.4}, e^{0.4}).
    """
    check_layout(log_ratio=log_ratio, advantages=advantages)
    low, high = log_bound(1.0 - clip_min, default=-math.inf), math.log1p(clip_max)
    raised = torch.where(advantages < 0, log_ratio.clamp(min=low), log_ratio)
    return torch.where(advantages > 0, log_ratio.clamp(max=high), raised)


def geometric_mean(mean_clipped_log_ratio: Tensor, advantages: Tensor) -> Tensor:
    r"""GMPO: :math:`\ell_i = -A_i\,\exp\bigl(\tfrac1{n_i}\sum_t x_{i,t}\bigr)` with token-clipped :math:`x`.

    Args:
        mean_clipped_log_ratio: mean over the sequence of :func:`clip_log_ratio`, spread over its tokens.
        advantages: the sequence's advantage A_i, same shape.

    Returns: the per-token loss.
    Raises: ShapeError.
    Source: GMPO, arXiv:2507.20673 eq. 4.
    """
    check_layout(mean_clipped_log_ratio=mean_clipped_log_ratio, advantages=advantages)
    return -advantages * saturating_exp(mean_clipped_log_ratio)
