"""What is counted in NeMo-RL's training workers: calls of losses, refits, and what log-probs and loss cost.

A backward pass is timed by hooks on tensors: it goes from the loss to the current log-probs, and then to the logits.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.hosts.nemo_rl import facts, patch
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.tools.rehearse.weight_sums import forget_sent, local_sums, observe_sends, sent_refits

_applied: list[patch.Patch] = []  # in this process
# Number of calls in this process, by the loss's repr.
_calls: dict[str, int] = {}
_losses = [0.0, 0.0]  # sum of the losses that this process computed, and of their absolute values
LOGPROBS, LOSS = "log-probs", "loss"
_LOGPROB_MODULE = "nemo_rl.algorithms.loss.utils"

# In this process: seconds of each part, without those of a part in it.
_seconds: dict[str, float] = {}
# Largest number of bytes on a GPU: of log-probs and loss beyond what was allocated before, and of all.
_bytes = {LOGPROBS: 0.0, "all": 0.0}
_inner: list[float] = []  # of each part that runs, the seconds of the parts in it
_last = 0.0  # when the last gradient arrived
_allocated = 0.0  # bytes, before the log-probs


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
        ``calls``: number by the loss's repr; ``losses``: their sum, and that of their absolute values; ``seconds`` of
        log-probs and loss, forward and backward; ``bytes``: their peak on a GPU, and that of all; ``refits``: number of
        times that it sent its weights; ``weights``: see :func:`~.weight_sums.local_sums`; ``file``: path of
        nemo_geomask; ``pid``, ``python``, ``host``.
    """
    _wait()
    return {
        "calls": dict(_calls),
        "losses": list(_losses),
        "seconds": dict(_seconds),
        "bytes": dict(_bytes),
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
    utils, namespaces = importlib.import_module(_LOGPROB_MODULE), patch.nemo_rl_namespaces(actor)
    compute_logprobs = functools.partial(measured, LOGPROBS)
    for name in ("prepare_loss_input", "prepare_packed_loss_input"):
        yield patch.function(utils, name, compute_logprobs, namespaces=namespaces)
    for name in ("__call__", "packed"):
        yield patch.attribute(LogitLoss, name, compute_logprobs)
    yield from observe_sends(actor)


def counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a loss, so that calls and their losses are counted."""
    call_loss = measured(LOSS, original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if isinstance(self, PolicyLoss):  # under that name also a subclass, such as the one that keeps log-probs
            name = repr(self).replace(type(self).__name__, PolicyLoss.__name__, 1)
        _calls[name] = _calls.get(name, 0) + 1
        result = call_loss(self, *args, **kwargs)
        value = float(result[0].detach())
        _losses[:] = _losses[0] + value, _losses[1] + abs(value)
        return result

    return call


def measured(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what computes log-probs or the loss, so that its forward and its backward pass are measured."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _allocated
        if _wait() and part == LOGPROBS:
            torch.cuda.reset_peak_memory_stats()
            _allocated = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        _inner.append(0.0)
        try:
            result = original(*args, **kwargs)
        finally:
            _wait()
            elapsed, inner = time.perf_counter() - begin, _inner.pop()
            _seconds[part] = _seconds.get(part, 0.0) + elapsed - inner
            if _inner:
                _inner[-1] += elapsed
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda gradient: _arrived(part))  # type: ignore[no-untyped-call]
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor) and result[0].requires_grad:
            result[0].register_hook(lambda gradient: _arrived(""))  # type: ignore[no-untyped-call]
        return result

    return call


def _arrived(part: str) -> None:
    """Count the time since the last gradient as the part's whose input's gradient is there now."""
    global _last
    if _wait() and part == LOGPROBS:
        _bytes[part] = max(_bytes[part], torch.cuda.max_memory_allocated() - _allocated)
    now = time.perf_counter()
    if part:
        _seconds[part] = _seconds.get(part, 0.0) + now - _last
    _last = now


def _wait() -> bool:
    """Wait for the GPU and keep the peak of its memory; return False if there is none."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    torch.cuda.synchronize()
    _bytes["all"] = max(_bytes["all"], torch.cuda.max_memory_allocated())
    return True
