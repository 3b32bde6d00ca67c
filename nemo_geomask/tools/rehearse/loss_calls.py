"""Counts of loss calls and refits in each worker, which show which loss trained."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl import facts, patch
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.tools.rehearse import weight_sums

# Number of calls in this process, by the loss's repr.
_calls: dict[str, int] = {}


def count_calls(actor: Any = None) -> None:
    """Start counting refits, and calls of our losses and NeMo-RL's, in this process; a second call does nothing."""
    patch.apply_all(_patches(actor))


def read_counts(actor: Any = None) -> dict[str, Any]:
    """Return the counts of this process, and where it runs.

    Returns:
        ``calls``: number by the loss's repr; ``refits``: number of times that it sent its weights; ``weights``: see
        :func:`~nemo_geomask.tools.rehearse.weight_sums.local_sums`; ``file``: path of nemo_geomask; ``pid``,
        ``python``, ``host``.
    """
    return {
        "calls": dict(_calls),
        "refits": weight_sums.read_sent_sums()["refits"],
        "weights": weight_sums.local_sums(actor),
        "file": importlib.import_module("nemo_geomask").__file__,
        "pid": os.getpid(),
        "python": sys.executable,
        "host": platform.node(),
    }


def seed(actor: Any, number: int) -> None:
    """Seed this process's generator, from which vLLM samples if its engine runs in the process."""
    importlib.import_module("torch").manual_seed(number)


def _patches(actor: Any) -> Iterator[patch.Patch]:
    yield patch.attribute(PolicyLoss, "__call__", _count)
    yield patch.attribute(PolicyLoss, "packed", _count)
    nemo_rl_loss = getattr(importlib.import_module(facts.LOSS_MODULE), facts.LOSS_CLASS, None)
    if nemo_rl_loss is not None:
        yield patch.attribute(nemo_rl_loss, "__call__", _count)
    yield from weight_sums.observe_sends(actor)


def _count(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if isinstance(self, PolicyLoss):  # under that name also a subclass, such as the one that keeps log-probs
            name = repr(self).replace(type(self).__name__, PolicyLoss.__name__, 1)
        _calls[name] = _calls.get(name, 0) + 1
        return original(self, *args, **kwargs)

    return call
