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

The estimator whose value is reported and the estimator whose gradient trains are chosen separately.
``docs/background/kl.md`` tabulates which values and which gradients are unbiased for KL(π_θ ‖ π_ref);
``tests/functional/test_kl.py`` tests it.
Source: Schulman (2020), http://joschu.net/blog/kl-approx.html; arXiv:2506.09477 on the gradients.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nemo_geomask.functional.entry import check_choice, check_layout
from nemo_geomask.functional.ratios import clamp, k3, saturating_exp

__all__ = ["KLEstimator", "kl_estimate", "kl_penalty"]

KLEstimator = Literal["k1", "k2", "k3", "k4"]


def kl_estimate(x: Tensor, estimator: KLEstimator, *, ratio: Tensor | None = None) -> Tensor:
    r"""Return the estimator's value for x = log π_θ − log π_ref, differentiable in x.

    Args:
        x: log-ratio at the sampled token, any shape, float32 or float64.
        estimator: ``k1`` :math:`x`, ``k2`` :math:`x^2/2`, ``k3`` :math:`e^{-x} - 1 + x`, ``k4`` :math:`r x`.
        ratio: r, same shape, for ``k4`` only; None is 1 (tokens sampled from π_θ itself).

    Returns: same shape and dtype, nats (k2: nats²).
    Raises: ArgumentError: an unknown estimator. ShapeError: half precision, integers, or shapes that don't fit.
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    check_layout(x=x, ratio=ratio)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return k3(-x)
    assert estimator == "k4"
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
    r"""Return the KL term of the loss for each token.

    :math:`\mu` is the policy of the generation engine, :math:`\pi_{old}` that of the training engine before the batch,
    and sg stops the gradient. With :math:`x = \mathrm{clamp}(\log\pi_\theta - \log\pi_{ref}, \pm c_{in})`:

    - ``gradient=None``, as in NeMo-RL: the result is :math:`\mathrm{clamp}(w\,k(x), \pm c_{out})`, and all of it is
      differentiated. The weight w is the score-function factor
      :math:`e^{\log\pi_\theta - \mathrm{sg}\log\pi_\theta}`, whose value is 1, or :math:`\pi_\theta/\mu` if
      ``importance_weighted``. Where the input clamp acts, w has no gradient.
    - ``gradient="k2"`` or another estimator: the value is the same, but its derivative is replaced by the plain
      derivative of that estimator, without the score-function factor. If ``importance_weighted``, the derivative is
      multiplied by sg w.

    ``k4`` contains a ratio in place of w: :math:`r = \pi_\theta/\pi_{old}`, or :math:`\pi_\theta/\mu` if
    ``importance_weighted``.

    Args:
        curr: log-probs under the policy being optimised, any shape, float32 or float64, with gradient.
        ref: log-probs under the reference policy, same shape.
        prev: log-probs under the training engine before the batch, :math:`\log\pi_{old}`, same shape.
        gen: log-probs under the generation engine, :math:`\log\mu`, same shape.
        value: estimator whose value is returned.
        gradient: estimator that is differentiated; None differentiates the returned value itself.
        importance_weighted: True to weight by :math:`\pi_\theta/\mu`, as ``use_on_policy_kl_approximation`` of NeMo-RL.
        input_clamp: :math:`c_{in}`, bound on the absolute value of x, in nats; None for no bound.
        output_clamp: :math:`c_{out}`, bound on the absolute value of :math:`w\,k(x)`, in nats; None for no bound. The
            gradient is 0 where the bound acts.

    Returns: same shape and dtype, nats.
    Raises: ArgumentError: an unknown estimator. ShapeError: half precision, integers, or shapes that don't fit.
    Source: NeMo-RL ``calculate_kl`` and ``ClippedPGLossFn``; arXiv:2506.09477; open-instruct.
    """
    check_layout(curr=curr, ref=ref, prev=prev, gen=gen)
    x = _clamp(curr - ref, input_clamp)

    def weight(estimator: KLEstimator) -> Tensor:
        """Return w or, for k4, r; the gradient of its logarithm is that of x, so it is 0 where the input clamp acts."""
        zero = x - x.detach()  # has the gradient of x
        if importance_weighted:
            return saturating_exp(curr.detach() - gen + zero)
        if estimator == "k4":
            return saturating_exp(curr.detach() - prev + zero)
        return 1 + zero  # value and gradient of e^zero

    reported = _clamp(weight(value) * kl_estimate(x, value), output_clamp)
    if gradient is None:
        return reported
    # The ratio of k4 belongs to the estimator, so it is differentiated; any other weight is not.
    trained_weight = weight(gradient) if gradient == "k4" else weight(gradient).detach()
    trained = _clamp(trained_weight * kl_estimate(x, gradient), output_clamp)
    return reported.detach() + (trained - trained.detach())


def _clamp(x: Tensor, bound: float | None) -> Tensor:
    """Return x clamped to ± ``bound``, with the gradient of x at the bound itself; None is no bound."""
    if bound is None:
        return x
    # One unit beyond the bound, at which, unlike torch.clamp, this clamp has no gradient.
    bound *= 1 + torch.finfo(x.dtype).eps
    return clamp(x, -bound, bound)
