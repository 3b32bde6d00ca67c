"""Choice of the kernels that run on a tensor of logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nemo_geomask.errors import ArgumentError, MissingDependencyError
from nemo_geomask.kernels import cpu

KERNELS = ("auto", "triton", "torch")


class Kernels(NamedTuple):
    """A set of kernels; :mod:`nemo_geomask.kernels.cpu` documents what each computes.

    Attributes:
        name: ``triton`` or ``torch``.
        reason: why this set was chosen; text for a message.
    """

    name: str
    reason: str
    row_statistics: Callable[..., Tensor]
    fold: Callable[[Tensor, float], Tensor]
    row_gradients: Callable[..., None]
    empty_gradient: Callable[[Tensor], Tensor]


def choose(logits: Tensor, name: str = "auto") -> Kernels:
    """Choose the kernels for ``logits`` by the device that holds them.

    Args:
        logits: any tensor on that device.
        name: ``auto`` chooses Triton on a GPU if Triton can be imported, else plain torch. ``triton`` and ``torch``
            choose that set. Triton on a CPU needs its interpreter (``TRITON_INTERPRET=1``).

    Raises:
        ArgumentError: the name is unknown, or Triton is to run on a CPU without its interpreter.
        MissingDependencyError: ``name`` is ``triton``, which can't be imported.
    """
    if name not in KERNELS:
        raise ArgumentError(f"kernel must be one of {', '.join(KERNELS)}, but it is {name!r}")
    on_gpu = logits.device.type == "cuda"
    reason = f"the logits are on {logits.device.type}" if name == "auto" else f"kernel={name!r} was passed"
    if name == "torch" or (name == "auto" and not on_gpu):
        return _kernels_of("torch", cpu, reason)
    try:
        gpu = importlib.import_module("nemo_geomask.kernels.gpu")
    except ImportError as error:
        if name == "auto":
            return _kernels_of("torch", cpu, f"triton can't be imported ({error})")
        raise MissingDependencyError(f"kernel 'triton' needs triton, which can't be imported: {error}") from error
    if not on_gpu and not gpu.INTERPRETED:
        raise ArgumentError(
            f"kernel 'triton' needs logits on a GPU, but they are on {logits.device.type}; use 'auto', or set "
            "TRITON_INTERPRET=1 to run it in the interpreter"
        )
    return _kernels_of("triton", gpu, reason)


def _kernels_of(name: str, module: Any, reason: str) -> Kernels:
    return Kernels(name, reason, module.row_statistics, module.fold, module.row_gradients, module.empty_gradient)
