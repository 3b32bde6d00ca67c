"""Checkpoints of unfinished runs: the trainer's state after a step, with a hash by which a damaged file is detected.

A run keeps its last two checkpoints, so that it can resume from the earlier one if the later one is damaged. A file
consists of a line that names the format, the SHA-256 of the rest, and the state as ``torch.save`` writes it. The state
is read with ``weights_only``, so that a file from elsewhere can't execute code.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.recipe.input_limits import open_regular_file
from nemo_geomask.tools.lab.run_store import Run
from nemo_geomask.tools.shared.atomic_write import write_atomically

_FORMAT = b"nemo-geomask lab checkpoint, format 1\n"
_HASH_BYTES = hashlib.sha256().digest_size


class Checkpoint(NamedTuple):
    """State of a run after a step."""

    path: Path  # the file
    step: int  # number of completed steps
    state: Mapping[str, Any]  # see :meth:`nemo_geomask.tools.lab.trainer.Trainer.state`


def write_checkpoint(run: Run, step: int, state: Mapping[str, Any]) -> None:
    """Write the run's state after a step; the checkpoint before it is kept, and an older one is replaced."""
    buffer = io.BytesIO()
    torch.save({"run": run.name, "step": step, "state": dict(state)}, buffer)
    payload = buffer.getvalue()
    path, previous = run.state_file, run.previous_state_file
    if path.exists():
        os.replace(path, previous)
    write_atomically(path, _FORMAT + hashlib.sha256(payload).digest() + payload)


def remove_checkpoints(run: Run) -> None:
    """Remove all checkpoints of a run, and what a killed process left of one."""
    for path in (run.state_file, run.previous_state_file, *run.folder.glob(".state.pt.*.part")):
        path.unlink(missing_ok=True)


def find_checkpoint(run: Run) -> tuple[Checkpoint | None, str]:
    """Return the latest intact checkpoint of a run, or None if it has none.

    Returns: The checkpoint, and a sentence on a later one that is damaged; empty if there is no such file.

    Raises: ConfigError: the run has checkpoints, and all of them are damaged.
    """
    damage: dict[Path, str] = {}
    for path in (run.state_file, run.previous_state_file):
        if not os.path.lexists(path):
            continue
        try:
            checkpoint = _read(path, run)
        except _DamagedCheckpointError as error:
            damage[path] = str(error)
            continue
        warnings = [
            f"{file} {reason}; resuming from {path.name}, after step {checkpoint.step}."
            for file, reason in damage.items()
        ]
        return checkpoint, " ".join(warnings)
    if not damage:
        return None, ""
    reasons = "; ".join(f"{path} {reason}" for path, reason in damage.items())
    names = " and ".join(path.name for path in damage)
    raise ConfigError(
        f"{run.label}, seed {run.recipe.grpo.seed}, can't be resumed: {reasons}. Remove {names} there to train the run "
        "again from its first step"
    )


class _DamagedCheckpointError(Exception):
    """A checkpoint can't be used; the message continues a sentence that begins with the file's name."""


def _read(path: Path, run: Run) -> Checkpoint:
    try:
        with open_regular_file(path) as file:
            header = file.read(len(_FORMAT) + _HASH_BYTES)
            payload = file.read() if header.startswith(_FORMAT) else b""
    except (IsADirectoryError, InputLimitError):
        raise _DamagedCheckpointError("is not a file") from None
    except OSError as error:
        raise _DamagedCheckpointError(f"can't be read ({error.strerror or error})") from None
    if not header:
        raise _DamagedCheckpointError("is empty")
    if not header.startswith(_FORMAT):
        raise _DamagedCheckpointError("is damaged, or another version of the lab wrote it")
    if hashlib.sha256(payload).digest() != header[len(_FORMAT) :]:
        raise _DamagedCheckpointError("does not match its hash: it was truncated or changed")
    try:
        data = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
        run_name, step, state = data["run"], int(data["step"]), dict(data["state"])
    except Exception as error:  # torch raises errors of many types for files that are not its own
        raise _DamagedCheckpointError(f"does not hold the state of a run ({type(error).__name__})") from None
    if run_name != run.name:
        raise _DamagedCheckpointError("belongs to another run")
    return Checkpoint(path, step, state)
