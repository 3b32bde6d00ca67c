"""Bytes of the operands of a run's operations, by which the models of the peers' memory traffic are checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that touch only as many elements of their first operand as there are indices.
_SPARSE = ("gather", "index", "scatter", "scatter_add", "index_put", "index_select", "nll_loss_forward")
# Operations that write their first operand without reading it, or use only its shape.
_WRITES = ("copy_", "zero_", "fill_", "zeros_like", "new_zeros", "ones_like", "nll_loss_backward")


class OperandBytes(TorchDispatchMode):
    """Dispatch mode that adds up the bytes that operations read or write, backward passes included.

    Each operand counts once for an operation. This is the memory traffic if no operand stays in a cache. A dispatch
    mode is active only in the thread that entered it, so torch is restricted to one thread meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __enter__(self) -> OperandBytes:
        self._previous_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_num_threads(self._previous_threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.bytes += _operand_bytes(name, args, kwargs, result)
        return result


def _operand_bytes(name: str, args: Any, kwargs: Any, result: Any) -> int:
    outputs = [value for value in _flat([result]) if isinstance(value, Tensor)]
    out = [value for key, value in kwargs.items() if key.startswith("out") and isinstance(value, Tensor)]
    operands = [value for value in _flat(args) if isinstance(value, Tensor)]
    if name.strip("_") in _SPARSE:
        # The operation reads and writes as many elements as its smallest operand has.
        return 2 * min(map(_stored_bytes, [*operands, *outputs]))
    if name == "nll_loss_backward":
        operands = operands[:1] + operands[2:]  # of the log-probs, only the shape is used
    elif name in _WRITES:
        operands = operands[1:]
    return sum(map(_stored_bytes, operands)) + sum(map(_stored_bytes, out or outputs))


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor occupies; an expanded dimension occupies none."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
