"""Which loss trained, by the word of the workers: each counts the calls of losses in its own process."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.integrations.nemo_rl import patch, seams, source
from nemo_geomask.losses import PolicyLoss

__all__ = ["count_calls", "counted", "seed"]

# Of this process, by the loss's own description.
_calls: dict[str, int] = {}


def count_calls(actor: Any = None) -> None:
    """Count from now on, in this process, the calls of our losses and of NeMo-RL's own; again does nothing.

    Args:
        actor: the Ray actor in whose process this runs; not used.
    """
    patch.apply_all(_patches())


def counted(actor: Any = None) -> dict[str, Any]:
    """What was called here.

    Args:
        actor: the Ray actor in whose process this runs; not used.

    Returns:
        ``calls``: number by description; ``file``: where nemo_geomask was imported from; ``pid``, ``python``, ``host``.
    """
    return {
        "calls": dict(_calls),
        "file": importlib.import_module("nemo_geomask").__file__,
        "pid": os.getpid(),
        "python": sys.executable,
        "host": platform.node(),
    }


def seed(actor: Any, number: int) -> None:
    """Seed this process's generator, from which vLLM draws where its engine is in the process.

    Args:
        actor: the Ray actor in whose process this runs; not used.
        number: the seed.
    """
    importlib.import_module("torch").manual_seed(number)


def _patches() -> Iterator[patch.Patch]:
    yield patch.attribute(PolicyLoss, "__call__", _counting)
    yield patch.attribute(PolicyLoss, "packed", _counting)
    theirs = getattr(importlib.import_module(seams.LOSS_MODULE), source.LOSS_CLASS, None)
    if theirs is not None:
        yield patch.attribute(theirs, "__call__", _counting)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = repr(self) if isinstance(self, PolicyLoss) else f"{type(self).__module__}.{type(self).__qualname__}"
        _calls[name] = _calls.get(name, 0) + 1
        return original(self, *args, **kwargs)

    return call
