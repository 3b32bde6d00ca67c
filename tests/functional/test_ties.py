"""Values exactly at a bound, and gradients where a clamp acts."""

import math

import pytest
import torch

from nemo_geomask import functional as F


def doubles(*values: float, **options: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def test_exactly_at_the_dual_clip_the_ratio_still_has_its_gradient():
    log_ratio = doubles(math.log(2.0), requires_grad=True)
    assert torch.exp(log_ratio).item() == 2.0  # so that the ratio is c itself
    surrogate = F.clipped(log_ratio, doubles(-1.5), clip_min=0.2, clip_max=4.0, dual_clip=2.0)
    (grad,) = torch.autograd.grad(surrogate.loss.sum(), log_ratio)
    assert surrogate.loss.item() == 3.0
    assert surrogate.dual_clipped.tolist() == [False]
    assert grad.item() == 3.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k4"])
@pytest.mark.parametrize("gradient", [None, "k4"])
@pytest.mark.parametrize("importance_weighted", [False, True])
def test_no_weight_has_a_gradient_where_the_input_clamp_acts(estimator, gradient, importance_weighted):
    curr = doubles(-1.0, -1.0, -4.0, requires_grad=True)
    ref, other = doubles(-4.0, -1.2, -1.0), doubles(-1.3, -1.3, -3.5)
    penalty = F.kl_penalty(
        curr=curr,
        ref=ref,
        prev=other,
        gen=other + 0.2,
        value=estimator,
        gradient=gradient,
        importance_weighted=importance_weighted,
        input_clamp=0.5,
        output_clamp=None,
    )
    (grad,) = torch.autograd.grad(penalty.sum(), curr)
    assert grad[0] == 0  # x = 3 is clamped to 0.5
    assert grad[1] != 0  # x = 0.2 is not
    assert grad[2] == 0  # x = -3
