"""Deprecated names of the modules in :mod:`nemo_geomask.hosts`; each use warns and names the new module."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

_RENAMED = {
    "logprobs": "nemo_geomask.hosts.logprob_libraries",
    "megatron": "nemo_geomask.hosts.megatron",
    "nemo_rl": "nemo_geomask.hosts.nemo_rl",
    "vllm": "nemo_geomask.hosts.vllm",
}


class _Renamed(types.ModuleType):
    """A module under its old name; its attributes are those of the new one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        target = _RENAMED[self.__name__.rpartition(".")[2]]
        warnings.warn(f"{self.__name__} is now called {target}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(target), name)


for _name in _RENAMED:
    # The import system finds submodules here before it looks for files.
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Renamed(f"{__name__}.{_name}")
