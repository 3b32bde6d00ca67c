"""The machine and the versions of packages that results are recorded with."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def processor_name() -> str:
    """Return the processor's model name, or its architecture where the system does not tell the model."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        model_name = re.search(r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), flags=re.M)
        if model_name:
            return model_name[1].strip()
    return platform.processor() or platform.machine()


def device_names() -> list[str]:
    """Return the names of this machine's GPUs, or that of its processor if it has none."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or [processor_name()]


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
