"""Packages of the ``demo`` extra, imported when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType

from nemo_geomask.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str) -> ModuleType:
    """Import ``module``, or say which extra installs it.

    Raises:
        MissingDependencyError: the package, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f'the lab needs {package}, which could not be imported ({error}); pip install "nemo-geomask[demo]"'
        ) from error
