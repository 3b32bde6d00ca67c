"""Memory, kernel launches, host synchronisations and operations of a run, each measured in a run of its own.

They use torch's profiler and its synchronisation warnings where these suffice. Memory on a CPU is the process's
resident memory, because torch's profiler does not see the memory that our kernels map on huge pages for gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_geomask.tools.bench.timing import describe_error

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def metered(meter: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the meter's figures, or its error as ``meters``: a peer that fails under a meter keeps its times."""
    try:
        return meter()
    except Exception as error:
        return {"meters": describe_error(error)}


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
    try:
        # Otherwise malloc could reuse memory that it has kept, and the peak would not show it.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return None
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def extra_memory(run: Callable[[], Tensor], operand: Tensor) -> int | None:
    """Return the peak memory of ``run`` in bytes, without the memory in use before it and the returned gradient.

    None where :func:`peak_memory` returns None.

    Args:
        run: function that returns a gradient.
        operand: tensor that the gradient is of; if the gradient uses its memory, nothing is subtracted.
    """
    gradients: list[Tensor] = []
    peak = peak_memory(lambda: gradients.append(run()), operand.device)
    if peak is None:
        return None
    return peak - (gradients[0].nbytes if gradients[0].data_ptr() != operand.data_ptr() else 0)


def _resident(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def count_work(run: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Return the ``launches`` of a run, on a CPU its operations, and on a GPU its ``host_syncs``."""
    if device.type == "cuda":
        return {"launches": _count_kernel_launches(run), "host_syncs": count_host_syncs(run)}
    counter = _OperationCounter()  # type: ignore[no-untyped-call]
    with one_thread(), counter:
        run()
    return {"launches": counter.operations}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to this thread, the only one in which a dispatch mode that was entered here is active."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the calls that compute or copy, backward passes included; not views and bare allocations."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.operations += 1
        return func(*args, **(kwargs or {}))


def _count_kernel_launches(run: Callable[[], object]) -> int:
    """Count the kernels and memory sets that ``run`` launches on the GPU, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() or [] if event.device_type == DeviceType.CUDA]
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
