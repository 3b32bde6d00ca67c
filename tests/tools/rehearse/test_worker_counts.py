"""What is counted in a training worker."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nemo_geomask.tools.rehearse import worker_counts


def test_the_losses_of_a_process_are_summed():
    before = worker_counts.read_counts(SimpleNamespace())["losses"]
    loss = worker_counts.counted(lambda value: (torch.tensor(value), {}))
    for value in (0.25, -1.0):
        loss(value)
    after = worker_counts.read_counts(SimpleNamespace())["losses"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [-0.75, 1.25]
