"""Import of the modules that plugins lie in: from which folders, and whether at all.

A library call imports ``my_losses:MINE`` from ``sys.path`` alone. A command also looks in the current folder, after
everything that is installed, and only once a recipe or an argument names a module that is found nowhere else.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

NOT_IMPORTED = "was not imported, as --no-import asks"
"""Part of the error's message under ``plugin_imports(allowed=False)``."""


class _Policy(NamedTuple):
    folders: tuple[str, ...] = ()
    is_allowed: bool = True


_policies = [_Policy()]


@contextmanager
def plugin_imports(folders: Sequence[str | os.PathLike[str]] = (), *, allowed: bool = True) -> Iterator[None]:
    """Look for plugins in more folders within the context, or import none at all.

    Args:
        folders: searched after ``sys.path``. The first plugin that needs them puts them at its end, where they stay
            until the context ends: the plugin may import its neighbours, and worker processes get the same path.
        allowed: False if only this package's own objects may be imported.
    """
    path = list(sys.path)
    _policies.append(_Policy(tuple(map(os.path.abspath, folders)), allowed))
    try:
        yield
    finally:
        _policies.pop()
        sys.path[:] = [entry for entry in sys.path if entry in path or entry not in map(os.path.abspath, folders)]


def may_import(module: str) -> bool:
    """Return whether the context allows to import a plugin's module."""
    return _policies[-1].is_allowed or module.partition(".")[0] == __name__.partition(".")[0]


def import_plugin_module(module: str) -> ModuleType:
    """Import the module of a plugin.

    Raises: BaseException: whatever the module raises, ``SystemExit`` included.
    """
    policy, package = _policies[-1], module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.path += [folder for folder in policy.folders if folder not in sys.path]
        importlib.invalidate_caches()
    return importlib.import_module(module)
