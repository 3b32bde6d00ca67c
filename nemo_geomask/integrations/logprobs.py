"""Log-probs by other libraries' kernels, behind the arguments of our own, so that users can compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.config import nearest
from nemo_geomask.errors import ConfigError, DataError, MissingDependencyError, ShapeError
from nemo_geomask.parallel import vocab_parallel_logprobs

__all__ = ["LOGPROB_BACKENDS", "logprob_backend"]

LogProbs = Callable[..., Tensor]


def logprob_backend(name: str) -> LogProbs:
    """The function that computes log-probs of sharded logits under this name.

    ============ =======================================================================================
    name         what runs
    ============ =======================================================================================
    ``geomask``  :func:`nemo_geomask.parallel.vocab_parallel_logprobs`
    ``mcore``    megatron-core's ``vocab_parallel_cross_entropy``, negated
    ``te``       transformer-engine's ``parallel_cross_entropy``, negated
    ============ =======================================================================================

    Args:
        name: one of these. The library is imported here, so that a missing one is an error before training.

    Returns:
        A function of ``(logits, targets, *, group, temperature, vocab_size, ignore_index)`` with the meaning that
        ``vocab_parallel_logprobs`` gives them. The other libraries' get the logits in float32, divided by the
        temperature, since they know none; they need equal shards and hold several tensors of the logits' size.

    Raises:
        ConfigError: an unknown name.
        MissingDependencyError: the library can't be imported.
    """
    if name not in LOGPROB_BACKENDS:
        guess = nearest(name, LOGPROB_BACKENDS)
        hint = f"; did you mean '{guess}'?" if guess else ""
        raise ConfigError(f"log-prob backend '{name}' is unknown{hint} Known: {', '.join(LOGPROB_BACKENDS)}")
    return LOGPROB_BACKENDS[name]()


def _geomask() -> LogProbs:
    return vocab_parallel_logprobs


def _mcore() -> LogProbs:
    cross_entropy = _load("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", "mcore")
    state = importlib.import_module("megatron.core.parallel_state")

    def loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # Not every version takes a group; all know their own.
        own = state.get_tensor_model_parallel_group(check_initialized=False)
        if own is None or (own is not group and (group is not None or dist.get_world_size(own) > 1)):
            raise ConfigError(
                "log-prob backend 'mcore' works over megatron-core's own tensor-parallel group: call "
                "parallel_state.initialize_model_parallel(...) and pass its group, or choose the backend 'geomask'"
            )
        result: Tensor = cross_entropy(logits, targets)
        return result

    return _negated(loss)


def _te() -> LogProbs:
    cross_entropy = _load("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy", "te")

    def loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        result: Tensor = cross_entropy(logits.unsqueeze(0), targets.unsqueeze(0), dist_process_group=group)
        return result.reshape(targets.shape)

    return _negated(loss)


LOGPROB_BACKENDS: dict[str, Callable[[], LogProbs]] = {"geomask": _geomask, "mcore": _mcore, "te": _te}


def _negated(loss: Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]) -> LogProbs:
    """A cross entropy over float32 logits [N, V/TP] and targets [N] as log-probs with our arguments."""

    def logprobs(
        logits: Tensor,
        targets: Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        if logits.shape[:-1] != targets.shape:
            raise ShapeError(
                f"logits must be [..., V/TP] and targets [...], but they are {list(logits.shape)} and "
                f"{list(targets.shape)}"
            )
        width = logits.shape[-1]
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        counted = targets != ignore_index
        whole = width * world if vocab_size is None else vocab_size
        wrong = counted & ((targets < 0) | (targets >= whole))
        if bool(wrong.any()):
            raise DataError(
                f"{int(wrong.sum())} targets are outside the vocabulary of {whole}, the first is "
                f"{int(targets[wrong][0])}"
            )
        # A tensor of its own: these kernels write into what they are given.
        scaled = logits.reshape(-1, width).float() / temperature
        valid = min(max(whole - rank * width, 0), width)
        if valid < width:
            beyond = torch.arange(width, device=logits.device) >= valid
            scaled = scaled.masked_fill(beyond, torch.finfo(torch.float32).min)
        goals = torch.where(counted, targets, 0).reshape(-1)
        result = -loss(scaled, goals, group).reshape(targets.shape)
        return torch.where(counted, result, 0.0)

    return logprobs


def _load(module: str, function: str, name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # transformer-engine without its compiled part raises FileNotFoundError or RuntimeError.
        raise MissingDependencyError(
            f"log-prob backend '{name}' needs {module}.{function}, which can't be imported: {error}; install it, or "
            "choose the backend 'geomask'"
        ) from error
    return found
