"""Event log of a rehearsal: the driver appends one JSON object per line, and the command reads them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STAGES: tuple[str, ...] = (
    "validation",
    "start",
    "workers",
    "refit",
    "sampling",
    "log-probs",
    "veto",
    "step",
    "val",
    "metrics",
    "checkpoint",
)
"""Stages of a rehearsal, in the order in which they first begin.

In ``validation``, ``check`` validates the recipe; in ``val``, NeMo-RL validates the policy on prompts.
"""

_STAGE_OF_LABEL: tuple[tuple[str, str], ...] = (
    # Prefix of a label of NeMo-RL's Timer, and the stage: the labels of all trainers, from v0.6.0 to main.
    ("prepare_for_generation", "refit"),
    ("weight_sync", "refit"),
    ("offload_before_refit", "refit"),
    ("policy_offload_after_refit", "refit"),
    ("generation", "sampling"),
    ("exposed_generation", "sampling"),
    ("reward_calculation", "sampling"),
    ("logprob_inference_prep", "log-probs"),
    ("policy_and_reference_logprobs", "log-probs"),
    ("value_inference", "log-probs"),
    ("training_prep", "step"),
    ("policy_training", "step"),
    ("value_training", "step"),
    ("total_validation_time", "val"),
    ("checkpointing", "checkpoint"),
)


def stage_of(label: str) -> str | None:
    """Return the stage of a timer label; None for parts of a stage (``policy_training/…``) and totals."""
    if "/" in label and not label.startswith("prepare_for_generation/total"):
        return None
    return next((stage for start, stage in _STAGE_OF_LABEL if label.startswith(start)), None)


class Events:
    """Writer that appends events to a file, each in one write.

    Args:
        path: the file; processes may share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event_type: str, **fields: Any) -> None:
        """Write one event.

        Args:
            event_type: ``begin`` or ``end`` of a ``stage``, ``metrics``, ``worker_counts``, ``weights``, ``error`` or
                ``done``.
            fields: JSON values.
        """
        line = json.dumps({"at": time.time(), "kind": event_type, **fields}, default=str) + "\n"
        number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(number, line.encode())
        finally:
            os.close(number)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that may still be growing; none if there is no file."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            event: dict[str, Any] = json.loads(line)
            yield event
