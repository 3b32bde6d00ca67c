"""Number of the step after which NeMo-RL resumed a run, kept on its policy."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["remember_resumed_step", "resumed_step"]

_ATTRIBUTE = "_nemo_geomask_resumed_step"


def remember_resumed_step(policy: Any, checkpoint: object) -> None:
    """Store the step number on a policy; it is pickled with the policy.

    Args:
        policy: NeMo-RL's.
        checkpoint: path of the checkpoint from which the run was resumed, in a folder ``step_N``; None if it starts
            from the beginning.
    """
    numbers = re.findall(r"step_(\d+)", str(checkpoint or ""))
    setattr(policy, _ATTRIBUTE, int(numbers[-1]) if numbers else 0)


def resumed_step(policy: Any) -> int:
    """Return the step after which the run of a policy was resumed; 0 if it started from the beginning."""
    return getattr(policy, _ATTRIBUTE, 0)
