"""What a run costs beside time: memory, kernel launches, host synchronisations, collectives."""

from __future__ import annotations

import contextlib
import ctypes
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collective", "Tally", "extra_memory", "host_syncs", "kernel_launches"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")

# Operations that touch as many elements of their first operand as there are indices, not all of them.
_SPARSE = ("gather", "index", "scatter", "scatter_add", "index_put", "index_select", "nll_loss_forward")
# Operations that write their first operand without reading it, or know it by its shape alone.
_WRITES = ("copy_", "zero_", "fill_", "zeros_like", "new_zeros", "ones_like", "nll_loss_backward")
# Collectives by their name in the dispatcher: ours, which argument this rank hands in, and how often a ring of n ranks
# sends it in its n - 1 steps.
_KINDS: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "allreduce_": ("all-reduce", 0, lambda n: 2 * (n - 1) / n),
    "allgather_": ("all-gather", 1, lambda n: n - 1),
    "_allgather_base_": ("all-gather", 1, lambda n: n - 1),
}


class Collective(NamedTuple):
    """One collective as a rank sees it.

    Attributes:
        group: name of the process group.
        kind: the operation.
        payload: bytes that this rank hands in.
        sent: bytes that this rank sends in a ring: 2(n−1)/n of the payload for an all-reduce, (n−1) times the payload
            for an all-gather.
    """

    group: str
    kind: str
    payload: int
    sent: float


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what passes through torch's dispatcher while it is active, backward passes included.

    It sees its own thread, so torch is held to that one meanwhile.

    Attributes:
        operations: calls that compute or copy; views and bare allocations are not counted.
        operand_bytes: bytes of all operands that these read or write, each operand counted once an operation: what
            crosses memory where no operand stays in a cache.
        collectives: in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.operand_bytes = 0
        self.collectives: list[Collective] = []

    def __enter__(self) -> Tally:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_num_threads(self._threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._collective(func, args)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.operations += 1
            self.operand_bytes += _traffic(name, func, args, kwargs, result)
        return result

    def _collective(self, func: Any, args: Any) -> None:
        name = func._schema.name.split("::")[1]
        # Of others it is known that they were there, and what went in first.
        kind, place, times = _KINDS.get(name, (name, 0, lambda n: math.nan))
        (group,) = [found for value in args if (found := _group(value)) is not None]
        payload = sum(value.nbytes for value in _flat([args[place]]) if isinstance(value, Tensor))
        self.collectives.append(Collective(group.group_name, kind, payload, times(group.size()) * payload))


def _group(value: Any) -> Any:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return torch._C._distributed_c10d.ProcessGroup.unbox(value)
    except RuntimeError:  # another object: the reduction
        return None


def _traffic(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> int:
    outputs = [value for value in _flat([result]) if isinstance(value, Tensor)]
    out = [value for key, value in kwargs.items() if key.startswith("out") and isinstance(value, Tensor)]
    operands = [value for value in _flat(args) if isinstance(value, Tensor)]
    if name.strip("_") in _SPARSE:
        # As many elements as the smallest operand has; read, and written.
        return 2 * min(map(_extent, [*operands, *outputs]))
    if name == "nll_loss_backward":
        operands = operands[:1] + operands[2:]  # the log-probs are there for their shape
    elif name in _WRITES:
        operands = operands[1:]
    return sum(map(_extent, operands)) + sum(map(_extent, out or outputs))


def _extent(tensor: Tensor) -> int:
    """Bytes behind a tensor: an expanded dimension holds nothing."""
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


def extra_memory(run: Callable[[], Tensor], given: Tensor) -> int | None:
    """Peak bytes that ``run`` holds beyond what was there before it and the gradient that it returns.

    On a GPU by the allocator's own count; on a CPU by the peak of the process's resident memory, which Linux lets one
    reset. None where neither can be had.

    Args:
        run: returns the gradient.
        given: the logits; a gradient in their memory is not counted twice.
    """
    if given.device.type == "cuda":
        torch.cuda.synchronize(given.device)
        torch.cuda.reset_peak_memory_stats(given.device)
        before = torch.cuda.memory_allocated(given.device)
        gradient = run()
        torch.cuda.synchronize(given.device)
        peak = torch.cuda.max_memory_allocated(given.device)
    else:
        if not _reset_peak():
            return None
        before = _resident("VmRSS")
        gradient = run()
        peak = _resident("VmHWM")
    own = gradient.data_ptr() != given.data_ptr()
    return peak - before - (gradient.nbytes if own else 0)


def _reset_peak() -> bool:
    if not (_STATUS.exists() and _RESET.exists()):
        return False
    # Memory that malloc keeps for later would otherwise be reused without a trace.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def kernel_launches(run: Callable[[], object]) -> int:
    """Kernels and memory sets that ``run`` puts on the GPU, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events() or []
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Activity Buffer")) for event in on_device)


def host_syncs(run: Callable[[], object]) -> int:
    """How often ``run`` makes the host wait for the GPU, by torch's own warnings."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in found)
