"""From logits to their gradient: a loss of every kind against the float64 oracle, on any device and kernel."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments
from tests.helpers import oracle
from tests.helpers.batches import MASKS, VARIANTS
from tests.losses import test_matrix as matrix

_CORRECTED = {"use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}
CONFIGS: dict[str, dict[str, Any]] = VARIANTS | {
    f"{name}-corrected": {**config, **_CORRECTED, "masks": list(MASKS.values())} for name, config in VARIANTS.items()
}


@functools.cache
def _problem():
    """Logits of a batch whose rows lie one after another, and the derivatives of their log-probs."""
    batch, logits, targets = matrix.problem()
    return batch, logits, targets, matrix.softmax_derivative(logits, targets)


def answer_to(loss_fn, batch):
    """The oracle's loss, gradient and metrics."""
    return oracle.evaluate(loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump())


def check_loss(loss, metrics, answer):
    """Loss and metrics against the oracle's."""
    assert loss.item() == pytest.approx(answer.loss, rel=1e-4, abs=1e-6)
    for metric, value in answer.metrics.items():
        assert metrics[metric] == pytest.approx(value, rel=1e-4, abs=2e-6), metric


def check_from_logits(name, *, device="cpu", kernel="auto"):
    """Loss, metrics and the gradient of the logits under ``CONFIGS[name]``, packed, against the oracle's."""
    batch, logits, targets, derivative = _problem()
    loss_fn = build_loss(CONFIGS[name])
    answer = answer_to(loss_fn, batch)
    outer = np.zeros(targets.shape)
    outer[:, : batch.curr.shape[1]] = answer.grad
    data = {key: value.reshape(-1) for key, value in matrix.shift(batch).items()}
    data |= {key: batch.data[key] for key in ("sample_mask", "rewards")}
    data = {key: value.to(device) for key, value in data.items()}
    rows, width = targets.shape
    segments = PackedSegments(range(0, rows * width + 1, width), device=torch.device(device))

    leaf = logits.to(device, copy=True).requires_grad_()
    logprobs = vocab_parallel_logprobs(leaf, targets.to(device), temperature=matrix.TEMPERATURE, kernel=kernel)
    loss, metrics = loss_fn.packed(logprobs.reshape(-1), data, segments, batch.seqs, batch.toks)
    loss.backward()
    check_loss(loss, metrics, answer)
    grad = outer[:, :, None] * derivative
    assert np.abs(grad).max() > 1e-4
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), grad, rtol=5e-4, atol=2e-7)
