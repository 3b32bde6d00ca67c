"""Loss variants for NeMo-RL that measure, correct and mask the gap between sampler and trainer.

``build_loss(config)`` is the one entry: it takes a :class:`LossConfig` or the ``loss_fn:`` mapping of a recipe.
"""

from __future__ import annotations

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import GeomaskError
from nemo_geomask.losses import build_loss

__all__ = ["GeomaskError", "LossConfig", "__version__", "build_loss"]

__version__ = "0.1.0"
