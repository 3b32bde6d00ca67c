"""Loss variants for NeMo-RL that measure, correct and mask the gap between sampler and trainer.

``build_loss(config)`` is the one entry: it takes a :class:`LossConfig` or the ``loss_fn:`` mapping of a recipe.
``install()`` lets NeMo-RL's trainers build the loss that a recipe names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nemo_geomask.errors import GeomaskError

if TYPE_CHECKING:
    from nemo_geomask.config import LossConfig
    from nemo_geomask.integrations.nemo_rl import install, uninstall
    from nemo_geomask.losses import build_loss

__all__ = ["GeomaskError", "LossConfig", "__version__", "build_loss", "install", "uninstall"]

__version__ = "0.1.0"

_HOMES = {
    "LossConfig": "nemo_geomask.config",
    "build_loss": "nemo_geomask.losses",
    "install": "nemo_geomask.integrations.nemo_rl",
    "uninstall": "nemo_geomask.integrations.nemo_rl",
}


def __getattr__(name: str) -> Any:
    # Imported when used: the log-probs and kernels need torch alone, the losses pydantic, an integration its host.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'nemo_geomask' has no attribute '{name}'")
