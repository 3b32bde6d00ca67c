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


@pytest.mark.parametrize("advantage", [0.0, 0.5, 1.5])
def test_the_dual_clip_is_for_negative_advantages(advantage):
    log_ratio = doubles(-3.0, 0.0, 3.0)
    advantages = torch.full_like(log_ratio, advantage)
    plain = F.clipped(log_ratio, advantages, clip_min=0.2, clip_max=0.3)
    dual = F.clipped(log_ratio, advantages, clip_min=0.2, clip_max=0.3, dual_clip=1.1)
    assert dual.dual_clipped.tolist() == [False] * 3
    assert torch.equal(dual.loss, plain.loss)


def test_gmpo_clips_nothing_without_an_advantage():
    log_ratio = doubles(-3.0, 0.0, 3.0)
    assert torch.equal(F.clip_log_ratio(log_ratio, doubles(0.0, 0.0, 0.0), clip_min=0.2, clip_max=0.3), log_ratio)


def test_values_whose_middle_float32_rounds_to_the_upper_one_are_parted_at_the_lower():
    lower, upper = 1.0, 1.0 + 2**-23
    # In float64 the middle lies between them; in float32 it rounds to the even one of the two.
    for first, second in ((lower, upper), (upper, 1.0 + 2**-22)):
        bound = F.bound_by_mean(doubles(first, second), first)
        assert first <= bound < second
