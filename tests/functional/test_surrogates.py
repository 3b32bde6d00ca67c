"""Each objective against its paper: numbers worked out by hand, and derivatives by finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask import functional as F
from nemo_geomask.errors import ShapeError
from nemo_geomask.losses.correction import count_saturated
from tests.helpers import batches

NO_KL = {"reference_policy_kl_penalty": 0.0}


def sequence(ratios: list[float], advantage: Any = 1.0, curr: list[float] | None = None) -> batches.Batch:
    """One sequence with these ratios π/π_old, token by token."""
    logs = torch.tensor([math.log(ratio) for ratio in ratios])
    curr = torch.tensor(curr) if curr is not None else logs - 2.0
    advantage = torch.tensor(advantage) if isinstance(advantage, list) else advantage
    return batches.one_row(curr=curr, prev=curr - logs, advantage=advantage)


def losses(name: str, ratios: list[float], advantages: list[float], **config: Any) -> tuple[list[float], list[float]]:
    """Loss and derivative in log π of each token, as sequences of one token."""
    found, slopes = [], []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        result = batches.evaluate({"name": name, **NO_KL, **config}, sequence([ratio], advantage))
        found.append(result.loss.item())
        slopes.append(result.grad.item())
    return found, slopes


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=2e-6, abs=1e-7)


# ------------------------------------------------------------------------------------------------- PPO, dual clip

RATIOS = [0.5, 1.1, 1.5]


def test_ppo_clip():
    # L = max(−rA, −clip(r, 0.8, 1.2)A). A = 2: the upper bound acts at 1.5. A = −2: the lower one at 0.5.
    found, slopes = losses("clipped_pg", RATIOS, [2.0] * 3)
    assert found == approx([-1.0, -2.2, -2.4])
    assert slopes == approx([-1.0, -2.2, 0.0])  # d(−rA)/dlog r = −rA, nothing beyond the bound
    found, slopes = losses("clipped_pg", RATIOS, [-2.0] * 3)
    assert found == approx([1.6, 2.2, 3.0])
    assert slopes == approx([0.0, 2.2, 3.0])


def test_ppo_clip_is_asymmetric():
    # DAPO: ε_min 0.2, ε_max 0.28. 1.25 passes where 0.2 would have clipped; 1.3 gives 1.28.
    bounds = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
    assert losses("clipped_pg", [1.25, 1.3], [1.0, 1.0], **bounds)[0] == approx([-1.25, -1.28])
    assert losses("clipped_pg", [0.79, 0.75], [-1.0, -1.0], **bounds)[0] == approx([0.8, 0.8])


def test_dual_clip():
    # c = 3 and A = −2: the loss stops at −cA = 6, without gradient. A > 0 knows no such bound.
    found, slopes = losses("clipped_pg", [2.5, 4.0, 0.5], [-2.0] * 3, ratio_clip_c=3.0)
    assert found == approx([5.0, 6.0, 1.6])
    assert slopes == approx([5.0, 0.0, 0.0])
    assert losses("clipped_pg", [4.0], [2.0], ratio_clip_c=3.0)[0] == approx([-2.4])


def test_clips_are_counted_where_they_decide():
    # Ratios beyond both bounds under either sign: only A > 0 above and A < 0 below count; 4 > c under A < 0 is dual.
    batch = sequence([1.5, 1.5, 0.5, 0.5, 4.0], [1.0, -1.0, 1.0, -1.0, -1.0])
    metrics = batches.evaluate({**NO_KL, "ratio_clip_c": 3.0}, batch).metrics
    assert metrics["geomask/clip_fraction_high"] == approx(0.2)
    assert metrics["geomask/clip_fraction_low"] == approx(0.2)
    assert metrics["geomask/dual_clip_fraction"] == approx(0.2)


def test_clips_of_advantages_that_broadcast():
    log_ratio, advantages = torch.tensor([[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]), torch.tensor([[1.0], [-1.0]])
    low, high = F.clipped(log_ratio, advantages, clip_min=0.2, clip_max=0.2).clips()
    assert (low > 0).int().tolist() == [[0, 0, 0], [1, 0, 0]]
    assert (high > 0).int().tolist() == [[0, 0, 1], [0, 0, 0]]


def test_reinforce():
    # −A log π with slope −A, whatever π_old.
    batch = sequence([3.0, 0.1], [2.0, -1.0], curr=[-0.5, -1.5])
    result = batches.evaluate({**NO_KL, "disable_ppo_ratio": True}, batch)
    assert result.loss.item() == approx((1.0 - 1.5) / 2)
    assert result.grad.tolist() == [approx([-1.0, 0.5])]


def test_forced_on_policy():
    # Ratio 1 in value, slope −A; equals REINFORCE's gradient.
    batch = sequence([3.0, 0.1], [2.0, -1.0])
    result = batches.evaluate({**NO_KL, "force_on_policy_ratio": True}, batch)
    assert result.loss.item() == approx(-0.5)
    assert result.grad.tolist() == [approx([-1.0, 0.5])]
    data = {key: value for key, value in batch.data.items() if key != "prev_logprobs"}
    without = batches.Batch(batch.curr, data, batch.seqs, batch.toks)
    assert batches.evaluate({**NO_KL, "force_on_policy_ratio": True}, without).loss == result.loss


# ------------------------------------------------------------------------------------------- sequence objectives


def test_gspo():
    # Ratios 2 and 1.28: s = √2.56 = 1.6. A = 1, inside wide bounds: loss −1.6, each of 2 tokens carries −1.6/2.
    wide = {"name": "gspo", **NO_KL, "ratio_clip_min": 0.9, "ratio_clip_max": 0.9}
    for advantages in (1.0, [3.0, -1.0]):  # of which the mean counts
        result = batches.evaluate(wide, sequence([2.0, 1.28], advantages))
        assert result.loss.item() == approx(-1.6)
        assert result.grad.tolist() == [approx([-0.8, -0.8])]
    # Bound 1.5: the whole sequence is clipped, although one token's ratio is inside.
    result = batches.evaluate({**wide, "ratio_clip_max": 0.5}, sequence([2.0, 1.28]))
    assert result.loss.item() == approx(-1.5)
    assert result.grad.abs().max() == 0
    # A = −1: no upper bound.
    assert batches.evaluate({**wide, "ratio_clip_max": 0.5}, sequence([2.0, 1.28], -1.0)).loss.item() == approx(1.6)


def test_gspo_bounds_of_the_paper():
    config = build_loss({"name": "gspo"}).config
    assert (config.ratio_clip_min, config.ratio_clip_max) == (3e-4, 4e-4)
    # s = 1.0005 is clipped to 1.0004, in float32.
    result = batches.evaluate({"name": "gspo", **NO_KL}, sequence([1.001, 1.0]))
    assert result.loss.item() == pytest.approx(-1.0004, abs=2e-7)
    assert result.grad.abs().max() == 0


@pytest.mark.parametrize("clip", [3e-4, 0.1, 0.5])
@pytest.mark.parametrize("dual", [None, 1.15])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_is_gspo_where_advantages_are_constant(clip, dual, seed):
    batch = batches.rollouts(seed)
    sign = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, -0.5, 1.0, 1.0]).unsqueeze(-1)
    batch = batch.with_data(advantages=sign.expand(8, 14).clone())
    bounds = {**NO_KL, "ratio_clip_min": clip, "ratio_clip_max": clip, "ratio_clip_c": dual}
    first, second = (batches.evaluate({"name": name, **bounds}, batch) for name in ("gspo", "gspo_token"))
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-5, atol=1e-9)
    own = ("loss", "probs_ratio", "geomask/clip_fraction_low", "geomask/clip_fraction_high")
    for key in own:
        assert first.metrics[key] == approx(second.metrics[key])


def test_gspo_token_with_its_own_advantages():
    # s = 1.6 in value; each token's slope is −s·A_t over 2 tokens; A_t = 1 is clipped at 1.5, A_t = −1 is not.
    bounds = {"ratio_clip_min": 0.5, "ratio_clip_max": 0.5}
    result = batches.evaluate({"name": "gspo_token", **NO_KL, **bounds}, sequence([2.0, 1.28], [1.0, -1.0]))
    assert result.loss.item() == approx((-1.5 + 1.6) / 2)
    assert result.grad.tolist() == [approx([0.0, 0.8])]


def test_gmpo():
    # A = 1, ratios 4 and 0.25, clip (e^−0.4, e^0.4): the first log-ratio is cut to 0.4, the second is kept, since it
    # lowers the objective: exp((0.4 − 1.3863)/2) = 0.610701.
    result = batches.evaluate({"name": "gmpo", **NO_KL}, sequence([4.0, 0.25]))
    ratio = math.exp((0.4 - math.log(4)) / 2)
    assert ratio == pytest.approx(0.610701, abs=1e-6)
    assert result.loss.item() == approx(-ratio)
    assert result.grad.tolist() == [approx([0.0, -ratio / 2])]
    # A = −1: now the second is cut, to −0.4: exp((1.3863 − 0.4)/2) = 1.637462.
    result = batches.evaluate({"name": "gmpo", **NO_KL}, sequence([4.0, 0.25], -1.0))
    assert result.loss.item() == approx(math.exp((math.log(4) - 0.4) / 2))
    assert result.grad.tolist() == [approx([1 / ratio / 2, 0.0])]
    assert result.metrics["geomask/clip_fraction_low"] == approx(0.5)
    assert result.metrics["geomask/clip_fraction_high"] == 0


def test_gmpo_unclipped_is_the_geometric_mean():
    # √(1.2 · 0.9) = √1.08
    result = batches.evaluate({"name": "gmpo", **NO_KL}, sequence([1.2, 0.9], 2.0))
    assert result.loss.item() == approx(-2 * math.sqrt(1.08))


def test_zeroed_token_does_not_scale_a_geometric_mean():
    # A token that does not train is left out of the mean: no log(0 + ε), no n that counts it.
    batch = sequence([1.2, 1e-8, 0.9], 1.0)
    mask = batch.data["token_mask"].clone()
    mask[0, 2] = 0
    for name in ("gmpo", "gspo"):
        config = {"name": name, **NO_KL, "ratio_clip_min": 0.5, "ratio_clip_max": 0.5}
        result = batches.evaluate(config, batch.with_data(token_mask=mask))
        assert result.loss.item() == approx(-math.sqrt(1.08))


# ------------------------------------------------------------------------------------------------- token weights


def test_cispo():
    # ℓ = −sg(clip(r, 0, 5))·A·log π, slope −clip(r)·A: never zero.
    batch = sequence([7.0, 0.01, 2.0], 2.0, curr=[-1.0, -2.0, -0.5])
    result = batches.evaluate({"name": "cispo", **NO_KL}, batch)
    assert result.loss.item() == approx((5 * 2 * 1.0 + 0.01 * 2 * 2.0 + 2 * 2 * 0.5) / 3)
    assert result.grad.tolist() == [approx([-10 / 3, -0.02 / 3, -4 / 3])]
    assert result.metrics["geomask/clip_fraction_high"] == approx(1 / 3)
    assert result.metrics["geomask/clip_fraction_low"] == 0
    # The sign of A does not matter to the clip.
    away = batches.evaluate({"name": "cispo", **NO_KL}, sequence([7.0, 0.01, 2.0], -2.0, curr=[-1.0, -2.0, -0.5]))
    assert torch.equal(away.grad, -result.grad)


def test_cispo_flag_is_cispo_by_name():
    bounds = {**NO_KL, "ratio_clip_min": 0.3, "ratio_clip_max": 0.4}
    batch = batches.rollouts(1)
    flag = batches.evaluate({**bounds, "use_cispo": True}, batch)
    name = batches.evaluate({**bounds, "name": "cispo"}, batch)
    assert torch.equal(flag.loss, name.loss)
    assert torch.equal(flag.grad, name.grad)


def test_sapo():
    # τ = 1, A = 1, r = 2: 4σ(1) = 2.924234; slope in log r is 4σ(1)σ(−1)·r = 1.572896.
    found, slopes = losses("sapo", [2.0], [1.0])
    assert found == approx([-2.924234])
    assert slopes == approx([-1.5728955])
    # τ = 1.05, A = −1, r = 0.5: 4/1.05·σ(−0.525) = 1.415938.
    assert losses("sapo", [0.5], [-1.0])[0] == approx([4 / 1.05 / (1 + math.exp(0.525))])
    assert 4 / 1.05 / (1 + math.exp(0.525)) == pytest.approx(1.415938, abs=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_sapo_has_slope_one_on_policy(tau, advantage):
    # The first update is the plain policy gradient at any temperature.
    options = {"tau_pos": tau, "tau_neg": tau}
    assert losses("sapo", [1.0], [advantage], options=options)[1] == approx([-advantage])


@pytest.mark.parametrize("name", ["clipped_pg", "gspo", "gspo_token", "gmpo", "cispo", "sapo"])
def test_first_update_is_the_policy_gradient(name):
    # π = π_old: every objective's gradient is −A/n at each token, with the advantage that it uses.
    batch = sequence([1.0] * 4, 1.5)
    grad = batches.evaluate({"name": name, **NO_KL, "token_level_loss": False}, batch).grad
    assert grad.tolist() == [approx([-1.5 / 4] * 4)]


def test_weight_multiplies_and_carries_no_gradient():
    # prev − gen = log 3 at the first token: its loss and slope triple.
    batch = sequence([1.1, 1.1], 1.0)
    gen = batch.data["generation_logprobs"].clone()
    gen[0, 1] -= math.log(3)
    config = {**NO_KL, "use_importance_sampling_correction": True}
    result = batches.evaluate(config, batch.with_data(generation_logprobs=gen))
    assert result.loss.item() == approx(-(3.3 + 1.1) / 2)
    assert result.grad.tolist() == [approx([-1.65, -0.55])]
    for level, weight in (("sequence", 3.0), ("sequence_mean", math.sqrt(3))):
        leveled = batches.evaluate({**config, "is_correction_level": level}, batch.with_data(generation_logprobs=gen))
        assert leveled.loss.item() == approx(-1.1 * weight)


def test_normalizations_by_hand():
    # Losses −1 at 1 token and −1 at each of 3; 2 sequences, 4 tokens.
    one, three = sequence([1.0, 1.0, 1.0]), sequence([1.0, 1.0, 1.0])
    mask = one.data["token_mask"].clone()
    mask[0, 2:] = 0
    batch = batches.stack(one.with_data(token_mask=mask), three)
    batch = batches.Batch(batch.curr, batch.data, 2.0, 4.0)
    batch.data["advantages"][1] *= 2
    for normalization, expected, share in (
        ("tokens", (1 + 6) / 4, 1 / 4),
        ("sequences", (1 + 2) / 2, 1 / 2),
        ("documents", (1 + 6) / 2, 1 / 2),
        ("constant", (1 + 6) / (2 * 5), 1 / 10),
    ):
        config = {**NO_KL, "loss_normalization": normalization}
        if normalization == "constant":
            config["loss_normalization_constant"] = 5.0
        result = batches.evaluate(config, batch)
        assert result.loss.item() == approx(-expected)
        # The gradient is divided by the same number as the value.
        assert result.grad[0, 0].item() == approx(-share)


def test_positive_nll_by_hand():
    # VAPO: mean of −log π over the tokens of rewarded sequences: (0.5 + 1.5)/2 by microbatch, /4 tokens as the loss.
    batch = batches.stack(
        sequence([1.0, 1.0], 0.0, curr=[-0.5, -1.5]), sequence([1.0, 1.0], 0.0, curr=[-0.7, -0.9])
    ).with_data(rewards=torch.tensor([1.0, 0.0]))
    for normalization, expected in (("microbatch", 1.0), ("loss", 0.5)):
        config = {**NO_KL, "positive_example_nll_weight": 0.1}
        config["positive_example_nll_normalization"] = normalization
        result = batches.evaluate(config, batch)
        assert result.metrics["positive_nll_loss"] == approx(expected)
        assert result.loss.item() == approx(0.1 * expected)


# --------------------------------------------------------------------------------------------------- derivatives


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# Away from every edge: ratios 0.61, 0.9, 1.13 and 1.68 against bounds 0.8 and 1.2; advantages of both signs.
LOG_RATIO = (-0.5, -0.1, 0.12, 0.52, 0.3, -0.4)
ADVANTAGE = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, -0.7], dtype=torch.float64)
CLIP = {"clip_min": 0.2, "clip_max": 0.2}
CURR = (-1.0, -2.0, -0.3, -0.7, -1.4, -0.1)


GAMMA = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"),
    # φ(W) = e^λ W^k e^(-λW) worked by hand: e^(3-6)·4, e^(2-4)·8; e^(3-1.5)/4, e^(2-1)/8; the peaks at k/λ.
    [
        (1.0, 1.0, 1.0),
        (2.0, 4 * math.exp(-3), 8 * math.exp(-2)),
        (0.5, math.exp(1.5) / 4, math.e / 8),
        (2 / 3, 4 / 9 * math.e, 8 / 27 * math.exp(2 / 3)),
        (1.5, 2.25 * math.exp(-1.5), 3.375 * math.exp(-1)),
    ],
)
def test_gamma_weight_by_hand(ratio, positive, negative):
    x, curr = torch.full((3,), math.log(ratio), dtype=torch.float64), torch.full((3,), -1.0, dtype=torch.float64)
    found = F.gamma_weight(x, curr, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), **GAMMA)
    assert found.loss.tolist() == pytest.approx([positive, -negative, 0.0])
    assert found.ratio.tolist() == pytest.approx([ratio] * 3)


@pytest.mark.parametrize("x", [-1e4, -100.0, 39.0, 100.0, 1e4])
def test_gamma_weight_vanishes_far_from_1(x):
    for advantage in (2.0, -2.0):
        curr = torch.full((1,), -1.0, requires_grad=True)
        F.gamma_weight(torch.full((1,), x), curr, torch.full((1,), advantage), **GAMMA).loss.sum().backward()
        assert curr.grad.abs().item() < 1e-30


def test_quadratic_is_at_rest_where_the_log_ratio_is_the_advantage_by_beta():
    curr = torch.tensor([0.5, -1.5, 0.0], dtype=torch.float64, requires_grad=True)
    F.quadratic(curr, curr, torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64), beta=2.0).loss.sum().backward()
    assert curr.grad.tolist() == [0.0, 0.0, 0.0]


def _detached(function: Any) -> Any:
    """Finite differences know no stop-gradient: hold the ratio at its value while log π moves."""
    return lambda curr: function(torch.tensor(LOG_RATIO, dtype=torch.float64), curr)


DIFFERENTIABLE = {
    "clipped": lambda x: F.clipped(x, ADVANTAGE, **CLIP).loss,
    "dual_clipped": lambda x: F.clipped(x, ADVANTAGE, **CLIP, dual_clip=1.25).loss,
    "score_function": lambda x: F.score_function(x, ADVANTAGE).loss,
    "clipped_weight": _detached(lambda x, curr: F.clipped_weight(x, curr, ADVANTAGE, **CLIP).loss),
    "soft_gate": lambda x: F.soft_gate(x, ADVANTAGE, tau_pos=1.0, tau_neg=1.7).loss,
    "unclipped": lambda x: F.unclipped(x, ADVANTAGE).loss,
    "unclipped_penalty": lambda x: F.unclipped(x, ADVANTAGE, penalty=0.3).penalty,
    "gamma_weight": _detached(lambda x, curr: F.gamma_weight(x, curr, ADVANTAGE, **GAMMA).loss),
    "quadratic": lambda x: F.quadratic(x, x + 0.3, ADVANTAGE, beta=0.7).loss,
    "clip_log_ratio": lambda x: F.clip_log_ratio(x, ADVANTAGE, **CLIP),
    "geometric_mean": lambda x: F.geometric_mean(x.mean().expand_as(x), ADVANTAGE),
    "saturating_exp": F.saturating_exp,
    **{f"estimate_{kind}": lambda x, kind=kind: F.kl_estimate(x, kind) for kind in ("k1", "k2", "k3", "k4")},
    "estimate_k4_with_ratio": lambda x: F.kl_estimate(x, "k4", ratio=x.exp()),
    **{f"statistic_{name}": lambda x, name=name: F.token_statistic(x, name) for name in ("ratio", "k2", "k3")},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(DIFFERENTIABLE[name], leaf(*LOG_RATIO))


@pytest.mark.parametrize("value", ["k1", "k2", "k3", "k4"])
@pytest.mark.parametrize("clamps", [(None, None), (0.25, None), (None, 0.03), (20.0, 10.0)])
def test_gradcheck_of_the_importance_weighted_kl(value, clamps):
    # With π/μ and no stop-gradient in value the term is a plain function of log π, apart from the weight, which is held
    # where the input clamp acts: there the derivative is zero by definition, so leave those tokens out.
    curr = leaf(*CURR)
    ref = torch.tensor(CURR, dtype=torch.float64) - torch.tensor(LOG_RATIO, dtype=torch.float64)
    gen = torch.tensor(CURR, dtype=torch.float64) + 0.2
    free = torch.ones(6, dtype=torch.bool) if clamps[0] is None else torch.tensor(LOG_RATIO).abs() < clamps[0]

    def term(curr: torch.Tensor) -> torch.Tensor:
        return F.kl_penalty(
            curr=curr,
            ref=ref,
            prev=gen,
            gen=gen,
            value=value,
            gradient=None,
            importance_weighted=True,
            input_clamp=clamps[0],
            output_clamp=clamps[1],
        )[free]

    # The function detaches log π inside the weight and adds it back: rebuild its value for the differences.
    def plain(curr: torch.Tensor) -> torch.Tensor:
        x = curr - ref
        kernel = {"k1": x, "k2": x * x / 2, "k3": torch.exp(-x) - 1 + x, "k4": x}[value]
        out = torch.exp(curr - gen) * kernel
        return (out if clamps[1] is None else out.clamp(-clamps[1], clamps[1]))[free]

    assert torch.autograd.gradcheck(plain, curr)
    torch.testing.assert_close(term(curr), plain(curr), rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(function(curr).sum(), curr)[0] for function in (term, plain)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_straight_through_ratio_has_the_sequences_value_and_the_tokens_gradient():
    curr, log_s = leaf(-1.0, -2.0), leaf(0.3, 0.3)
    x = F.straight_through_ratio(log_s, curr)
    assert x.tolist() == [0.3, 0.3]
    grads = torch.autograd.grad(x.sum(), [curr, log_s], allow_unused=True)
    assert grads[0].tolist() == [1.0, 1.0]
    assert grads[1] is None


def test_clipped_weight_sends_no_gradient_through_the_ratio():
    x = leaf(0.1, -0.3)
    out = F.clipped_weight(x, leaf(-1.0, -2.0), torch.ones(2).double(), **CLIP)
    assert torch.autograd.grad(out.loss.sum(), x, allow_unused=True)[0] is None


def test_saturating_exp():
    x = torch.tensor([0.0, 39.9, 40.0, 41.0, 1e30, math.inf, -math.inf, math.nan], requires_grad=True)
    y = F.saturating_exp(x)
    # An ulp of 39.9 is 4e-6, and so is the relative error of its exponential.
    assert y[:2].tolist() == pytest.approx([1.0, math.exp(39.9)], rel=1e-5)
    assert y[2:6].isfinite().all()
    assert len(set(y[2:6].tolist())) == 1
    assert y[6] == 0
    assert y[7].isnan()
    y[:5].sum().backward()
    assert x.grad[3:5].tolist() == [0.0, 0.0]
    assert count_saturated(x[:6].detach(), torch.ones(6, dtype=torch.bool)).item() == 3


def test_score_centering_leaves_no_drift_towards_the_sampler():
    # The mean of the gradient over what μ samples is 0, whatever the advantage of the prefix; by enumeration.
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    p, q = logits.detach().softmax(0), torch.randn(7, generator=draw, dtype=torch.float64).softmax(0)
    weights = {"none": lambda x: torch.ones_like(x), "tis": lambda x: F.clamp_weight(x, min=None, max=1.2).value}
    for size, (name, weigh) in itertools.product((7, 3), weights.items()):
        head = q.topk(size).indices
        tail = torch.tensor([index for index in range(7) if index not in head], dtype=torch.int64)
        model = q.clone()  # behind the head the sampler is taken to be proportional to the policy
        model[tail] = p[tail] * (1 - q[head].sum()) / p[tail].sum().clamp(min=1e-300)
        drift = {}
        for heads in (True, False):
            log_p = logits.log_softmax(0)
            total = torch.zeros((), dtype=torch.float64)
            for token in range(7):
                given = {"head_curr": log_p[head].unsqueeze(0), "head_gen": q[head].log().unsqueeze(0)} if heads else {}
                here = slice(token, token + 1)
                one = F.centered_score(log_p[here], model[here].log(), torch.ones_like(p[:1]), weigh=weigh, **given)
                total = total + model[token] * one.loss.sum()
            (drift[heads],) = torch.autograd.grad(total, logits)
        assert drift[True].abs().max() < 1e-5, (size, name)  # the tail's mass is at least 1e-6
        assert drift[False].abs().max() > 1e-2
    # With w = 1, the whole vocabulary and p = (.6, .4), q = (.5, .5): the mean score q − p = (−.1, .1) is taken away.
    logits = torch.tensor([0.6, 0.4], dtype=torch.float64).log().requires_grad_()
    log_p, q = logits.log_softmax(0), torch.full((2,), 0.5, dtype=torch.float64)
    loss = F.centered_score(
        log_p[:1], q[:1].log(), torch.ones_like(q[:1]), head_curr=log_p.unsqueeze(0), head_gen=q.log().unsqueeze(0)
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert (-gradient).tolist() == pytest.approx([0.4 + 0.1, -0.4 - 0.1], abs=1e-6)
    with pytest.raises(ShapeError, match="head_curr and head_gen must both be"):
        F.centered_score(log_p[:1], q[:1].log(), q[:1], head_curr=log_p.unsqueeze(0))
