"""Meters of a run's memory, kernel launches, host synchronisations, operations and collectives.

They use torch's profiler and its synchronisation warnings where these suffice. ``DispatchCounter`` exists because
torch's ``CommDebugMode`` counts collectives, but not their bytes by process group. Memory on a CPU is the process's
resident memory, because torch's profiler does not see the memory that our kernels map on huge pages for gradients.
"""

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

__all__ = ["Collective", "DispatchCounter", "count_host_syncs", "count_kernel_launches", "extra_memory", "peak_memory"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")

# Collectives by their name in the dispatcher: the name in the results, the position of the argument that holds this
# rank's data, and how many times that data is sent by a rank in a ring of n ranks.
_COLLECTIVES: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "allreduce_": ("all-reduce", 0, lambda n: 2 * (n - 1) / n),
    "allgather_": ("all-gather", 1, lambda n: n - 1),
    "_allgather_base_": ("all-gather", 1, lambda n: n - 1),
}


class Collective(NamedTuple):
    """One call of a collective on this rank.

    Attributes:
        group: name of the process group.
        operation: name of the operation, such as ``all-reduce``.
        payload: bytes that this rank contributes.
        sent: bytes that this rank sends in a ring: 2(n−1)/n of the payload for an all-reduce, (n−1) times the payload
            for an all-gather.
    """

    group: str
    operation: str
    payload: int
    sent: float


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts operations and collectives, backward passes included.

    A dispatch mode is active only in the thread that entered it, so torch is restricted to one thread meanwhile.

    Attributes:
        operations: number of calls that compute or copy; views and bare allocations are not counted.
        collectives: the collectives, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.collectives: list[Collective] = []

    def __enter__(self) -> DispatchCounter:
        self._previous_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_num_threads(self._previous_threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._add_collective(func, args)
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.operations += 1
        return func(*args, **kwargs)

    def _add_collective(self, func: Any, args: Any) -> None:
        name = func._schema.name.split("::")[1]
        # The bytes that a collective sends are unknown if it is not listed.
        operation, position, times = _COLLECTIVES.get(name, (name, 0, lambda n: math.nan))
        (group,) = [group for value in args if (group := _process_group(value)) is not None]
        payload = sum(value.nbytes for value in _flat([args[position]]) if isinstance(value, Tensor))
        self.collectives.append(Collective(group.group_name, operation, payload, times(group.size()) * payload))


def _process_group(value: Any) -> Any:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return torch._C._distributed_c10d.ProcessGroup.unbox(value)
    except RuntimeError:  # another object, such as the reduction
        return None


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of ``run`` in bytes, beyond the memory in use before it.

    On a GPU it is counted by torch's allocator. On a CPU it follows from the peak of the process's resident memory,
    which a process can reset on Linux; where it can't, ``run`` is not called and the result is None.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _reset_peak():
        return None
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def extra_memory(run: Callable[[], Tensor], logits: Tensor) -> int | None:
    """Return the peak memory of ``run`` in bytes, without the memory in use before it and the returned gradient.

    None where :func:`peak_memory` returns None.

    Args:
        run: function that returns a gradient.
        logits: tensor that the gradient is of; if the gradient uses its memory, nothing is subtracted.
    """
    gradients: list[Tensor] = []
    peak = peak_memory(lambda: gradients.append(run()), logits.device)
    if peak is None:
        return None
    has_own_memory = gradients[0].data_ptr() != logits.data_ptr()
    return peak - (gradients[0].nbytes if has_own_memory else 0)


def _reset_peak() -> bool:
    if not (_STATUS.exists() and _RESET.exists()):
        return False
    # Otherwise malloc could reuse memory that it has kept, and the peak would not show it.
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


def count_kernel_launches(run: Callable[[], object]) -> int:
    """Count the kernels and memory sets that ``run`` launches on the GPU, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events() or []
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Activity Buffer")) for event in on_device)


def count_host_syncs(run: Callable[[], object]) -> int:
    """Count the operations of ``run`` that make the host wait for the GPU, by the warnings that torch gives."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
