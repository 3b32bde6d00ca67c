"""Parity with NeMo-RL's own loss on recorded cases: inputs, settings and what its ``ClippedPGLossFn`` answered."""

from __future__ import annotations

import pytest
import torch

from nemo_geomask import LossConfig, build_loss
from tests.helpers import batches, oracle
from tests.helpers.golden import by_sequence, index, load

CASES = sorted(index())


def test_all_cases_are_here():
    assert len(CASES) == 112


@pytest.mark.parametrize("case", CASES)
def test_equals_nemo_rl(case):
    batch, grad = load(case)
    entry = index()[case]
    result = batches.evaluate(entry["config"], batch)
    assert result.loss.item() == pytest.approx(entry["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(result.grad, grad, rtol=1e-5, atol=1e-6)
    # NeMo-RL's gradient entries are near 1e-3, where atol alone would let 1e-3 relative pass.
    assert (result.grad - grad).abs().max() <= 1e-5 * grad.abs().max()
    for name, value in entry["metrics"].items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    extra = {name for name in set(result.metrics) - set(entry["metrics"]) if not name.startswith("geomask/")}
    # Left out of the recording where NeMo-RL multiplies [B, 1] by [B], which for one row is right.
    left_out = by_sequence(entry["config"]) and len(batch.curr) > 1
    assert extra == ({"sampling_importance_ratio"} if left_out else set())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_oracle_equals_nemo_rl(case):
    # What the library is tested against is itself tested against NeMo-RL's float32: hence the looser bounds. The wild
    # cases hold ratios of some hundreds, whose float32 sums have lost digits.
    batch, grad = load(case)
    entry = index()[case]
    answer = oracle.evaluate(LossConfig(**entry["config"]), batch.curr, batch.data, batch.seqs, batch.toks)
    assert answer.loss == pytest.approx(entry["loss"], rel=1e-4, abs=1e-6)
    expected = torch.tensor(answer.grad, dtype=torch.float64)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-6)
    for name, value in entry["metrics"].items():
        assert answer.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("case", [case for case in CASES if by_sequence(index()[case]["config"])])
def test_sampling_importance_ratio_is_the_mean_over_valid_sequences(case):
    batch, _ = load(case)
    config = index()[case]["config"]
    total = 0.0
    for row, valid in enumerate(batch.data["sample_mask"].tolist()):
        mask = batch.data["token_mask"][row, 1:].bool()
        delta = (batch.data["prev_logprobs"] - batch.data["generation_logprobs"])[row, 1:][mask]
        weight = delta.double().sum().exp().item()
        if config.get("truncated_importance_sampling_ratio"):
            weight = min(weight, config["truncated_importance_sampling_ratio"])
        total += valid * weight
    metric = batches.evaluate(config, batch).metrics["sampling_importance_ratio"]
    assert metric == pytest.approx(total / batch.seqs, rel=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("everything")])
def test_recipe_in_v0_6_form_is_a_plain_mapping(case):
    # v0.6.0 reads a dict, v0.7.0 and main a pydantic model: both reach the same loss.
    batch, _ = load(case)
    config = index()[case]["config"]
    from_mapping = batches.evaluate(build_loss(config), batch)
    from_model = batches.evaluate(build_loss(LossConfig(**config)), batch)
    assert torch.equal(from_mapping.loss, from_model.loss)
    assert torch.equal(from_mapping.grad, from_model.grad)
