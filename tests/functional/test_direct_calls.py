"""Functions called alone, without a loss around them: values, ratios and derivatives against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import functional as F
from nemo_geomask.errors import GeomaskError, ShapeError
from nemo_geomask.functional.entry import check_dense

ADVANTAGES = torch.tensor([2.0, 0.5, 0.0, -0.5])
RATIO = torch.tensor([0.5, 2.0, 1.5, 0.25])
CURR = torch.tensor([-1.0, -2.0, -0.5, -4.0])


class OnSeveralRanks(torch.Tensor):
    """A tensor with the method by which a DTensor is recognised."""

    def full_tensor(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "x must be a tensor, but it is a list"),
        (
            torch.zeros(2).as_subclass(OnSeveralRanks),
            "x must be a dense tensor, but it is a DTensor; pass value.full_tensor(), or this rank's shard "
            "value.to_local()",
        ),
        (
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "x must be a dense tensor, but it is a nested tensor; pad it, or pack its rows and give their cu_seqlens",
        ),
        (
            torch.eye(2).to_sparse(),
            "x must be a dense tensor, but it is a sparse tensor (torch.sparse_coo); pass value.to_dense()",
        ),
        (
            torch.zeros(2).to(torch.float8_e4m3fn),
            "x must be a dense tensor, but it is of torch.float8_e4m3fn; convert it to bfloat16 or float32, with its "
            "scales",
        ),
        (
            torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
            "x must be a dense tensor, but it is of torch.qint8; convert it to bfloat16 or float32, with its scales",
        ),
    ],
    ids=["list", "DTensor", "nested", "sparse", "float8", "quantized"],
)
def test_a_tensor_that_is_not_dense_is_named_with_what_to_do(value, message):
    with pytest.raises(ShapeError) as caught:
        check_dense("x", value)
    assert str(caught.value) == message
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool):
        check_dense("x", torch.zeros(2, dtype=dtype))


def check(surrogate, loss, ratio, ratio_clamped, **others):
    for found, expected in zip(surrogate[:3], (loss, ratio, ratio_clamped), strict=True):
        torch.testing.assert_close(found, torch.as_tensor(expected))
    for name in ("advantages", "dual_clipped", "penalty"):
        if name in others:
            torch.testing.assert_close(getattr(surrogate, name), others[name])
        else:
            assert getattr(surrogate, name) is None


def test_unclipped_is_the_ratio_times_the_advantage():
    x = RATIO.log()
    check(F.unclipped(x, ADVANTAGES), -RATIO * ADVANTAGES, RATIO, RATIO)
    check(F.unclipped(x, ADVANTAGES, penalty=0.1), -RATIO * ADVANTAGES, RATIO, RATIO, penalty=0.1 * x * x)


def test_clipped_weight_multiplies_the_log_prob():
    found = F.clipped_weight(RATIO.log(), CURR, ADVANTAGES, clip_min=0.4, clip_max=0.3)
    clamped = torch.tensor([0.6, 1.3, 1.3, 0.6])
    check(found, -clamped * ADVANTAGES * CURR, RATIO, clamped)


def test_gamma_weight_has_settings_for_each_sign():
    settings = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 1.0, "lambda_neg": 0.5}
    found = F.gamma_weight(RATIO.log(), CURR, ADVANTAGES, **settings)
    weight = []
    for ratio, advantage in zip(RATIO.tolist(), ADVANTAGES.tolist(), strict=True):
        k, rate = (1.0, 0.5) if advantage < 0 else (2.0, 3.0)
        weight.append(math.exp(rate) * ratio**k * math.exp(-rate * ratio))
    check(found, -torch.tensor(weight) * ADVANTAGES * CURR, RATIO, RATIO)


def test_quadratic_is_reinforce_and_a_square():
    x = RATIO.log()
    check(F.quadratic(x, CURR, ADVANTAGES, beta=0.3), -ADVANTAGES * CURR + 0.15 * x * x, RATIO, RATIO)


@pytest.mark.parametrize("advantage", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_a_clip_decides_only_against_the_direction_of_the_update(advantage):
    ratio, clamped = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.8, 1.0, 1.2])
    surrogate = F.Surrogate(ratio, ratio, clamped, torch.full((3,), advantage))
    low, high = surrogate.clips()
    assert low.tolist() == [advantage < 0, False, False]
    assert high.tolist() == [False, False, advantage > 0]
    low, high = surrogate._replace(advantages=None).clips()
    assert (low.tolist(), high.tolist()) == ([True, False, False], [False, False, True])


@pytest.mark.parametrize("clip_min", [1.0, 2.0])
def test_a_lower_distance_of_1_or_more_is_no_lower_bound(clip_min):
    x, advantages = torch.tensor([-30.0, -0.1, 3.0, -30.0, 3.0]), torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0])
    found = F.clip_log_ratio(x, advantages, clip_min=clip_min, clip_max=0.5)
    assert found.tolist() == pytest.approx([-30.0, -0.1, 3.0, -30.0, math.log(1.5)])


def test_k4_is_the_log_ratio_times_the_ratio():
    x, ratio = torch.tensor([-0.5, 2.0]), torch.tensor([3.0, 0.25])
    assert F.kl_estimate(x, "k4", ratio=ratio).tolist() == [-1.5, 0.5]
    assert F.kl_estimate(x, "k4").tolist() == [-0.5, 2.0]


def test_the_output_clamp_stops_the_gradient_of_another_estimator_too():
    curr = torch.tensor([0.5, 3.0], requires_grad=True)
    zero = torch.zeros(2)
    # k1 is 0.5 and 3, of which the second is clamped; k2, which is differentiated, is 0.125 and 4.5.
    value = F.kl_penalty(
        curr=curr,
        ref=zero,
        prev=zero,
        gen=zero,
        value="k1",
        gradient="k2",
        importance_weighted=False,
        input_clamp=None,
        output_clamp=2.0,
    )
    assert value.tolist() == pytest.approx([0.5, 2.0], rel=2e-7)  # an ulp
    value.sum().backward()
    assert curr.grad.tolist() == [0.5, 0.0]


def test_a_constant_may_be_below_1():
    found = F.token_coefficients(
        "constant",
        mask=torch.tensor([1.0, 0.0]),
        tokens_of_sequence=None,
        global_seqs=torch.tensor(4.0),
        global_toks=torch.tensor(1.0),
        constant=0.5,
    )
    assert found.tolist() == [0.5, 0.0]


def test_the_ratios_difference_from_1_saturates_above_and_not_below():
    x = torch.tensor([math.log(2.0), 100.0, -100.0, 0.0], dtype=torch.float64)
    expected = [1.0, math.expm1(40.0), math.expm1(-100.0), 0.0]
    assert F.token_statistic(x, "ratio_diff").tolist() == pytest.approx(expected)


def test_log_probs_above_0_count_as_0():
    log_p, log_q = torch.tensor([-0.5, 0.3]), torch.tensor([0.3, -0.5])
    for statistic in ("prob_diff", "binary_kl", "binary_kl_reverse", "binary_kl_max"):
        found = F.binary_statistic(log_p, log_q, statistic)
        assert torch.equal(found, F.binary_statistic(log_p.clamp(max=0), log_q.clamp(max=0), statistic))


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.5, 0.7, 0.99, 0.9999, 0.99999])
def test_a_binary_kl_is_accurate_for_small_and_for_large_probabilities(p):
    log_p, log_q = torch.tensor(math.log(p)), torch.tensor(-0.5)  # float32
    x, y = float(log_p), -0.5
    expected = math.exp(y) * (y - x) - math.expm1(y) * (math.log(-math.expm1(y)) - math.log(-math.expm1(x)))
    found = F.binary_statistic(log_p, log_q, "binary_kl")
    assert abs(found.item()) == pytest.approx(expected, rel=1e-6, abs=1e-7)


SIZES = torch.tensor([0.1, 0.2, 5.0], dtype=torch.float64)


def test_a_bound_is_rounded_to_float32_whatever_the_default_dtype(default_dtype):
    expected = float(torch.tensor(0.15, dtype=torch.float32))
    for dtype in (torch.float32, torch.float64):
        default_dtype(dtype)
        assert F.bound_by_mean(SIZES, 0.1) == expected


def test_bounds_do_not_depend_on_the_default_device():
    expected = F.bound_by_mean(SIZES, 0.16), F.bound_by_share(SIZES, 0.5)
    with torch.device("meta"):
        assert (F.bound_by_mean(SIZES, 0.16), F.bound_by_share(SIZES, 0.5)) == expected


def test_topr_truncates_only_what_is_made_less_likely():
    advantages, log_ratio = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0.3, 1.7, 0.3, 1.7]).log()
    curr = CURR.clone().requires_grad_()
    F.tapered(log_ratio, curr, advantages).loss.sum().backward()
    torch.testing.assert_close(curr.grad, torch.tensor([-1.0, -1.0, 0.3, 1.0]))


def test_the_kl_times_the_policy_ratio_has_an_unbiased_gradient():
    curr = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    prev, ref = torch.tensor([[-1.2, -1.9], [-1.5, -1.8]], dtype=torch.float64)
    options = {"value": "k3", "gradient": None, "importance_weighted": True, "input_clamp": None, "output_clamp": None}
    term = F.kl_penalty(curr=curr, ref=ref, prev=prev, gen=prev, **options)
    term.sum().backward()
    torch.testing.assert_close(term.detach(), torch.tensor([0.13012, 0.01937], dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(curr.grad, torch.tensor([0.61070, -0.18097], dtype=torch.float64), atol=1e-5, rtol=0)


def test_the_interpolated_policy_moves_with_the_lag():
    old, curr = torch.full((5,), -2.0), torch.full((5,), -1.0, requires_grad=True)
    found = F.interpolated_logprobs(old, curr, version=5, sampled_at=torch.tensor([3, 4, 2, 5, 6]))
    torch.testing.assert_close(found, torch.tensor([-1.5, -2.0, -4 / 3, -2.0, -2.0]))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: F.clipped(RATIO, ADVANTAGES, clip_min=-0.2, clip_max=0.2), "clip_min and clip_max are distances"),
        (lambda: F.clipped(RATIO, ADVANTAGES, clip_min=0.2, clip_max=0.2, dual_clip=0.5), "dual_clip must be above 1"),
        (lambda: F.filter_weight(RATIO, min=2, max=1), r"min \(2\) exceeds max \(1\)"),
        (lambda: F.k3(RATIO.numpy()), "log_ratio must be .* tensor, but it is a NumPy ndarray"),
        (lambda: F.k3(0.5), "log_ratio must be .* tensor, but it is a float"),
    ],
)
def test_arguments_that_break_their_docstrings_are_refused(attempt, message):
    with pytest.raises(GeomaskError, match=message):
        attempt()
