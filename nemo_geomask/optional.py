"""Packages of an extra, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from nemo_geomask.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, who_needs: str, extra: str) -> Any:
    """Import a module, or say what needs its package and which extra installs it.

    Args:
        module: its dotted name.
        who_needs: such as ``records need``, for the error.
        extra: of this package.

    Raises:
        MissingDependencyError: the package, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f'{who_needs} {package}, which could not be imported ({error}); pip install "nemo-geomask[{extra}]"'
        ) from error
