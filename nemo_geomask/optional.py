"""Import of packages that an extra installs, when they are needed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from nemo_geomask.errors import MissingDependencyError

MODULES_OF_EXTRAS = frozenset(
    [
        "hydra",
        "jinja2",
        "matplotlib",
        "numpy",
        "omegaconf",
        "orjson",
        "plotly",
        "pyarrow",
        "rich",
        "scipy",
        "torch",
        "transformers",
        "yaml",
    ]
)
"""Top-level modules of torch and of the packages that the extras ``recipes``, ``diagnose`` and ``demo`` install."""


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
        raise _missing(f"{who_needs} {package}", extra, error) from error


@contextlib.contextmanager
def missing_extra(command: str, extras: str) -> Iterator[None]:
    """Turn the ImportError of a package that an extra installs into the error that names the extras of a command.

    Raises: MissingDependencyError: one of :data:`MODULES_OF_EXTRAS` could not be imported within the context.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        if not extras or isinstance(error, MissingDependencyError) or module not in MODULES_OF_EXTRAS:
            raise
        raise _missing(f"{command} needs {module}", extras, error) from error


def _missing(need: str, extra: str, error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(f'{need}, which could not be imported ({error}); pip install "nemo-geomask[{extra}]"')
