"""From logits to their gradient: a loss of every kind against the float64 oracle, on any device and kernel."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments
from tests.helpers import batches, oracle
from tests.helpers.batches import MASKS, VARIANTS

_CORRECTED = {"use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}
CONFIGS: dict[str, dict[str, Any]] = VARIANTS | {
    f"{name}-corrected": {**config, **_CORRECTED, "masks": list(MASKS.values())} for name, config in VARIANTS.items()
}


# 22 positions with a log-prob; the rest of a row is padding, which divides into all shares.
WIDTH, PADDED, VOCAB, TEMPERATURE = 22, 32, 19, 0.8


def problem():
    """A batch, and logits [B, PADDED, VOCAB] under which the targets' log-probs are the batch's."""
    batch = batches.rollouts(seed=6, width=WIDTH + 1)
    # rollouts() draws log-ratios and does not mind a positive log-prob; logits do.
    keys = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    batch = replace(batch.with_data(**{key: batch.data[key] - 4.0 for key in keys}), curr=batch.curr - 4.0)
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(batch.curr), PADDED, VOCAB, dtype=torch.float64, generator=draw)
    targets = torch.randint(0, VOCAB, logits.shape[:2], generator=draw).unsqueeze(-1)
    # The target's logit that gives it the wanted probability beside the others.
    wanted = torch.nn.functional.pad(batch.curr.double(), (0, PADDED - WIDTH), value=-1.0).unsqueeze(-1)
    others = torch.logsumexp(logits.scatter(-1, targets, -math.inf), dim=-1, keepdim=True)
    logits = logits.scatter(-1, targets, others + wanted - torch.log1p(-wanted.exp())) * TEMPERATURE
    trains = batch.data["token_mask"][:, 1:] * batch.data["sample_mask"].unsqueeze(-1)
    trains = torch.nn.functional.pad(trains, (0, PADDED - WIDTH)).bool()
    return batch, logits.float(), torch.where(trains, targets.squeeze(-1), -100)


def shift(batch):
    """Token tensors [B, PADDED], position t about the token that it predicts, garbage in the padding."""
    padding = (0, PADDED - WIDTH)
    return {
        key: torch.nn.functional.pad(batch.data[key][:, 1:], padding, value=0.0 if key == "token_mask" else math.nan)
        for key in batches.TOKEN_KEYS
    }


def softmax_derivative(logits, targets):
    """∂ log p(target) / ∂ logits in float64, by loops; [B, PADDED, VOCAB], 0 where nothing trains."""
    derivative = np.zeros(logits.shape)
    for i, t in itertools.product(range(len(logits)), range(PADDED)):
        if targets[i, t] >= 0:
            z = [float(x) / TEMPERATURE for x in logits[i, t]]
            peak = max(z)
            total = sum(math.exp(x - peak) for x in z)
            for j, x in enumerate(z):
                derivative[i, t, j] = (float(j == int(targets[i, t])) - math.exp(x - peak) / total) / TEMPERATURE
    return derivative


@functools.cache
def _problem():
    """Logits of a batch whose rows lie one after another, and the derivatives of their log-probs."""
    batch, logits, targets = problem()
    return batch, logits, targets, softmax_derivative(logits, targets)


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
    data = {key: value.reshape(-1) for key, value in shift(batch).items()}
    data |= {key: batch.data[key] for key in ("sample_mask", "rewards")}
    data = {key: value.to(device) for key, value in data.items()}
    rows, width = targets.shape
    segments = PackedSegments(range(0, rows * width + 1, width), device=torch.device(device))

    leaf = logits.to(device, copy=True).requires_grad_()
    logprobs = vocab_parallel_logprobs(leaf, targets.to(device), temperature=TEMPERATURE, kernel=kernel)
    loss, metrics = loss_fn.packed(logprobs.reshape(-1), data, segments, batch.seqs, batch.toks)
    loss.backward()
    check_loss(loss, metrics, answer)
    grad = outer[:, :, None] * derivative
    assert np.abs(grad).max() > 1e-4
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), grad, rtol=5e-4, atol=2e-7)
