"""What is counted in NeMo-RL's training workers: calls of losses, the losses themselves, and refits."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.hosts.nemo_rl import facts, patch
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.tools.rehearse.weight_sums import forget_sent, local_sums, observe_sends, sent_refits

_applied: list[patch.Patch] = []  # in this process
# Number of calls in this process, by the loss's repr.
_calls: dict[str, int] = {}
_losses = [0.0, 0.0]  # sum of the losses that this process computed, and of their absolute values


def count_calls(actor: Any = None) -> None:
    """Start counting refits, and calls of our losses and NeMo-RL's, in this process; a second call does nothing."""
    if not _applied:
        _applied.extend(_patches(actor))
        patch.apply_all(_applied)


def stop_counting(actor: Any = None) -> None:
    """Undo what :func:`count_calls` has changed in this process."""
    while _applied:
        _applied.pop().undo()
    forget_sent()


def read_counts(actor: Any = None) -> dict[str, Any]:
    """Return the counts of this process, and where it runs.

    Returns:
        ``calls``: number by the loss's repr; ``losses``: their sum, and that of their absolute values; ``refits``:
        number of times that it sent its weights; ``weights``: see :func:`~.weight_sums.local_sums`; ``file``: path of
        nemo_geomask; ``pid``, ``python``, ``host``.
    """
    return {
        "calls": dict(_calls),
        "losses": list(_losses),
        "refits": sent_refits(),
        "weights": local_sums(actor),
        "file": importlib.import_module("nemo_geomask").__file__,
        "pid": os.getpid(),
        "python": sys.executable,
        "host": platform.node(),
    }


def seed(actor: Any, number: int) -> None:
    """Seed this process's generator, from which vLLM samples if its engine runs in the process."""
    torch.manual_seed(number)


def _patches(actor: Any) -> Iterator[patch.Patch]:
    yield patch.attribute(PolicyLoss, "__call__", counted)
    yield patch.attribute(PolicyLoss, "packed", counted)
    nemo_rl_loss = getattr(importlib.import_module(facts.LOSS_MODULE), facts.LOSS_CLASS, None)
    if nemo_rl_loss is not None:
        yield patch.attribute(nemo_rl_loss, "__call__", counted)
    yield from observe_sends(actor)


def counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a loss, so that calls and their losses are counted."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if isinstance(self, PolicyLoss):  # under that name also a subclass, such as the one that keeps log-probs
            name = repr(self).replace(type(self).__name__, PolicyLoss.__name__, 1)
        _calls[name] = _calls.get(name, 0) + 1
        result = original(self, *args, **kwargs)
        value = float(result[0].detach())
        _losses[:] = _losses[0] + value, _losses[1] + abs(value)
        return result

    return call
