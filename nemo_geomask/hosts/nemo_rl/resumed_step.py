"""Number of the step after which NeMo-RL resumed a run, kept on the worker group of its policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["remember_resumed_step", "resumed_step"]

_ATTRIBUTE = "_nemo_geomask_resumed_step"


def remember_resumed_step(group: Any, worker_settings: Mapping[str, Any]) -> None:
    """Store the step number on a policy's worker group; it is pickled with the group.

    Args:
        group: NeMo-RL's ``RayWorkerGroup``.
        worker_settings: arguments of its workers; ``weights_path`` is in a folder ``step_N`` if the run was resumed.
    """
    numbers = re.findall(r"step_(\d+)", str(worker_settings.get("weights_path") or ""))
    setattr(group, _ATTRIBUTE, int(numbers[-1]) if numbers else 0)


def resumed_step(policy: Any) -> int:
    """Return the step after which the run of a policy was resumed; 0 if it started from the beginning."""
    return getattr(getattr(policy, "worker_group", None), _ATTRIBUTE, 0)
