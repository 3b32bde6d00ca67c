"""Which kernels run on given logits, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nemo_geomask.errors import ArgumentError, MissingDependencyError
from nemo_geomask.kernels import cpu

__all__ = ["KERNELS", "Kernels", "choose"]

KERNELS = ("auto", "triton", "torch")


class Kernels(NamedTuple):
    """A set of kernels with the same meaning, see :mod:`nemo_geomask.kernels.cpu` for what each computes.

    Attributes:
        name: ``triton`` or ``torch``.
        reason: why this one, in words.
    """

    name: str
    reason: str
    row_statistics: Callable[..., Tensor]
    fold: Callable[[Tensor, float], Tensor]
    row_gradients: Callable[..., None]
    empty_gradient: Callable[[Tensor], Tensor]


def choose(logits: Tensor, name: str = "auto") -> Kernels:
    """The kernels for ``logits``.

    Args:
        logits: where they are decides.
        name: ``auto``: Triton on a GPU where it is importable, else plain torch in blocks of rows. ``triton`` or
            ``torch``: that one. Triton on a CPU needs its interpreter (``TRITON_INTERPRET=1``).

    Raises: ArgumentError: an unknown name, or Triton on a CPU without its interpreter. MissingDependencyError: Triton
    was asked for and can't be imported.
    """
    if name not in KERNELS:
        raise ArgumentError(f"kernel must be one of {', '.join(KERNELS)}, but it is {name!r}")
    on_gpu = logits.device.type == "cuda"
    why = f"the logits are on {logits.device.type}" if name == "auto" else "asked for"
    if name == "torch" or (name == "auto" and not on_gpu):
        return _of("torch", cpu, why)
    try:
        gpu = importlib.import_module("nemo_geomask.kernels.gpu")
    except ImportError as error:
        if name == "auto":
            return _of("torch", cpu, f"triton can't be imported ({error})")
        raise MissingDependencyError(f"kernel 'triton' needs triton, which can't be imported: {error}") from error
    if not on_gpu and not gpu.INTERPRETED:
        raise ArgumentError(
            f"kernel 'triton' needs logits on a GPU, but they are on {logits.device.type}; use 'auto', or set "
            "TRITON_INTERPRET=1 to run it in the interpreter"
        )
    return _of("triton", gpu, why)


def _of(name: str, module: Any, reason: str) -> Kernels:
    return Kernels(name, reason, module.row_statistics, module.fold, module.row_gradients, module.empty_gradient)
