"""Errors about the installed NeMo-RL and about its workers."""

from __future__ import annotations

from nemo_geomask.errors import GeomaskError

__all__ = ["HostAPIError", "WorkerError"]


class HostAPIError(GeomaskError, RuntimeError):
    """The installed NeMo-RL differs from the tested versions in an API that this package relies on."""


class WorkerError(GeomaskError, RuntimeError):
    """A worker that is to receive the loss cannot load it, or is not prepared for it."""
