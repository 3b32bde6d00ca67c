"""What log-probs and loss cost of a step is measured forward and backward, each without the other."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from nemo_geomask.tools.rehearse import worker_counts

FORWARD, BACKWARD = 0.05, 0.15


class Slow(torch.autograd.Function):
    """x, slowly."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient


@pytest.mark.parametrize("is_inside", [False, True])
def test_each_part_has_its_own_time(is_inside):
    """Log-probs from NeMo-RL's own function before the loss, or within the loss, as of its own back ends."""
    before = {"log-probs": 0.0, "loss": 0.0} | worker_counts.read_counts(SimpleNamespace())["seconds"]
    loss = worker_counts.measured(worker_counts.LOSS, lambda logprobs, data: (logprobs.sum(), {}))

    def compute(logits):
        logprobs = Slow.apply(logits)
        return loss(logprobs, {}) if is_inside else (logprobs, {})

    compute = worker_counts.measured(worker_counts.LOGPROBS, compute)
    result, _ = compute(torch.ones(3, requires_grad=True) * 1)
    (result if is_inside else loss(result, {})[0]).backward()
    seconds = worker_counts.read_counts(SimpleNamespace())["seconds"]
    logprobs, own = (seconds[part] - before[part] for part in ("log-probs", "loss"))
    assert FORWARD + BACKWARD <= logprobs < 10
    assert own < logprobs


def test_the_memory_of_a_gpu_is_that_beyond_what_was_allocated(monkeypatch):
    peak = iter([5.0, 9.0, 9.0, 12.0])
    fake = {"is_available": True, "is_initialized": True, "memory_allocated": 4.0, "synchronize": None}
    for name, value in {**fake, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peak, 12.0))
    logprobs = worker_counts.measured(worker_counts.LOGPROBS, lambda logits: (logits * 2, {}))
    logits = torch.ones(3, requires_grad=True) * 1
    logprobs(logits)[0].sum().backward()
    assert worker_counts.read_counts(SimpleNamespace())["bytes"] == {"log-probs": 12.0 - 4.0, "all": 12.0}


def test_the_losses_of_a_process_are_summed():
    before = worker_counts.read_counts(SimpleNamespace())["losses"]
    loss = worker_counts.counted(lambda value: (torch.tensor(value), {}))
    for value in (0.25, -1.0):
        loss(value)
    after = worker_counts.read_counts(SimpleNamespace())["losses"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [-0.75, 1.25]
