"""Errors that speak to the user.

One base class; each subclass is also the built-in that fits, so ``except ValueError`` keeps working. All of
them carry a single message and can be pickled, since they cross process boundaries in Ray.
"""

from __future__ import annotations

__all__ = [
    "BatchVetoError",
    "ConfigError",
    "DataError",
    "GeomaskError",
    "MissingDependencyError",
    "NonFiniteError",
    "PluginError",
    "ShapeError",
]


class GeomaskError(Exception):
    """Base class of every error raised by nemo_geomask."""

    def __str__(self) -> str:
        # KeyError would print its message in quotes.
        return str(self.args[0]) if self.args else ""


class ConfigError(GeomaskError, ValueError):
    """A setting is unknown, out of range, or at odds with another setting."""


class DataError(GeomaskError, KeyError):
    """The batch lacks a tensor that the configured loss needs."""


class ShapeError(GeomaskError, ValueError):
    """A tensor's shape or dtype is not the one that the loss is defined on."""


class NonFiniteError(GeomaskError, ArithmeticError):
    """A log-prob at a trained token is NaN or infinite, and ``nonfinite: raise`` was chosen."""


class BatchVetoError(GeomaskError, RuntimeError):
    """More batches in a row than allowed were vetoed: the engines have come apart."""


class PluginError(GeomaskError, LookupError):
    """A loss variant can't be found, is defined twice, fails to import or has the wrong type."""


class MissingDependencyError(GeomaskError, ImportError):
    """An optional package is needed for what was asked; the message says which extra installs it."""
