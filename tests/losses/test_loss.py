"""The loss object: what it shows of itself, and what it refuses or defines instead of passing silently."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import replace

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, NonFiniteError, ShapeError
from nemo_geomask.segments import PackedSegments
from tests.helpers import batches
from tests.helpers.batches import VARIANTS, packed_rows

every_variant = pytest.mark.parametrize("name", VARIANTS)
TOKENS = [key for key in batches.TOKEN_KEYS if key.endswith("logprobs")]


def test_repr_shows_name_and_settings():
    loss_fn = build_loss({"name": "gspo", "ratio_clip_c": 3.0, "masks": [{"preset": "opsm", "delta": 0.5}]})
    shown = repr(loss_fn)
    assert shown.startswith("PolicyLoss(name='gspo', ")
    assert "ratio_clip_c=3.0" in shown
    assert "opsm" in shown
    assert "kl_input_clamp_value" not in shown
    assert repr(build_loss({})) == "PolicyLoss(name='clipped_pg')"


def test_a_loss_says_whether_nemo_rl_fuses_the_log_probs():
    assert build_loss({}).use_fused_linear_logprobs is False
    assert build_loss({}, use_fused_linear_logprobs=True).use_fused_linear_logprobs is True


@pytest.mark.parametrize("name", ["global_valid_seqs", "global_valid_toks"])
@pytest.mark.parametrize(
    "wrong", [-1.0, math.nan, math.inf, True, "3", None, torch.ones(2), torch.tensor(True)], ids=str
)
def test_a_count_is_a_number_of_at_least_zero(name, wrong):
    batch = batches.rollouts(1)
    counts = {"global_valid_seqs": batch.seqs, "global_valid_toks": batch.toks, name: wrong}
    with pytest.raises(DataError, match=f"{name} must be one number of at least 0"):
        build_loss({})(batch.curr, batch.data, **counts)


@pytest.mark.parametrize("normalization", ["tokens", "sequences", "documents"])
@pytest.mark.parametrize("count", [0.0, -3.0])
def test_trained_tokens_under_a_count_of_zero_give_nan(normalization, count):
    # 1 / (0 + 1e-8) would make it a loss of −1e8.
    batch = batches.rollouts(1)
    config = {"loss_normalization": normalization, "token_level_loss": normalization == "tokens"}
    loss, _ = build_loss(config)(batch.curr, batch.data, torch.tensor(count), torch.tensor(count))
    assert loss.isnan()
    nothing = {**batch.data, "sample_mask": torch.zeros_like(batch.data["sample_mask"])}
    loss, metrics = build_loss(config)(batch.curr, nothing, torch.tensor(0.0), torch.tensor(0.0))
    assert loss.item() == 0
    assert metrics["loss"] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("key", TOKENS)
def test_log_probs_are_floating_point(key, dtype):
    batch = batches.rollouts(1)
    with pytest.raises(ShapeError, match=rf"data\['{key}'\] must be floating point"):
        batches.evaluate({}, batch.with_data(**{key: batch.data[key].to(dtype)}))


@pytest.mark.parametrize("key", ["advantages", "token_mask", "sample_mask"])
def test_nothing_is_complex(key):
    batch = batches.rollouts(1)
    with pytest.raises(ShapeError, match=rf"data\['{key}'\] must be real"):
        batches.evaluate({}, batch.with_data(**{key: batch.data[key].to(torch.complex64)}))


def test_log_probs_that_were_not_shifted_name_themselves():
    batch = batches.rollouts(1)
    with pytest.raises(ShapeError, match=r"next_token_logprobs must be \[B, T-1\]"):
        batches.evaluate({}, replace(batch, curr=batch.data["prev_logprobs"]))


def test_data_that_requires_grad_changes_nothing():
    batch = batches.rollouts(1)
    config = {"use_importance_sampling_correction": True, "positive_example_nll_weight": 0.1}
    expected = batches.evaluate(config, batch)
    live = {key: value.clone().requires_grad_() for key, value in batch.data.items() if value.is_floating_point()}
    found = batches.evaluate(config, batch.with_data(**live))
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.grad, expected.grad)
    assert found.metrics == expected.metrics
    assert all(value.grad is None for value in live.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16)] + [torch.float64],
    ids=str,
)
@every_variant
def test_the_default_dtype_plays_no_part(name, dtype):
    batch = batches.rollouts(1)
    config = {**VARIANTS[name], "masks": [batches.MASKS["k3_worst"]], "positive_example_nll_weight": 0.1}
    expected = batches.evaluate(config, batch)
    # Numbers, whose conversion a default dtype would round or overflow.
    expected_loss, expected_metrics = build_loss(config)(batch.curr, batch.data, batch.seqs, 70001)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = batches.evaluate(build_loss(config), replace(batch, seqs=int(batch.seqs), toks=int(batch.toks)))
        loss, metrics = build_loss(config)(batch.curr, batch.data, batch.seqs, 70001)
    finally:
        torch.set_default_dtype(before)
    assert found.loss.dtype == torch.float32
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.grad, expected.grad)
    assert found.metrics == expected.metrics
    assert (loss.item(), metrics) == (expected_loss.item(), expected_metrics)


@pytest.mark.slow
@every_variant
def test_the_default_device_plays_no_part(name):
    batch = batches.rollouts(1)
    config = {**VARIANTS[name], "masks": [batches.MASKS["k3_worst"]], "positive_example_nll_weight": 0.1}
    row, data, segments = packed_rows(batch)
    expected = batches.evaluate(config, batch), *build_loss(config).packed(row, data, segments, batch.seqs, batch.toks)
    # A tensor on "meta" has no values, so that a result which depends on one is an error.
    with torch.device("meta"):
        loss_fn = build_loss(config)
        found = batches.evaluate(loss_fn, batch), *loss_fn.packed(row, data, segments, batch.seqs, batch.toks)
        segments = PackedSegments(segments.cu_seqlens)
        assert torch.equal(loss_fn.packed(row, data, segments, batch.seqs, batch.toks)[0], expected[1])
        numbers = loss_fn(batch.curr, batch.data, batch.seqs, int(batch.toks))
    assert torch.equal(found[0].loss, expected[0].loss)
    assert torch.equal(found[0].grad, expected[0].grad)
    assert found[0].metrics == expected[0].metrics
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]
    assert torch.equal(numbers[0], expected[0].loss)


@pytest.mark.parametrize("packed", [False, True])
@every_variant
def test_raise_raises_for_the_models_own_values_too(name, packed):
    batch = batches.rollouts(1)
    curr = batch.curr.clone()
    curr[1, batch.data["token_mask"][1, 1:].nonzero()[0]] = -math.inf
    loss_fn = build_loss({**VARIANTS[name], "nonfinite": "raise", "metrics": "nemo_rl"})
    if packed:
        logprobs, data, segments = packed_rows(replace(batch, curr=curr))
        call = functools.partial(loss_fn.packed, logprobs, data, segments)
    else:
        call = functools.partial(loss_fn, curr, batch.data)
    with pytest.raises(NonFiniteError, match="1 in the log-probs given to the loss"):
        call(batch.seqs, batch.toks)


def test_raise_raises_for_the_unfiltered_log_probs_too():
    batch = batches.rollouts(1)
    unfiltered = batch.curr.clone()
    unfiltered[1, batch.data["token_mask"][1, 1:].nonzero()[0]] = math.nan
    batch = batch.with_data(curr_logprobs_unfiltered=unfiltered)
    with pytest.raises(NonFiniteError, match=r"1 in data\['curr_logprobs_unfiltered'\]"):
        build_loss({"nonfinite": "raise"})(batch.curr, batch.data, batch.seqs, batch.toks)
    _, metrics = build_loss({"nonfinite": "drop_token"})(batch.curr, batch.data, batch.seqs, batch.toks)
    assert metrics["geomask/nonfinite_unfiltered"] == 1
    assert metrics["geomask/nonfinite_curr"] == 0


def test_raise_passes_a_batch_whose_values_are_finite():
    batch = batches.rollouts(1)
    batch = batch.with_data(curr_logprobs_unfiltered=batch.curr)
    counts = (batch.seqs, batch.toks)
    assert build_loss({"nonfinite": "raise"})(batch.curr, batch.data, *counts)[0].isfinite()


def test_a_trainer_may_divide_the_loss_in_place():
    batch = batches.rollouts(1)
    curr = batch.curr.clone().requires_grad_()
    loss, _ = build_loss({})(curr, batch.data, batch.seqs, batch.toks)
    loss /= 2
    loss.backward()
    torch.testing.assert_close(curr.grad, batches.evaluate({}, batch).grad / 2)


@pytest.mark.parametrize("config", [{"name": "gspo"}, {"reference_policy_kl_penalty": 0.0}], ids=str)
def test_a_call_leaves_the_loss_as_it_was(config):
    loss_fn, batch = build_loss(config), batches.rollouts(1)
    sent = pickle.dumps(loss_fn)
    found = batches.evaluate(loss_fn, batch)
    assert pickle.dumps(loss_fn) == sent
    assert dict(batches.evaluate(pickle.loads(sent), batch).metrics) == dict(found.metrics)


def test_what_a_batch_may_hold_is_named_only_where_it_does():
    loss_fn, batch = build_loss({"reference_policy_kl_penalty": 0.0}), batches.rollouts(1)
    without = {key: value for key, value in batch.data.items() if key != "reference_policy_logprobs"}
    names = [set(batches.evaluate(loss_fn, replace(batch, data=data)).metrics) for data in (batch.data, without)]
    assert names[0] - names[1] == {f"geomask/reference_{name}" for name in ("k1", "k3", "k1_sequence")}
    assert names[0] | {"geomask/filtered_tokens"} == set(loss_fn.metric_normalizations)
