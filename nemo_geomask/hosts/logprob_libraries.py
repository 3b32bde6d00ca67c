"""Log-probs computed by other libraries' kernels, called with the same arguments as ours, for comparison."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ConfigError, DataError, MissingDependencyError, ShapeError
from nemo_geomask.parallel import vocab_parallel_logprobs

LogProbs = Callable[..., Tensor]


def logprob_backend(name: str) -> LogProbs:
    """Return the function that computes log-probs of sharded logits by the named library.

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
        A function of ``(logits, targets, *, group, temperature, vocab_size, ignore_index)``, with the meaning that
        these arguments have in ``vocab_parallel_logprobs``. The other libraries have no temperature, so they get
        float32 logits that were divided by it. They need shards of equal size, and allocate several tensors of the size
        of the logits.

    Raises:
        MissingDependencyError: the library can't be imported.
    """
    return LOGPROB_BACKENDS[name]()


def _mcore() -> LogProbs:
    cross_entropy = _load("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", "mcore")
    state = importlib.import_module("megatron.core.parallel_state")

    def loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # Not every version takes a group as an argument, so the group must be megatron-core's own.
        mcore_group = state.get_tensor_model_parallel_group(check_initialized=False)
        if mcore_group is None or (
            group is not mcore_group and (group is not None or dist.get_world_size(mcore_group) > 1)
        ):
            raise ConfigError(
                "log-prob backend 'mcore' works over megatron-core's own tensor-parallel group: call "
                "parallel_state.initialize_model_parallel(...) and pass its group, or choose the backend 'geomask'"
            )
        losses: Tensor = cross_entropy(logits, targets)
        return losses

    return _as_logprobs(loss)


def _te() -> LogProbs:
    cross_entropy = _load("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy", "te")

    def loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        losses: Tensor = cross_entropy(logits.unsqueeze(0), targets.unsqueeze(0), dist_process_group=group)
        return losses.reshape(targets.shape)

    return _as_logprobs(loss)


LOGPROB_BACKENDS: dict[str, Callable[[], LogProbs]] = {
    "geomask": lambda: vocab_parallel_logprobs,
    "mcore": _mcore,
    "te": _te,
}


def _as_logprobs(loss: Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]) -> LogProbs:
    """Wrap a cross entropy over float32 logits [N, V/TP] and targets [N] into log-probs with our arguments."""

    def compute(
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
        is_counted = targets != ignore_index
        global_columns = width * world if vocab_size is None else vocab_size
        is_stray = is_counted & ((targets < 0) | (targets >= global_columns))
        if bool(is_stray.any()):
            raise DataError(
                f"{int(is_stray.sum())} targets are outside the vocabulary of {global_columns}, the first is "
                f"{int(targets[is_stray][0])}"
            )
        # The division makes a new tensor, which these kernels may overwrite.
        scaled = logits.reshape(-1, width).float() / temperature
        valid = min(max(global_columns - rank * width, 0), width)
        if valid < width:
            is_padding = torch.arange(width, device=logits.device) >= valid
            scaled = scaled.masked_fill(is_padding, torch.finfo(torch.float32).min)
        counted_targets = torch.where(is_counted, targets, 0).reshape(-1)
        logprobs = -loss(scaled, counted_targets, group).reshape(targets.shape)
        return torch.where(is_counted, logprobs, 0.0)

    return compute


def _load(module: str, function: str, name: str) -> Callable[..., Any]:
    try:
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # transformer-engine without its compiled part raises FileNotFoundError or RuntimeError.
        raise MissingDependencyError(
            f"log-prob backend '{name}' needs {module}.{function}, which can't be imported: {error}; install it, or "
            "choose the backend 'geomask'"
        ) from error
    return loaded
