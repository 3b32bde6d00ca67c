"""Folder, version and commit of the installed NeMo-RL.

The commit is read from the files in ``.git``. The git command may be missing, or may refuse a checkout that another
user owns.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from nemo_geomask.errors import InputLimitError, MissingDependencyError
from nemo_geomask.recipe.input_limits import read_text

_CONTAINER_COMMIT = "NEMO_RL_COMMIT"  # environment variable of NeMo-RL's container


def package_folder() -> Path:
    """Return the folder of the importable ``nemo_rl``, without importing it.

    Raises:
        MissingDependencyError: NeMo-RL is not importable.
    """
    spec = importlib.util.find_spec("nemo_rl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        # PyPI's nemo_rl is an empty placeholder.
        if (Path(location) / "algorithms").is_dir():
            return Path(location)
    raise MissingDependencyError(
        "NeMo-RL is not importable here; run this in NeMo-RL's own environment (uv run … in its checkout), or put the "
        "checkout on PYTHONPATH if this environment has its requirements. See docs/how_to/install.md"
    )


def import_nemo_rl(module: str) -> ModuleType:
    """Import a module of NeMo-RL.

    Raises:
        MissingDependencyError: one of NeMo-RL's requirements is not importable.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"NeMo-RL ({package_folder()}) needs {error.name}, which {sys.executable} can't import. Run this in "
            "NeMo-RL's own environment (uv run … in its checkout); nemo-geomask doctor shows what an environment has"
        ) from error


def accepts_python(required: str, python: str) -> bool:
    """Return True if ``requires-python`` allows a version of Python.

    Raises:
        ImportError: ``packaging`` is not installed.
        ValueError: one of the two can't be read.
    """
    specifiers = importlib.import_module("packaging.specifiers")
    # A Python built from a branch calls itself 3.13.5+.
    return bool(specifiers.SpecifierSet(required).contains(python.rstrip("+"), prereleases=True))


def describe_version() -> str:
    """Return ``nemo_rl.__version__`` or ``of unknown version``, followed by the commit if it is known.

    The version number alone is ambiguous: between releases, NeMo-RL's main branch keeps the number of the last release.
    """
    module = importlib.import_module("nemo_rl")
    number = str(getattr(module, "__version__", "of unknown version"))
    path = getattr(module, "__file__", None)
    commit = commit_of(Path(path).parent.parent) if path else None
    return f"{number} (commit {commit[:9]})" if commit else number


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a git checkout, or the one that NeMo-RL's container declares; None if neither is known."""
    try:
        commit = _read_head(checkout / ".git")
    except (OSError, UnicodeDecodeError, InputLimitError):
        commit = os.environ.get(_CONTAINER_COMMIT)
    return commit if re.fullmatch("[0-9a-f]{7,64}", commit or "") else None


def _read_head(git: Path) -> str | None:
    if git.is_file():  # a submodule or a linked work tree, whose git folder is elsewhere
        git = git.parent / read_text(git).removeprefix("gitdir:").strip()
    head = read_text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head
    branch = head.removeprefix("ref:").strip()
    pointer = git / "commondir"
    refs = git / read_text(pointer).strip() if pointer.is_file() else git
    if (refs / branch).is_file():
        return read_text(refs / branch).strip()
    packed_refs = read_text(refs / "packed-refs").splitlines()
    return next((line.split()[0] for line in packed_refs if line.endswith(f" {branch}")), None)
