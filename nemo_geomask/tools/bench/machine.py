"""Description of the machine, the versions and the date of a measurement."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe", "slug"]

_PACKAGES = (
    "nemo-geomask",
    "triton",
    "megatron-core",
    "nemo-rl",
    "transformer-engine",
    "liger-kernel",
    "flash-attn",
    "quack-kernels",
    "fast-llm",
    "verl",
)


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine, the versions, the load and the date as JSON values."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "name": gpu.name if gpu is not None else _processor(),
        "device": device.type,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": gpu.total_memory if gpu is not None else None,
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def slug(machine: dict[str, Any]) -> str:
    """Return the machine's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", str(machine["name"]).lower()).strip("-")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        model_name = re.search(r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), flags=re.M)
        if model_name:
            return model_name[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
