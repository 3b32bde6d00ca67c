"""Import of packages that an extra installs, when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from nemo_geomask.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, who_needs: str, extra: str) -> Any:
    """Import and return a module, or raise an error that names the extra which installs it.

    Args:
        module: dotted name.
        who_needs: subject and verb of the error's message, such as ``records need``.
        extra: name of the extra of this package.

    Raises:
        MissingDependencyError: the module's package, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f'{who_needs} {package}, which could not be imported ({error}); pip install "nemo-geomask[{extra}]"'
        ) from error
