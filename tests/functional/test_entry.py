"""What the formulas refuse: shapes that would broadcast, dtypes that would round, names that they don't know."""

from __future__ import annotations

import pytest
import torch

from nemo_geomask import functional as F
from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.functional.ratios import within

CLIP = {"clip_min": 0.2, "clip_max": 0.2}
KL = {"value": "k3", "gradient": None, "importance_weighted": False, "input_clamp": None, "output_clamp": None}
# Two tensors each; a function of more gets the second for the others.
PAIRS = {
    "clipped": lambda x, y: F.clipped(x, y, **CLIP),
    "score_function": F.score_function,
    "clipped_weight": lambda x, y: F.clipped_weight(x, y, y, **CLIP),
    "soft_gate": lambda x, y: F.soft_gate(x, y, tau_pos=1.0, tau_neg=1.0),
    "straight_through_ratio": F.straight_through_ratio,
    "clip_log_ratio": lambda x, y: F.clip_log_ratio(x, y, **CLIP),
    "geometric_mean": F.geometric_mean,
    "binary_statistic": lambda x, y: F.binary_statistic(x, y, "binary_kl_max"),
    "kl_estimate": lambda x, y: F.kl_estimate(x, "k4", ratio=y),
    "kl_penalty": lambda x, y: F.kl_penalty(curr=x, ref=y, prev=y, gen=y, **KL),
    "token_coefficients": lambda x, y: F.token_coefficients(
        "sequences", mask=x, tokens_of_sequence=y, global_seqs=torch.ones(()), global_toks=torch.ones(())
    ),
}
SINGLE = {
    "saturating_exp": F.saturating_exp,
    "outside": lambda x: F.outside(x, 0.0, 1.0),
    "clamp_weight": lambda x: F.clamp_weight(x, min=None, max=2.0),
    "filter_weight": lambda x: F.filter_weight(x, min=None, max=2.0),
    "token_statistic": lambda x: F.token_statistic(x, "k3"),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("other", [(4, 1, 2), (2,), (3,), (3, 3), (4, 2)], ids=str)
def test_what_would_broadcast_is_refused(name, other):
    with pytest.raises(ShapeError, match=r"sizes equal to its or 1, but it is \["):
        PAIRS[name](torch.zeros(3, 2), torch.zeros(other))


@pytest.mark.parametrize("name", PAIRS)
def test_one_number_a_sequence_is_allowed(name):
    PAIRS[name](torch.zeros(3, 2), torch.zeros(3, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_dtype_is_float32_or_float64(name, dtype):
    with pytest.raises(ShapeError, match="must be float32 or float64"):
        SINGLE[name](torch.zeros(2, dtype=dtype))
    SINGLE[name](torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: F.kl_estimate(torch.zeros(2), "k9"),
        lambda: F.kl_penalty(
            **dict.fromkeys(("curr", "ref", "prev", "gen"), torch.zeros(2)), **{**KL, "gradient": "k5"}
        ),
        lambda: F.token_statistic(torch.zeros(2), "k1"),
        lambda: F.binary_statistic(torch.zeros(2), torch.zeros(2), "tv"),
        lambda: F.token_coefficients(
            "token",
            mask=torch.ones(2),
            tokens_of_sequence=None,
            global_seqs=torch.ones(()),
            global_toks=torch.ones(()),
        ),
    ],
)
def test_an_unknown_name_is_refused(ask):
    with pytest.raises(ArgumentError, match="must be one of"):
        ask()


@pytest.mark.parametrize("constant", [None, 0.0, -1.0, float("nan")])
def test_constant_normalization_needs_a_constant(constant):
    with pytest.raises(ArgumentError, match="constant"):
        F.token_coefficients(
            "constant",
            mask=torch.ones(2),
            tokens_of_sequence=None,
            global_seqs=torch.ones(()),
            global_toks=torch.ones(()),
            constant=constant,
        )


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_saturated_ratio_has_no_gradient(advantage):
    # Without it the gradient of a ratio e^41 under a negative advantage is 2.4e17.
    x = torch.tensor([39.0, 41.0, 100.0], requires_grad=True)
    F.clipped(x, torch.full((3,), advantage), **CLIP).loss.sum().backward()
    assert x.grad[1:].tolist() == [0.0, 0.0]
    assert (x.grad[0] != 0) == (advantage < 0)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.0), (None, 2.0), (-1.0, None)])
def test_a_clamp_has_no_gradient_beyond_its_bounds(monkeypatch, compiling, low, high):
    # What a graph holds is the same but at the bounds themselves.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x = torch.tensor([-100.0, -1.5, -0.5, 0.0, 1.5, 2.5, 100.0], dtype=torch.float64, requires_grad=True)
    y = within(x, low, high)
    expected = [min(max(value, -1e9 if low is None else low), 1e9 if high is None else high) for value in x.tolist()]
    assert y.tolist() == expected
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == [float(before == after) for before, after in zip(x.tolist(), expected, strict=True)]
