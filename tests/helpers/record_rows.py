"""Rows of a step with every required column, and a file of them, for tests of the recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_geomask.records import file_name
from nemo_geomask.records.step_table import StepRows
from nemo_geomask.records.writer import Recorder

__all__ = ["step_rows", "write_step"]


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


def write_step(
    directory: Path, step: int, rows: StepRows, *, masks: Sequence[str] = (), facts: Mapping[str, Any] | None = None
) -> Path:
    """Write one step's records as a recorder does, and return the path of the file."""
    recorder = Recorder(directory)
    recorder.record(step, lambda: rows, masks=masks, facts=facts)
    recorder.close()
    assert recorder.written == 1
    return directory / file_name(step, "driver")
