"""What happens in a rehearsal, as its driver writes it down and the command reads it: a line of JSON an event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["STAGES", "Events", "read_events", "stage_of"]

STAGES: tuple[str, ...] = (
    *("validation", "start", "workers", "refit", "sampling", "log-probs", "veto", "step", "metrics", "checkpoint"),
)
"""In the order in which they first come."""

_BY_LABEL: tuple[tuple[str, str], ...] = (
    # Beginning of a label of NeMo-RL's Timer, and stage; of v0.6.0 to main, synchronous, asynchronous, PPO, data plane.
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
    ("checkpointing", "checkpoint"),
)


def stage_of(label: str) -> str | None:
    """The stage that a label of NeMo-RL's belongs to; its parts (``policy_training/…``) and its totals to none."""
    if "/" in label and not label.startswith("prepare_for_generation/total"):
        return None
    return next((stage for start, stage in _BY_LABEL if label.startswith(start)), None)


class Events:
    """Appends events to a file, each whole and at once.

    Args:
        path: the file; processes may share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, kind: str, **what: Any) -> None:
        """Write one event.

        Args:
            kind: ``begin`` or ``end`` of a ``stage``; ``metrics``, ``proof``, ``error``, ``done``.
            what: whatever JSON can hold.
        """
        line = json.dumps({"at": time.time(), "kind": kind, **what}, default=str) + "\n"
        number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(number, line.encode())
        finally:
            os.close(number)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file that may still be written; none where there is none."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            event: dict[str, Any] = json.loads(line)
            yield event
