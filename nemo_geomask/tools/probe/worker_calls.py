"""Calls of functions in the processes of NeMo-RL's workers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

__all__ = ["call", "call_all"]

_RAY_TIMEOUT = 3600.0  # seconds


def call(worker: Any, function: Any, *args: Any) -> Any:
    """Call a function in a worker's process, with the worker as its first argument."""
    return call_all([worker], function, *args)[0]


def call_all(workers: Sequence[Any], function: Any, *args: Any) -> list[Any]:
    """Call a function in the processes of all workers at once, with each worker as its first argument."""
    calls = [worker.__ray_call__.remote(function, *args) for worker in workers]
    return list(importlib.import_module("ray").get(calls, timeout=_RAY_TIMEOUT))
