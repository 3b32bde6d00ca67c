"""Per-token estimators of the KL divergence to a reference policy.

With x = log π_θ − log π_ref at a token sampled from a policy q, and the importance ratio r = π_θ/q:

========= ====================== ==============================================
estimator value                  name elsewhere
========= ====================== ==============================================
``k1``    x                      open-instruct kl1
``k2``    x² / 2                 open-instruct kl2
``k3``    e^{−x} − 1 + x         open-instruct kl3, DeepSeek GRPO
``k4``    r · x                  open-instruct kl4
========= ====================== ==============================================

The value that is reported and the gradient that trains are separate choices; which of them is unbiased for
KL(π_θ ‖ π_ref) is tabulated in ``docs/kl.md`` and pinned by ``tests/functional/test_kl.py``.
Source: Schulman (2020), http://joschu.net/blog/kl-approx.html; arXiv:2506.09477 on the gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nemo_geomask.functional.autograd import with_derivative
from nemo_geomask.functional.ratios import LOG_RATIO_LIMIT, saturating_exp

__all__ = ["KLEstimator", "kl_estimate", "kl_penalty"]

KLEstimator = Literal["k1", "k2", "k3", "k4"]


def kl_estimate(x: Tensor, kind: KLEstimator, *, ratio: Tensor | None = None) -> Tensor:
    r"""The estimator's value for x = log π − log π_ref, differentiable in x.

    Args:
        x: log-ratio at the sampled token, any shape, float32.
        kind: ``k1`` :math:`x`, ``k2`` :math:`x^2/2`, ``k3`` :math:`e^{-x} - 1 + x`, ``k4`` :math:`r x`.
        ratio: r, same shape, for ``k4`` only; None is 1 (tokens sampled from π itself).

    Returns:
        Same shape, float32, nats.
    """
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        clamped = x.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-clamped) + clamped
    return x if ratio is None else ratio * x


def kl_penalty(
    *,
    curr: Tensor,
    ref: Tensor,
    prev: Tensor,
    gen: Tensor,
    value: KLEstimator,
    gradient: KLEstimator | None,
    importance_weighted: bool,
    input_clamp: float | None,
    output_clamp: float | None,
) -> Tensor:
    r"""KL term of the loss, one value a token.

    With :math:`x = \mathrm{clamp}(\log\pi_\theta - \log\pi_{ref}, \pm c_{in})`:

    - ``gradient=None`` (NeMo-RL): :math:`\mathrm{clamp}(w\,k(x), \pm c_{out})`, differentiated as it stands,
      with the score-function factor :math:`w = e^{\log\pi_\theta - \mathrm{sg}\log\pi_\theta}` (value 1), or
      :math:`w = \pi_\theta/\mu` when ``importance_weighted``. Where the input clamp acts, w is detached.
    - ``gradient=kY``: the value above, and the plain derivative of kY (times sg w when ``importance_weighted``),
      without score-function factor.

    ``k4`` brings its own ratio, :math:`r = \pi_\theta/\pi_{old}` (:math:`\pi_\theta/\mu` when
    ``importance_weighted``), in place of w.

    Args:
        curr: log-probs under the policy being optimised, any shape, float32, with gradient.
        ref: under the reference policy, same shape.
        prev: under the training engine at rollout time, same shape.
        gen: under the generation engine, same shape.
        value: estimator reported.
        gradient: estimator differentiated, or None for the value's own.
        importance_weighted: ``use_on_policy_kl_approximation`` of NeMo-RL.
        input_clamp: bound on |x|, or None.
        output_clamp: bound on the weighted estimate's magnitude, or None.

    Returns:
        Same shape, float32, nats.

    Source: NeMo-RL ``calculate_kl`` and ``ClippedPGLossFn``; arXiv:2506.09477; open-instruct.
    """
    with torch.no_grad():
        exact = curr - ref
        x = exact if input_clamp is None else exact.clamp(min=-input_clamp, max=input_clamp)
        # A clamp stops the gradient where it acts: a factor 1 or 0.
        inside = 1 - torch.sign(exact - x).abs()
        ratio = None
        if importance_weighted or "k4" in (value, gradient):
            ratio = saturating_exp(curr - (gen if importance_weighted else prev))

        def weighted(kind: KLEstimator, derivative: Tensor | float) -> tuple[Tensor, Tensor]:
            weight = ratio if importance_weighted or kind == "k4" else None
            estimate, derivative = kl_estimate(x, kind), derivative * inside
            if weight is not None:
                estimate = weight * estimate
            if output_clamp is not None:
                clamped = estimate.clamp(min=-output_clamp, max=output_clamp)
                derivative = derivative * (1 - torch.sign(estimate - clamped).abs())
                estimate = clamped
            # The weight comes last, so that a large one meets a derivative that is already stopped.
            return estimate, derivative if weight is None else weight * derivative

        reported, derivative = weighted(value, _score_derivative(x, value))
        if gradient is not None:
            _, derivative = weighted(gradient, _plain_derivative(x, gradient))
    return with_derivative(curr, value=reported, derivative=derivative)


def _plain_derivative(x: Tensor, kind: KLEstimator) -> Tensor | float:
    """Of the estimator in x; k4's ratio moves along."""
    if kind == "k2":
        return x
    if kind == "k3":
        return -torch.expm1(-x.clamp(min=-LOG_RATIO_LIMIT))
    return 1.0 if kind == "k1" else 1 + x


def _score_derivative(x: Tensor, kind: KLEstimator) -> Tensor:
    """The estimator itself plus its plain derivative: what a factor exp(x - sg x) of value 1 adds up to.

    k4's ratio is that factor already. For k3 the exponentials cancel.
    """
    if kind == "k2":
        return x + x.square() / 2
    return x if kind == "k3" else 1 + x
