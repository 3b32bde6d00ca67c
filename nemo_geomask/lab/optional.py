"""Packages of the ``demo`` extra, imported when they are needed."""

from __future__ import annotations

from typing import Any

from nemo_geomask import optional

__all__ = ["require"]


def require(module: str) -> Any:
    """Import ``module``, or say which extra installs it.

    Raises:
        MissingDependencyError: the package, or something that it needs, is not installed.
    """
    return optional.require(module, "the lab needs", "demo")
