"""Where a decision is exactly at its bound, where a sample mask is a fraction, and where a sequence is dropped."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from tests.helpers import batches
from tests.helpers.batches import one_row, rollouts, stack

NO_KL = {"reference_policy_kl_penalty": 0.0}
HALVES = torch.tensor([0.5, 1.0, 0.25, 1.0, 0.75, 1.0, 0.5, 0.0])


def trained_tokens(data):
    """Row, position and weight of each trained token."""
    rows, width = data["token_mask"].shape
    for i in range(rows):
        for t in range(1, width):
            weight = float(data["token_mask"][i, t]) * float(data["sample_mask"][i])
            if weight:
                yield i, t, weight


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_unfiltered_log_prob_drops_its_sequence(value):
    batch = rollouts(1)
    unfiltered = batch.curr - 0.1
    broken = unfiltered.clone()
    broken[1, int(batch.data["token_mask"][1, 1:].nonzero()[0])] = value
    result = batches.evaluate({}, batch.with_data(curr_logprobs_unfiltered=broken))
    sample_mask = batch.data["sample_mask"].clone()
    sample_mask[1] = 0.0
    without = batches.evaluate({}, batch.with_data(curr_logprobs_unfiltered=unfiltered, sample_mask=sample_mask))
    assert torch.equal(result.loss, without.loss)
    assert torch.equal(result.grad, without.grad)
    assert math.isfinite(result.metrics["kl_penalty"])
    assert result.metrics["geomask/dropped_sequences"] == 1


def test_a_dropped_sequence_takes_no_part_in_the_largest_mismatch():
    small = one_row(curr=[-1.0, -1.0], prev=[-1.0, -1.0], gen=[-1.25, -1.0])
    large = one_row(curr=[-1.0, math.nan], prev=[-1.0, -1.0], gen=[-4.0, -1.0])
    result = batches.evaluate(NO_KL, stack(small, large))
    assert result.metrics["geomask/dropped_sequences"] == 1
    assert result.metrics["geomask/mismatch_max"] == 0.25


@pytest.mark.parametrize("level", ["token", "sequence_mean"])
@pytest.mark.parametrize(("when", "is_removed"), [("positive_advantage", 0), ("negative_advantage", 0), ("always", 1)])
@pytest.mark.parametrize("bounds", [{"min": 0.5}, {"max": 2.0}], ids=["min", "max"])
def test_an_advantage_of_zero_has_no_sign(level, when, is_removed, bounds):
    shift = 3.0 if "max" in bounds else -3.0
    batch = one_row(curr=[-1.0, -1.0], prev=[-1.0, -1.0], gen=[-1.0 - shift] * 2, advantage=0.0)
    mask = {"log_ratio": "mismatch", "level": level, "when": when, "label": "rule", **bounds}
    assert batches.evaluate({**NO_KL, "masks": [mask]}, batch).metrics["geomask/mask/rule/removed"] == is_removed


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_batch_exactly_at_the_vetos_bound_is_trained_on(sign):
    # 0.25 and the two log-probs are exact in float32, and so is their mean.
    batch = one_row(curr=[-1.0, -2.0], prev=[-1.0, -2.0], gen=[-1.0 - 0.25 * sign, -2.0 - 0.25 * sign])
    decision = PrestepPass(build_loss({"batch_veto": {"estimator": "k1", "max": 0.25}}).config)(batch.data)
    assert decision.metrics == {"geomask/batch_kl": -0.25 * sign, "geomask/batch_vetoed": 0.0}
    assert decision.train
    below = PrestepPass(build_loss({"batch_veto": {"estimator": "k1", "max": 0.2499}}).config)(batch.data)
    assert not below.train


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_the_mean_weight_of_the_batch_weights_samples_by_their_mask(level):
    batch = rollouts(1).with_data(sample_mask=HALVES)
    rows: dict[int, list[tuple[float, float]]] = {}
    for i, t, weight in trained_tokens(batch.data):
        x = float(batch.data["prev_logprobs"][i, t]) - float(batch.data["generation_logprobs"][i, t])
        rows.setdefault(i, []).append((x, weight))
    total = count = 0.0
    for i, tokens in rows.items():
        sample = float(HALVES[i])
        if level == "token":
            total += sum(weight * math.exp(x) for x, weight in tokens)
            count += sum(weight for _, weight in tokens)
            continue
        exponent = sum(x for x, _ in tokens)
        # At the level sequence NeMo-RL multiplies the exponent by the sample mask.
        exponent = exponent * sample if level == "sequence" else exponent / len(tokens)
        total += sample * math.exp(exponent)
        count += sample
    settings = {
        "use_importance_sampling_correction": True,
        "is_correction_batch_normalize": True,
        "is_correction_level": level,
    }
    metrics = PrestepPass(build_loss(settings).config)(batch.data).metrics
    assert metrics["geomask/batch_weight_mean"] == pytest.approx(total / count, rel=1e-5)


def test_the_nll_of_a_microbatch_weights_samples_by_their_mask():
    batch = rollouts(1).with_data(sample_mask=HALVES)
    total = count = 0.0
    for i, t, weight in trained_tokens(batch.data):
        if batch.data["rewards"][i] > 0:
            total -= weight * float(batch.curr[i, t - 1])
            count += weight
    assert count != sum(1 for i, _, _ in trained_tokens(batch.data) if batch.data["rewards"][i] > 0)
    config = {**NO_KL, "positive_example_nll_weight": 0.3, "positive_example_nll_normalization": "microbatch"}
    result = batches.evaluate(config, batch)
    assert result.metrics["positive_nll_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_weight_whose_bounds_are_both_1_is_none(level):
    """NeMo-RL's asynchronous loops require a weight; these bounds take its effect away, bit for bit."""
    batch = rollouts(3)
    masks = {"masks": [{"preset": "dppo_tv", "delta": 0.1}], **NO_KL}
    weight = {
        "use_importance_sampling_correction": True,
        "is_correction_level": level,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.0,
        "truncated_importance_sampling_ratio_min": 1.0,
    }
    weighted, without = batches.evaluate({**masks, **weight}, batch), batches.evaluate(masks, batch)
    assert torch.equal(weighted.loss, without.loss)
    assert torch.equal(weighted.grad, without.grad)
