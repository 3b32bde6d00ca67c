"""Every variant on a GPU, from logits to their gradient and on padded rows, against the float64 oracle."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the losses' settings need pydantic, which is not installed")

import batches
import oracle
import test_matrix as matrix
from batches import MASKS, VARIANTS

from nemo_geomask import build_loss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

DEVICE = "cuda"
CORRECTED = {"use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}
CONFIGS = VARIANTS | {
    f"{name}-corrected": {**config, **CORRECTED, "masks": list(MASKS.values())} for name, config in VARIANTS.items()
}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def moved(data):
    return {key: value.to(DEVICE) for key, value in data.items()}


def answer_to(loss_fn, batch):
    return oracle.evaluate(loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump())


def check_loss(loss, metrics, answer):
    assert loss.item() == pytest.approx(answer.loss, rel=1e-4, abs=1e-6)
    for metric, value in answer.metrics.items():
        assert metrics[metric] == pytest.approx(value, rel=1e-4, abs=2e-6), metric


@functools.cache
def problem():
    """Logits of a batch whose rows lie one after another, and the derivatives of their log-probs."""
    batch, logits, targets = matrix.problem()
    return batch, logits, targets, matrix.softmax_derivative(logits, targets)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_logits_equals_oracle(name):
    batch, logits, targets, derivative = problem()
    loss_fn = build_loss(CONFIGS[name])
    answer = answer_to(loss_fn, batch)
    outer = np.zeros(targets.shape)
    outer[:, : batch.curr.shape[1]] = answer.grad
    data = {key: value.reshape(-1) for key, value in matrix.shift(batch).items()}
    data |= {key: batch.data[key] for key in ("sample_mask", "rewards")}
    rows, width = targets.shape
    segments = PackedSegments(range(0, rows * width + 1, width), device=DEVICE)

    leaf = logits.to(DEVICE, copy=True).requires_grad_()
    logprobs = vocab_parallel_logprobs(leaf, targets.to(DEVICE), temperature=matrix.TEMPERATURE)
    loss, metrics = loss_fn.packed(logprobs.reshape(-1), moved(data), segments, batch.seqs, batch.toks)
    loss.backward()
    check_loss(loss, metrics, answer)
    grad = outer[:, :, None] * derivative
    assert np.abs(grad).max() > 1e-4
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), grad, rtol=5e-4, atol=2e-7)


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_equals_oracle(name):
    batch = batches.rollouts(seed=5)
    loss_fn = build_loss(CONFIGS[name])
    answer = answer_to(loss_fn, batch)
    found = batches.evaluate(loss_fn, replace(batch, curr=batch.curr.to(DEVICE), data=moved(batch.data)))
    check_loss(found.loss, found.metrics, answer)
    np.testing.assert_allclose(found.grad.cpu().numpy(), np.array(answer.grad), rtol=1e-4, atol=1e-6)
