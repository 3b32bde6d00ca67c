"""Inputs that no loss is defined for: each ends in an error that names it, or in a loss of NaN that is counted."""

from __future__ import annotations

import math
import re

import pytest
import torch

from nemo_geomask import PackedSegments, build_loss, linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.errors import DataError, GeomaskError
from nemo_geomask.losses import PrestepPass
from tests.helpers import batches

MASK_VALUES = [math.nan, math.inf, -math.inf, -1.0, 1.5]
TARGETS = torch.zeros(3, dtype=torch.int64)
EVERY_NORMALIZATION = [{}, {"token_level_loss": False}, {"name": "gspo"}]


def loss_of(config, batch, *, packed, seqs=8.0, toks=70.0):
    """Loss, gradient and metrics of a batch as padded rows or as packed ones; the counts as tensors."""
    counts = (torch.tensor(seqs), torch.tensor(toks))
    loss_fn = build_loss(config)
    if packed:
        curr, data, segments = batches.packed_rows(batch)
        loss, metrics = loss_fn.packed(curr.requires_grad_(), data, segments, *counts)
    else:
        curr, data = batch.curr.clone().requires_grad_(), batch.data
        loss, metrics = loss_fn(curr, data, *counts)
    loss.backward()
    return loss.item(), curr.grad, metrics


def with_mask_value(key, value):
    """A batch with one other value in a mask, at a token that trains or in a sequence of such tokens."""
    batch = batches.rollouts()
    mask = batch.data[key].clone()
    index = (0, int(batch.data["token_mask"][0, 1:].nonzero()[0]) + 1) if mask.dim() == 2 else (0,)
    mask[index] = value
    return batch.with_data(**{key: mask})


@pytest.mark.parametrize("config", EVERY_NORMALIZATION, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("value", MASK_VALUES, ids=str)
@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_a_mask_value_that_no_mask_can_have_gives_nan_and_is_counted(key, value, packed, config):
    loss, grad, metrics = loss_of(config, with_mask_value(key, value), packed=packed)
    assert math.isnan(loss)
    assert not grad.any()
    counted = {name: metrics[f"geomask/invalid_{name}"] for name in ("token_mask", "sample_mask", "counts")}
    assert counted == {"token_mask": 0, "sample_mask": 0, "counts": 0, key: 1}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_a_fraction_in_a_mask_is_a_weight(key, packed):
    loss, _, metrics = loss_of({}, with_mask_value(key, 0.5), packed=packed)
    assert math.isfinite(loss)
    assert metrics[f"geomask/invalid_{key}"] == 0


@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_an_invalid_mask_is_an_error_where_the_host_reads_values(key):
    batch = with_mask_value(key, 1.5)
    with pytest.raises(DataError, match=rf"data\['{key}'\] holds values that are NaN or not from 0 to 1"):
        loss_of({"nonfinite": "raise", "metrics": "nemo_rl"}, batch, packed=False)
    prestep_pass = PrestepPass(build_loss({"batch_veto": {"max": 0.1}}).config)
    with pytest.raises(DataError, match=rf"data\['{key}'\] holds values"):
        prestep_pass(batch.data)


@pytest.mark.parametrize("config", EVERY_NORMALIZATION, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0], ids=str)
@pytest.mark.parametrize("name", ["seqs", "toks"])
def test_a_count_that_is_an_invalid_tensor_gives_nan_and_is_counted(name, value, config):
    loss, _, metrics = loss_of(config, batches.rollouts(), packed=False, **{name: value})
    assert math.isnan(loss)
    assert metrics["geomask/invalid_counts"] == 1


def padded(change):
    """Call the loss with tensors changed by their names; ``data`` stands for all of a batch."""
    batch = batches.rollouts()
    tensors = change({"next_token_logprobs": batch.curr, **batch.data})
    return build_loss({})(tensors.pop("next_token_logprobs"), tensors, 8, 70)


def packed(segments):
    curr, data, _ = batches.packed_rows(batches.rollouts())
    return build_loss({}).packed(curr, data, segments, 8, 70)


# test_direct_calls.py has the other kinds of tensors.
SPARSE = "must be a dense tensor, but it is a sparse tensor (torch.sparse_coo); pass value.to_dense()"
REFUSED = {
    **{
        f"sparse {key}": (
            lambda key=key: padded(lambda tensors: {**tensors, key: tensors[key].to_sparse()}),
            f"{key if key == 'next_token_logprobs' else f'data[{key!r}]'} {SPARSE}",
        )
        for key in ("next_token_logprobs", "advantages", "generation_logprobs", "token_mask")
    },
    "sparse logits": (lambda: vocab_parallel_logprobs(torch.ones(3, 8).to_sparse(), TARGETS), f"logits {SPARSE}"),
    "sparse hidden": (
        lambda: linear_logprobs(torch.ones(3, 4).to_sparse(), torch.ones(8, 4), TARGETS),
        f"hidden {SPARSE}",
    ),
    "sparse weight": (
        lambda: linear_logprobs(torch.ones(3, 4), torch.ones(8, 4).to_sparse(), TARGETS),
        f"weight {SPARSE}",
    ),
    "no columns": (
        lambda: padded(lambda tensors: {name: x[:, :0] if x.dim() == 2 else x for name, x in tensors.items()}),
        "data['token_mask'] must be [B, T] with T of at least 1",
    ),
    "a scalar cu_seqlens": (lambda: PackedSegments(torch.tensor(8)), "cu_seqlens must be [S+1]"),
    "no cu_seqlens": (lambda: PackedSegments(None), "cu_seqlens must be the token offsets"),
    "no segments": (lambda: packed(None), "segments must be PackedSegments(cu_seqlens"),
}


@pytest.mark.parametrize(("attempt", "message"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_no_loss_takes_is_named(attempt, message):
    with pytest.raises(GeomaskError, match=re.escape(message)):
        attempt()


def test_a_mask_that_compares_the_policy_with_itself_is_said_to_do_nothing():
    with pytest.warns(UserWarning, match="loss_fn.masks, loss_fn.force_on_policy_ratio: a mask on log_ratio: policy"):
        build_loss({"force_on_policy_ratio": True, "masks": [batches.MASKS["opsm_policy"]]})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_compiled_code_counts_them_too(key):
    loss, grad, metrics = loss_of({"compile": True}, with_mask_value(key, math.nan), packed=True)
    assert math.isnan(loss)
    assert not grad.any()
    assert metrics[f"geomask/invalid_{key}"] == 1
