"""Results of the benchmarks: tables of their rows, and JSON files with the machine, the versions and the date."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_geomask.tools.shared.atomic_write import write_atomically
from nemo_geomask.tools.shared.json_output import JSON_VERSION, to_json
from nemo_geomask.tools.shared.machine import package_versions, processor_name
from nemo_geomask.tools.shared.terminal_tables import ABSENT, format_table

Row = Mapping[str, Any]
"""The entry of one path or loss in the JSON of a benchmark."""
Column = tuple[str, Callable[[Row], str]]
"""Heading of a column, and the function from a row to the text of its cell."""

_PACKAGES = (
    "nemo-geomask",
    "triton",
    "megatron-core",
    "nemo-rl",
    "transformer-engine",
    "liger-kernel",
    "flash-attn",
    "fast-llm",
    "verl",
)


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


def write_result(folder: Path, benchmark: str, machine: Row, result: Row) -> Path:
    """Write ``<benchmark>-<machine>-<date>.json`` into a folder, which is made; return its path."""
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["name"]).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}-{name}-{machine['date']}.json"
    content = {"version": JSON_VERSION, "benchmark": benchmark, "machine": machine, **result}
    write_atomically(path, to_json(content) + "\n")
    return path


def format_number(value: float) -> str:
    """Format a number with three digits, and one of 100 or more without decimals."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(head: str, *keys: str, scale: float = 1.0, form: str | None = None) -> Column:
    """Return a column of the number at nested keys, divided by ``scale``; a dash where it is missing."""

    def cell(row: Row) -> str:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return ABSENT
        return format_number(value / scale) if form is None else form.format(value)

    return head, cell


def spread(head: str, key: str) -> Column:
    """Return a column of times with their quartiles."""
    return head, lambda row: "{} ({}–{})".format(*(format_number(row[key][part]) for part in ("median", "q1", "q3")))


PATH: Column = ("path", lambda row: row["path"])
TIMES: tuple[Column, ...] = (
    spread("ms (quartiles)", "ms"),
    figure("CPU ms", "processor_ms", "median"),
    figure("forward", "forward_ms", "median"),
    figure("backward", "backward_ms", "median"),
)


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that were measured."""
    return [row for row in rows if row["status"] == "measured"]


def cells(columns: Sequence[Column], rows: Iterable[Row]) -> list[list[str]]:
    """Return the texts of a table's cells, row by row."""
    return [[cell(row) for _, cell in columns] for row in rows]


def format_rows(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return the table of the measured rows under its title, and a line for each row or meter that failed."""

    def name(row: Row) -> str:
        return ", ".join(str(row[key]) for key in ("path", "way", "loss", "how") if key in row)

    lines = [title, format_table([head for head, _ in columns], cells(columns, measured(rows)))]
    lines += [f"  {name(row)}: {row['status']}: {row['reason']}" for row in rows if "reason" in row]
    lines += [f"  {name(row)}: not metered: {row['meters']}" for row in rows if "meters" in row]
    return "\n".join([*lines, ""])
