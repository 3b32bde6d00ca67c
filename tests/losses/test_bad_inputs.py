"""Inputs that no loss is defined for: each ends in an error that names it, or in a loss of NaN that is counted."""

from __future__ import annotations

import math
import re

import pytest
import torch

from nemo_geomask import PackedSegments, build_loss, linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.errors import DataError, GeomaskError, NonFiniteError, ShapeError
from nemo_geomask.losses import PrestepPass
from tests.helpers import batches

MASK_VALUES = [math.nan, math.inf, -math.inf, -1.0, 1.5]
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
    with pytest.raises(DataError, match=rf"data\['{key}'\] holds 1 values that are NaN or not from 0 to 1"):
        loss_of({"nonfinite": "raise", "metrics": "nemo_rl"}, batch, packed=False)
    prestep_pass = PrestepPass(build_loss({"batch_veto": {"max": 0.1}}).config)
    with pytest.raises(DataError, match=rf"data\['{key}'\] holds 1 values"):
        prestep_pass(batch.data)


@pytest.mark.parametrize("config", EVERY_NORMALIZATION, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0], ids=str)
@pytest.mark.parametrize("name", ["seqs", "toks"])
def test_a_count_that_is_an_invalid_tensor_gives_nan_and_is_counted(name, value, config):
    loss, _, metrics = loss_of(config, batches.rollouts(), packed=False, **{name: value})
    assert math.isnan(loss)
    assert metrics["geomask/invalid_counts"] == 1


def _distributed(tensor):
    """A class that has what a DTensor has, since a real one needs a process group."""

    class Distributed(torch.Tensor):
        def full_tensor(self):
            raise NotImplementedError

    return tensor.as_subclass(Distributed)


KINDS = {
    "DTensor": (_distributed, "it is a DTensor; pass value.full_tensor()"),
    "float8": (lambda tensor: tensor.to(torch.float8_e4m3fn), "it is of torch.float8_e4m3fn; convert it"),
    "sparse": (lambda tensor: tensor.to_sparse(), "it is a sparse tensor (torch.sparse_coo); pass value.to_dense()"),
    "nested": (
        lambda tensor: torch.nested.as_nested_tensor(list(tensor), layout=torch.jagged),
        "it is a nested tensor",
    ),
}


def _call(key, change):
    """Call the loss with one tensor changed."""
    batch = batches.rollouts()
    if key == "next_token_logprobs":
        return build_loss({})(change(batch.curr), batch.data, 8, 70)
    return build_loss({})(batch.curr, {**batch.data, key: change(batch.data[key])}, 8, 70)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["next_token_logprobs", "advantages", "generation_logprobs", "token_mask"])
def test_a_tensor_of_another_kind_is_named(key, kind):
    change, message = KINDS[kind]
    name = key if key == "next_token_logprobs" else f"data['{key}']"
    with pytest.raises(ShapeError, match=re.escape(f"{name} must be a dense tensor, but {message}")):
        _call(key, change)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_hidden_states_and_weights_of_another_kind_are_named(kind):
    change, message = KINDS[kind]
    targets = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=re.escape(f"logits must be a dense tensor, but {message}")):
        vocab_parallel_logprobs(change(torch.ones(3, 8)), targets)
    for name in ("hidden", "weight"):
        tensors = {"hidden": torch.ones(3, 4), "weight": torch.ones(8, 4)}
        with pytest.raises(ShapeError, match=re.escape(f"{name} must be a dense tensor, but {message}")):
            linear_logprobs(**{**tensors, name: change(tensors[name])}, targets=targets)


def _without_columns():
    batch = batches.rollouts()
    data = {key: value[:, :0] if value.dim() == 2 else value for key, value in batch.data.items()}
    return build_loss({})(batch.curr[:, :0], data, 8, 70)


def _packed_with(segments):
    curr, data, _ = batches.packed_rows(batches.rollouts())
    return build_loss({}).packed(curr, data, segments, 8, 70)


def _spoilt(config, **counts):
    loss, _, metrics = loss_of(config, batches.rollouts(), packed=False, **counts)
    assert math.isnan(loss)
    assert metrics["geomask/invalid_counts"]
    raise NonFiniteError("documented NaN")


def _masked(key, value):
    loss, _, metrics = loss_of({}, with_mask_value(key, value), packed=False)
    assert math.isnan(loss)
    assert metrics[f"geomask/invalid_{key}"]
    raise NonFiniteError("documented NaN")


BAD = {
    "a weight on meta": (
        lambda: linear_logprobs(torch.ones(3, 4), torch.ones(8, 4, device="meta"), torch.zeros(3, dtype=torch.int64)),
        "weight is on meta",
    ),
    "NaN in token_mask": (lambda: _masked("token_mask", math.nan), "NaN"),
    "infinity in token_mask": (lambda: _masked("token_mask", math.inf), "NaN"),
    "a negative token_mask": (lambda: _masked("token_mask", -1.0), "NaN"),
    "a sample_mask above 1": (lambda: _masked("sample_mask", 2.0), "NaN"),
    "a negative count": (lambda: _spoilt({}, toks=-1.0), "NaN"),
    "an infinite count": (lambda: _spoilt({}, toks=math.inf), "NaN"),
    "True as a count": (lambda: _true_count(), "global_valid_seqs"),
    "DTensor": (lambda: _call("advantages", KINDS["DTensor"][0]), "data['advantages']"),
    "float8": (lambda: _call("prev_logprobs", KINDS["float8"][0]), "data['prev_logprobs']"),
    "sparse": (lambda: _call("token_mask", KINDS["sparse"][0]), "data['token_mask']"),
    "nested": (lambda: _call("generation_logprobs", KINDS["nested"][0]), "data['generation_logprobs']"),
    "no columns": (_without_columns, "data['token_mask'] must be [B, T] with T of at least 1"),
    "a scalar cu_seqlens": (lambda: PackedSegments(torch.tensor(8)), "cu_seqlens must be [S+1]"),
    "no cu_seqlens": (lambda: PackedSegments(None), "cu_seqlens must be the token offsets"),
    "no segments": (lambda: _packed_with(None), "segments must be PackedSegments(cu_seqlens"),
}


def _true_count():
    batch = batches.rollouts()
    return build_loss({})(batch.curr, batch.data, True, 70)


@pytest.mark.parametrize("name", BAD)
def test_every_bad_input_ends_in_an_error_or_a_documented_nan(name):
    attempt, message = BAD[name]
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
