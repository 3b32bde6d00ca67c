"""Rows of a step with every required column, for tests of the recorder."""

from __future__ import annotations

import torch

from nemo_geomask.records.step_table import StepRows

__all__ = ["step_rows"]


def step_rows() -> StepRows:
    """Return four sequences of 5, 3, 7 and 2 tokens."""
    values = {
        "row": torch.arange(4),
        "group": torch.tensor([0, 0, 1, 1]),
        "prompt_length": torch.tensor([2, 2, 3, 0]),
        "turns": torch.ones(4, dtype=torch.int64),
        "sample_mask": torch.ones(4),
        "tokens": torch.arange(28).view(4, 7),
        "mask": torch.ones(4, 7, dtype=torch.bool),
        "gen": -torch.rand(4, 7),
    }
    return StepRows(torch.tensor([5, 3, 7, 2]), values)
