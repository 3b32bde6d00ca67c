"""Tokens that the training engine's own top-k and top-p removed: left out of everything but the denominators."""

from __future__ import annotations

import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from tests.helpers import batches, oracle

PACKED = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
CONFIGS = {
    "tokens": {"use_importance_sampling_correction": True, "is_correction_level": "turn"},
    "sequence": {"use_importance_sampling_correction": True, "is_correction_level": "sequence"},
    "masks": {"masks": [batches.MASKS["geometric"], batches.MASKS["prefix_mean"]], "loss_normalization": "constant",
              "token_level_loss": False, "loss_normalization_constant": 9.0},
    "gen": {"ratio_anchor": "gen"},
}  # fmt: skip


def filtered_batch():
    """A batch, where its filtered tokens are, and the batch with exact zeros there, as NeMo-RL writes them."""
    batch = batches.rollouts(1)
    is_filtered = torch.zeros_like(batch.data["token_mask"], dtype=torch.bool)
    for row in (0, 1, 3):
        is_filtered[row, batch.data["token_mask"][row, 1:].nonzero().flatten()[1] + 1] = True
    zeros = {
        key: torch.where(is_filtered, 0.0, batch.data[key]) for key in ("prev_logprobs", "reference_policy_logprobs")
    }
    with_zeros = batches.Batch(
        torch.where(is_filtered[:, 1:], 0.0, batch.curr), {**batch.data, **zeros}, batch.seqs, batch.toks
    )
    return batch, is_filtered, with_zeros


def evaluate(config, batch, packed):
    loss_fn = build_loss(config)
    if not packed:
        return batches.evaluate(loss_fn, batch)
    curr, data, segments = batches.packed_rows(batch)
    if "curr_logprobs_keep_mask" in data:
        data["curr_logprobs_keep_mask"] = batch.data["curr_logprobs_keep_mask"].reshape(-1)
    curr = curr.clone().requires_grad_()
    loss, metrics = loss_fn.packed(curr, data, segments, torch.tensor(batch.seqs), torch.tensor(batch.toks))
    loss.backward()
    return batches.Result(loss.detach(), curr.grad, metrics)


@PACKED
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_they_are_left_out_of_all_but_the_denominators(config, packed):
    batch, is_filtered, with_zeros = filtered_batch()
    settings = {**config, "drop_filtered_tokens": True}
    result = evaluate(settings, with_zeros, packed)
    without = batch.with_data(token_mask=batch.data["token_mask"].masked_fill(is_filtered, 0.0))
    expected = oracle.evaluate(
        build_loss(config).config, without.curr, _joined(without, is_filtered, config), batch.seqs, batch.toks
    )
    assert result.loss.item() == pytest.approx(expected.loss, rel=1e-4)
    assert result.grad.abs().sum().item() == pytest.approx(sum(abs(x) for row in expected.grad for x in row), rel=1e-4)
    share = float((is_filtered * batch.data["sample_mask"].unsqueeze(1)).sum()) / batch.toks
    assert result.metrics["geomask/filtered_tokens"] == pytest.approx(share)
    assert result.metrics["geomask/dropped_sequences"] == 0


def _joined(batch, is_filtered, config):
    """Without the filtered tokens a turn would be two for the oracle, unless the columns are gone."""
    if config.get("is_correction_level") != "turn":
        return batch.data
    return {**batch.data, "turn_mask": (batch.data["token_mask"] > 0) | is_filtered}


def test_the_example_of_an_unsure_sampler():
    # One filtered token among four: its mismatch of 5 would give a weight of 148 and a mean token weight of 37.9.
    batch = batches.one_row(curr=[-1.0, 0.0, -1.0, -1.0], prev=[-1.0, 0.0, -1.0, -1.0], gen=[-1.0, -5.0, -1.0, -1.0])
    config = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
    assert batches.evaluate(config, batch).metrics["sampling_importance_ratio"] == pytest.approx(37.85, rel=1e-3)
    result = batches.evaluate({**config, "drop_filtered_tokens": True}, batch)
    assert result.metrics["sampling_importance_ratio"] == pytest.approx(0.75)
    assert result.metrics["geomask/filtered_tokens"] == 0.25
    sure = batches.one_row(curr=[-1.0, 0.0], prev=[-1.0, 0.0], gen=[-1.0, -1e-5])
    assert batches.evaluate({**config, "drop_filtered_tokens": True}, sure).metrics["geomask/filtered_tokens"] == 0


@PACKED
def test_a_mask_in_the_batch_is_never_ignored(packed):
    batch, is_filtered, _ = filtered_batch()
    keep = batch.with_data(curr_logprobs_keep_mask=(~is_filtered[:, 1:]).float())
    without = batch.with_data(token_mask=batch.data["token_mask"].masked_fill(is_filtered, 0.0))
    config = {"use_importance_sampling_correction": True}
    result, expected = evaluate(config, keep, packed), evaluate(config, without, packed)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.grad, expected.grad)
    assert result.metrics["geomask/filtered_tokens"] > 0


def test_the_pre_step_pass_leaves_them_out_too():
    batch = batches.one_row(curr=[-1.0, 0.0], prev=[-1.0, 0.0], gen=[-1.0, -5.0])
    veto = {"batch_veto": {"max": 0.1}}
    assert not PrestepPass(build_loss(veto).config)(batch.data).train
    assert PrestepPass(build_loss({**veto, "drop_filtered_tokens": True}).config)(batch.data).train
