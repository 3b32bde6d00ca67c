"""Peak memory of a call."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(step, given):
    """Return the peak bytes that ``step`` holds beyond the memory in use before it and the gradient that it returns.

    On a CPU this is the resident memory of the process: torch's profiler does not see gradients that our kernels map on
    huge pages. The test is skipped where Linux does not let the process reset its peak.

    Args:
        step: returns a gradient; it runs twice, and its second run is measured.
        given: tensor whose gradient it is; a gradient in its memory is not subtracted.
    """
    step()
    if given.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        try:
            # malloc would otherwise reuse the memory of the first run, and the peak would not show it.
            ctypes.CDLL(None).malloc_trim(0)
            _RESET.write_text("5", encoding="ascii")
        except (OSError, AttributeError):
            pytest.skip("this system does not let a process reset its peak memory")
        before = _resident_bytes("VmRSS")
        gradient = step()
        peak = _resident_bytes("VmHWM")
    return peak - before - (gradient.nbytes if gradient.data_ptr() != given.data_ptr() else 0)


def _resident_bytes(field):
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.M)[1])
