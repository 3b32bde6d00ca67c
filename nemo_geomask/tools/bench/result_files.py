"""JSON files of results, each with a description of the machine, the versions and the date."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import current_limits, parse_text, read_text
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.machine import package_versions, processor_name

__all__ = ["describe_machine", "read_results", "write_result"]

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
_MAX_VALUES = 200_000
"""Number of values that a file of results may have, unless the limit ``nodes`` is higher; a case has about 700."""


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the machine, the versions, the load and the date as JSON values."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "name": gpu.name if gpu is not None else processor_name(),
        "device": device.type,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": gpu.total_memory if gpu is not None else None,
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": package_versions(_PACKAGES),
    }


def write_result(
    folder: Path, benchmark: str, machine: Mapping[str, Any], result: Mapping[str, Any], *, partial: bool = False
) -> Path:
    """Write ``<benchmark>-<machine>-<date>.json`` into a folder; return its path.

    Args:
        folder: the folder, which is made.
        benchmark: name of the benchmark.
        machine: from :func:`describe_machine`, before the benchmark.
        result: its result.
        partial: the result lacks cases that are yet to be measured. It gets the suffix ``.partial``, and the complete
            one takes its place.
    """
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["name"]).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}-{name}-{machine['date']}.json"
    partial_path = path.with_suffix(".json.partial")
    partial_path.write_text(
        to_json({"version": JSON_VERSION, "benchmark": benchmark, "machine": machine, **result}) + "\n",
        encoding="utf-8",
    )
    if partial:
        return partial_path
    partial_path.replace(path)
    return path


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Read the results of ``bench linear`` and ``bench logprobs`` in a folder; each gets the key ``file``, its path.

    Raises:
        ConfigError: the folder does not have exactly one file of each, a file is not such a result, or it exceeds a
            limit of what is read.
    """
    limits = current_limits()
    limits = replace(limits, nodes=max(limits.nodes, _MAX_VALUES))
    results = []
    for name in ("linear", "logprobs"):
        paths = sorted(folder.glob(f"{name}-*.json"))
        if len(paths) != 1:
            raise ConfigError(
                f"--measured {folder}: has {len(paths)} files {name}-*.json, but needs exactly one; write it with "
                f"nemo-geomask bench {name} --out {folder} on the GPU"
            )
        (path,) = paths
        try:
            text = read_text(path, limits)
        except OSError as error:
            raise ConfigError(f"--measured: {path} can't be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--measured: {path} can't be read: {error}") from None
        result = parse_text(json.loads, text, f"--measured: {path}", limits, format_name="JSON")
        if not isinstance(result, dict) or result.get("benchmark") != name:
            raise ConfigError(f"--measured: {path} is not what nemo-geomask bench {name} --out {folder} writes")
        results.append({**result, "file": str(path)})
    return results
