"""Event log of a rehearsal: the driver appends one JSON object per line, and the command reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

EVENTS = "events.jsonl"
"""Name of the log, in the folder of a run."""

STAGES = ("start", "workers", "refit", "sampling", "log-probs", "veto", "step", "val", "metrics", "checkpoint")
"""Stages of a run, in the order in which they first begin; in ``val``, NeMo-RL validates the policy on prompts."""

_LABELS: Mapping[str, tuple[str, ...]] = {
    # By stage: prefixes of labels of NeMo-RL's Timer, of all trainers, from v0.6.0 to main.
    "refit": ("prepare_for_generation", "weight_sync", "offload_before_refit", "policy_offload_after_refit"),
    "sampling": ("generation", "exposed_generation", "reward_calculation"),
    "log-probs": ("logprob_inference_prep", "policy_and_reference_logprobs", "value_inference"),
    "step": ("training_prep", "policy_training", "value_training"),
    "val": ("total_validation_time",),
    "checkpoint": ("checkpointing",),
}


def stage_of(label: str) -> str | None:
    """Return the stage of a timer label; None for parts of a stage (``policy_training/…``) and totals."""
    if "/" in label and not label.startswith("prepare_for_generation/total"):
        return None
    return next((stage for stage, labels in _LABELS.items() if label.startswith(labels)), None)


class Events(NamedTuple):
    """Log that each call appends an event to, in one write; processes may share the file."""

    path: Path

    def __call__(self, event_type: str, **fields: Any) -> None:
        """Write one event.

        Args:
            event_type: ``begin`` or ``end`` of a ``stage``, ``metrics``, ``worker_counts``, ``weights`` or ``error``.
            fields: JSON values.
        """
        line = json.dumps({"at": time.time(), "kind": event_type, **fields}, default=str) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that may still be growing; none if there is no file."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            event: dict[str, Any] = json.loads(line)
            yield event
