"""Arguments that the formulas refuse: shapes that would broadcast, dtypes that would round, unknown names."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from nemo_geomask import functional as F
from nemo_geomask.errors import ArgumentError, ShapeError

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


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("other", [(4, 1, 2), (2,), (3,), (3, 3), (4, 2)], ids=str)
def test_what_would_broadcast_is_refused(name, other):
    with pytest.raises(ShapeError, match=r"each of the same size or 1, but it is \["):
        PAIRS[name](torch.zeros(3, 2), torch.zeros(other))


@pytest.mark.parametrize("name", PAIRS)
def test_one_number_a_sequence_is_allowed(name):
    PAIRS[name](torch.zeros(3, 2), torch.zeros(3, 1))


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


@pytest.mark.parametrize(
    ("clamp", "low", "high"),
    [
        (lambda x: F.saturating_exp(x).log(), None, F.LOG_RATIO_LIMIT),
        (lambda x: F.kl_penalty(curr=x, ref=x.detach() * 0, prev=x, gen=x, **{**KL, "input_clamp": 2.0}), -2.0, 2.0),
    ],
    ids=["saturating_exp", "kl_penalty"],
)
def test_a_clamp_has_no_gradient_beyond_its_bounds(clamp, low, high):
    x = torch.tensor([-100.0, -2.5, -0.5, 0.5, 1.5, 2.5, 100.0], dtype=torch.float64, requires_grad=True)
    y = clamp(x)
    inside = torch.ones_like(x).bool() if low is None else x >= low
    inside &= x <= high
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert ((grad != 0) == inside).all()


def test_inside_the_clip_the_halves_of_a_tie_add_up():
    # min(rA, clip(r)A): both products are equal there, and each gets half of the gradient.
    x = torch.tensor([-0.15, -0.01, 0.0, 0.01, 0.15], requires_grad=True)
    for advantage in (0.7, -1.3):
        loss = F.clipped(x, torch.full((5,), advantage), **CLIP).loss
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert torch.equal(grad, -x.detach().exp() * advantage)


ONES = torch.ones(2)
COUNTS = {"global_seqs": torch.ones(()), "global_toks": torch.ones(())}
VESPO = {"k_pos": 1.0, "lambda_pos": 1.0, "k_neg": 1.0, "lambda_neg": 1.0}
# Tensors of each function, and its other arguments.
TENSORS = {
    "binary_statistic": (("log_p", "log_q"), {"statistic": "prob_diff"}),
    "bound_by_mean": (("sizes",), {"mean": 1.0}),
    "bound_by_share": (("sizes",), {"share": 0.0}),
    "clamp_weight": (("log_ratio",), {"min": None, "max": 2.0}),
    "clip_log_ratio": (("log_ratio", "advantages"), CLIP),
    "clipped": (("log_ratio", "advantages"), CLIP),
    "clipped_weight": (("log_ratio", "curr", "advantages"), CLIP),
    "gamma_weight": (("sequence_log_ratio", "curr", "advantages"), VESPO),
    "geometric_mean": (("mean_clipped_log_ratio", "advantages"), {}),
    "k3": (("log_ratio",), {}),
    "kl_estimate": (("x", "ratio"), {"estimator": "k4"}),
    "kl_penalty": (("curr", "ref", "prev", "gen"), KL),
    "position_weights": (("position", "length"), {"min_weight": 0.5}),
    "quadratic": (("log_ratio", "curr", "advantages"), {"beta": 1.0}),
    "saturating_exp": (("log_ratio",), {}),
    "score_function": (("curr", "advantages"), {}),
    "soft_gate": (("log_ratio", "advantages"), {"tau_pos": 1.0, "tau_neg": 1.0}),
    "straight_through_ratio": (("sequence_log_ratio", "curr"), {}),
    "token_coefficients": (("mask", "tokens_of_sequence"), {"normalization": "sequences", **COUNTS}),
    "token_statistic": (("log_ratio",), {"statistic": "k2"}),
    "unclipped": (("log_ratio", "advantages"), {}),
}


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, tensor) for name, (names, _) in TENSORS.items() for tensor in names]
)
def test_the_tensor_that_does_not_fit_is_named(name, tensor):
    names, options = TENSORS[name]
    tensors = {other: torch.ones(2) for other in names}
    getattr(F, name)(**tensors, **options)
    with pytest.raises(ShapeError, match=f"^{tensor} must be float32 or float64, but it is torch.float16"):
        getattr(F, name)(**{**tensors, tensor: tensors[tensor].half()}, **options)
    if len(names) > 1:
        with pytest.raises(ShapeError, match="must have as many dimensions as"):
            getattr(F, name)(**{**tensors, tensor: torch.ones(3)}, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64], ids=str)
def test_dtype_is_float32_or_float64(dtype):
    is_refused = dtype is not torch.float64
    with pytest.raises(ShapeError, match="must be float32 or float64") if is_refused else nullcontext():
        F.saturating_exp(torch.zeros(2, dtype=dtype))


def test_none_is_skipped_and_what_follows_is_checked():
    with pytest.raises(ShapeError, match="^third must be float32"):
        F.check_layout(first=torch.ones(2), second=None, third=torch.ones(2).half())


@pytest.mark.parametrize(
    ("argument", "ask"),
    [
        ("estimator", lambda: F.kl_estimate(torch.zeros(2), "k9")),
        ("statistic", lambda: F.token_statistic(torch.zeros(2), "k9")),
        ("statistic", lambda: F.binary_statistic(torch.zeros(2), torch.zeros(2), "k9")),
        ("normalization", lambda: F.token_coefficients("k9", mask=torch.ones(2), tokens_of_sequence=None, **COUNTS)),
        ("estimator", lambda: F.kl_penalty(**dict.fromkeys(TENSORS["kl_penalty"][0], ONES), **KL | {"gradient": "k9"})),
    ],
)
def test_the_name_that_is_not_known_is_that_of_an_argument(argument, ask):
    with pytest.raises(ArgumentError, match=f"^{argument} must be one of .*, but it is 'k9'$"):
        ask()
