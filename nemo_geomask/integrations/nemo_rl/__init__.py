"""NeMo-RL: the trainers build the loss that a recipe's ``loss_fn.name`` selects, and its workers can open it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.integrations.nemo_rl.dispatch import install, installed, uninstall
    from nemo_geomask.integrations.nemo_rl.source import SeamError
    from nemo_geomask.integrations.nemo_rl.worker import prepare as prepare_worker
    from nemo_geomask.integrations.nemo_rl.workers import WorkerError

__all__ = ["SeamError", "WorkerError", "install", "installed", "prepare_worker", "uninstall"]

_HOMES = {
    "SeamError": ("source", "SeamError"),
    "WorkerError": ("workers", "WorkerError"),
    "install": ("dispatch", "install"),
    "installed": ("dispatch", "installed"),
    "prepare_worker": ("worker", "prepare"),
    "uninstall": ("dispatch", "uninstall"),
}


def __getattr__(name: str) -> Any:
    # Imported when used: a patch is made in processes, and at moments, that have no losses.
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
