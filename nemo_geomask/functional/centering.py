"""Score centering: REINFORCE without the mean score under the sampler, which pulls the policy towards the sampler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_geomask.errors import ShapeError
from nemo_geomask.functional.entry import check_layout
from nemo_geomask.functional.ratios import saturating_exp
from nemo_geomask.functional.surrogates import Surrogate

__all__ = ["centered_score"]

_SMALLEST_TAIL = 1e-6


def centered_score(
    curr: Tensor,
    gen: Tensor,
    advantages: Tensor,
    *,
    head_curr: Tensor | None = None,
    head_gen: Tensor | None = None,
    weigh: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Surrogate:
    r"""Return REINFORCE's surrogate with the weighted score centred under the sampler μ.

    .. math:: \ell_t = -A_t \Bigl( \mathrm{sg}(w_t) \log\pi_\theta(y_t)
        - \sum_{v \in H_t} \mathrm{sg}(\mu_v w_v - \alpha\,\pi_v) \log\pi_\theta(v) \Bigr), \qquad
        \alpha = \rho\,w(1/\rho),\quad \rho = \frac{1 - \sum_H \mu_v}{1 - \sum_H \pi_v}

    Over the tokens that μ may sample, the mean of the gradient is 0 for every A. H is the head of the sampler's
    distribution; behind it, μ is taken to be proportional to π, which is exact if H is the whole vocabulary.

    Args:
        curr: log π_θ of the sampled tokens, any shape, float32 or float64, with gradient.
        gen: log μ of the sampled tokens, same shape.
        advantages: A, same shape.
        head_curr: log π_θ of the head's tokens, [..., k], with gradient, normalised over the vocabulary; None: the
            score is not centred.
        head_gen: log μ of the same tokens, finite, as vLLM returns them for the top k; None with ``head_curr``.
        weigh: function of the log-ratio log π_θ − log μ of a token that returns its weight, such as ``lambda x:
            clamp_weight(x, min=None, max=2.0).value``; by default 1.

    Returns: the surrogate; its ratio is π_θ/μ.
    Raises: ShapeError.
    Source: arXiv:2609.20807 eq. 9, 12 and 14, as in vime and SkyRL PR 2244.
    """
    check_layout(curr=curr, gen=gen, advantages=advantages)
    log_ratio = curr.detach() - gen
    score = weigh(log_ratio) * curr
    if head_curr is not None or head_gen is not None:
        if head_curr is None or head_gen is None or head_curr.shape[:-1] != curr.shape:
            raise ShapeError(f"head_curr and head_gen must both be {[*curr.shape, 'k']}, k log-probs for each token")
        check_layout(head_curr=head_curr, head_gen=head_gen)
        log_p = head_curr.detach()
        masses = (1 - head_gen.exp().sum(-1), 1 - log_p.exp().sum(-1))
        tail_gen, tail_curr = (mass.clamp(min=_SMALLEST_TAIL).log() for mass in masses)
        alpha = (tail_gen - tail_curr).exp() * weigh(tail_curr - tail_gen)
        residual = head_gen.exp() * weigh(log_p - head_gen) - alpha.unsqueeze(-1) * log_p.exp()
        score = score - (residual * head_curr).sum(-1)
    ratio = saturating_exp(log_ratio)
    return Surrogate(-advantages * score, ratio, ratio)
