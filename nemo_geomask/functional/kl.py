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

from typing import Literal, get_args

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_choice, check_layout
from nemo_geomask.functional.ratios import LOG_RATIO_LIMIT, saturating_exp, within

__all__ = ["KLEstimator", "kl_estimate", "kl_penalty"]

KLEstimator = Literal["k1", "k2", "k3", "k4"]


def kl_estimate(x: Tensor, kind: KLEstimator, *, ratio: Tensor | None = None) -> Tensor:
    r"""The estimator's value for x = log π − log π_ref, differentiable in x.

    Args:
        x: log-ratio at the sampled token, any shape, float32.
        kind: ``k1`` :math:`x`, ``k2`` :math:`x^2/2`, ``k3`` :math:`e^{-x} - 1 + x`, ``k4`` :math:`r x`.
        ratio: r, same shape, for ``k4`` only; None is 1 (tokens sampled from π itself).

    Returns: same shape, float32, nats.
    Raises: ArgumentError: an unknown estimator. ShapeError: half precision, integers, or shapes that don't fit.
    """
    check_choice("kind", kind, get_args(KLEstimator))
    check_layout(x=x, ratio=ratio)
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        clamped = within(x, -LOG_RATIO_LIMIT, None)
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

    Returns: same shape, float32, nats.
    Raises: ArgumentError: an unknown estimator. ShapeError: half precision, integers, or shapes that don't fit.
    Source: NeMo-RL ``calculate_kl`` and ``ClippedPGLossFn``; arXiv:2506.09477; open-instruct.
    """
    check_layout(curr=curr, ref=ref, prev=prev, gen=gen)
    exact = curr - ref
    x = _clamp(exact, input_clamp)

    def weighted(kind: KLEstimator, *, score: bool) -> Tensor:
        if importance_weighted or kind == "k4":
            moving = curr.detach() + (x - x.detach())  # curr, but for the gradient where the input clamp acts
            weight = saturating_exp(moving - (gen if importance_weighted else prev))
            estimate = (weight if score or kind == "k4" else weight.detach()) * kl_estimate(x, kind)
        else:
            estimate = kl_estimate(x, kind)
            if score:
                # w = exp(x − sg x), without its exponential: its value is 1, its derivative that of x.
                estimate = estimate + estimate.detach() * (x - x.detach())
        return _clamp(estimate, output_clamp)

    if gradient is None:
        return weighted(value, score=True)
    trains = weighted(gradient, score=False)
    return weighted(value, score=True).detach() + (trains - trains.detach())


def _clamp(x: Tensor, bound: float | None) -> Tensor:
    """x within ± ``bound``, with gradient at the bound and none beyond."""
    if bound is None:
        return x
    wide = bound * (1 + torch.finfo(x.dtype).eps)
    return within(x, -wide, wide)
