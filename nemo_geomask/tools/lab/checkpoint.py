"""Checkpoint of an unfinished run: the trainer's state after its last step, with a hash by which damage is detected.

A file consists of the SHA-256 of the rest, and the state as ``torch.save`` writes it, whose checksums torch does not
check. It is written atomically, so that a process that is killed leaves it whole, and read with ``weights_only``, so
that a file from elsewhere can't execute code.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import open_regular_file
from nemo_geomask.tools.lab.run_store import Run
from nemo_geomask.tools.shared.atomic_write import write_atomically

_HASH_BYTES = hashlib.sha256().digest_size


class Checkpoint(NamedTuple):
    """State of a run after a step."""

    step: int  # number of completed steps
    state: Mapping[str, Any]  # see :meth:`nemo_geomask.tools.lab.trainer.Trainer.state`


def write_checkpoint(run: Run, step: int, state: Mapping[str, Any]) -> None:
    """Write the run's state after a step in place of an earlier one."""
    buffer = io.BytesIO()
    torch.save({"run": run.name, "step": step, "state": dict(state)}, buffer)
    payload = buffer.getvalue()
    write_atomically(run.state_file, hashlib.sha256(payload).digest() + payload)


def remove_checkpoint(run: Run) -> None:
    """Remove the checkpoint of a run, and what a killed process left of one."""
    for path in (run.state_file, *run.folder.glob(".state.pt.*.part")):
        path.unlink(missing_ok=True)


def find_checkpoint(run: Run) -> Checkpoint | None:
    """Return the checkpoint of a run, or None if it has none.

    Raises: ConfigError: the file is damaged, or not that of the run.
    """
    if not os.path.lexists(run.state_file):
        return None
    try:
        with open_regular_file(run.state_file) as file:
            digest, payload = file.read(_HASH_BYTES), file.read()
        if hashlib.sha256(payload).digest() != digest:
            raise ValueError("it does not match its hash")
        data = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
        if data["run"] != run.name:
            raise ValueError("it belongs to another run")
        return Checkpoint(int(data["step"]), dict(data["state"]))
    except Exception as error:  # torch raises errors of many types for files that are not its own
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise ConfigError(
            f"{run.label}, seed {run.recipe.grpo.seed}, can't be resumed from {run.state_file}: {reason}. Remove that "
            "file to train the run again from its first step"
        ) from None
