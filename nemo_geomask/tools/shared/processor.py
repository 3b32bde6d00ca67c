"""The name of this machine's processor, which results are recorded with."""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["processor_name"]


def processor_name() -> str:
    """Return the processor's model name, or its architecture where the system does not tell the model."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        model_name = re.search(r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), flags=re.M)
        if model_name:
            return model_name[1].strip()
    return platform.processor() or platform.machine()
