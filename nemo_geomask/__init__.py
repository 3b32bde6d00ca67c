"""Loss variants for NeMo-RL that measure, correct and mask the gap between sampler and trainer.

``build_loss(config)`` is the one entry: it takes a :class:`LossConfig` or the ``loss_fn:`` mapping of a recipe.
``install()`` lets NeMo-RL's trainers build the loss that a recipe names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nemo_geomask import errors
from nemo_geomask.errors import *  # noqa: F403 -- every error, each of which anybody may want to catch

if TYPE_CHECKING:
    from nemo_geomask.config import LossConfig
    from nemo_geomask.hosts.nemo_rl import install, uninstall
    from nemo_geomask.losses import PolicyLoss, PrestepPass, Variant, build_loss
    from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
    from nemo_geomask.parallel.local_processes import RankError
    from nemo_geomask.segments import PackedSegments

__all__ = [
    "LossConfig",
    "PackedSegments",
    "PolicyLoss",
    "PrestepPass",
    "RankError",
    "Variant",
    "__version__",
    "build_loss",
    "install",
    "linear_logprobs",
    "uninstall",
    "vocab_parallel_logprobs",
]
__all__ += errors.__all__

__version__ = "0.1.0"

_HOMES = {
    "LossConfig": "config",
    "PackedSegments": "segments",
    "PolicyLoss": "losses",
    "PrestepPass": "losses",
    "RankError": "parallel.local_processes",
    "Variant": "losses",
    "build_loss": "losses",
    "install": "hosts.nemo_rl",
    "linear_logprobs": "parallel",
    "uninstall": "hosts.nemo_rl",
    "vocab_parallel_logprobs": "parallel",
}


def __getattr__(name: str) -> Any:
    # Imported when used: the log-probs and kernels need torch alone, the losses pydantic, an integration its host.
    if name in _HOMES:
        return getattr(importlib.import_module(f"nemo_geomask.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'nemo_geomask' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
