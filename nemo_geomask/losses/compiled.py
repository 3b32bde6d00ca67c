"""``loss_fn.compile``: the pass as one graph, where a compiler works and the call repeats."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["EAGER_CALLS", "Compiled"]

_log = logging.getLogger("nemo_geomask")
EAGER_CALLS = {"cuda": 2}
"""Calls under ``auto`` before the first compilation, by device: a loss that is called once or twice does not earn its
cost. On others it never does: on a CPU a graph takes a minute to compile and saves milliseconds a call."""
# Whether the package's own functions are still the same is not looked at again at each call, where torch allows it.
_SKIP = getattr(torch.compiler, "skip_guard_on_globals_unsafe", None)
_OPTIONS = None if _SKIP is None else {"guard_filter_fn": _SKIP}


class Compiled:
    """A function, compiled once it has been called a few times; itself where no compiler works.

    Args:
        function: traceable as a whole.
        mode: ``auto``, True (compile at the first call, and let a failure be one) or False.
        name: of the loss, for the log.

    Attributes:
        choice: what runs and why, in words, as it is logged once; empty until it is chosen.
    """

    def __init__(self, function: Callable[..., Any], mode: bool | str, name: str) -> None:
        self.choice = ""
        self._function = function
        self._mode = mode
        self._name = name
        self._calls = 0
        self._graph: Callable[..., Any] | None = None
        self._settings: Any = None

    def __call__(self, device: torch.device, *args: Any) -> Any:
        """What the function returns of ``args``.

        Args:
            device: where its tensors are.
            args: positional arguments.
        """
        if self._graph is None and not self._chooses(device):
            return self._function(*args)
        if self._graph is None:
            self._graph = torch.compile(self._function, fullgraph=True, dynamic=True, options=_OPTIONS)
            # Bounds of a loss don't change, and as a graph's inputs each is a tensor to be made at every call.
            self._settings = torch._dynamo.config.patch(specialize_float=True)
        try:
            with self._settings:
                result = self._graph(*args)
        except Exception as error:
            # The function's own error is raised again by calling it.
            if self._mode is True or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self._mode, self._graph = False, None
            self._say(f"not compiled, {type(error).__name__}: {str(error).strip()}")
            return self._function(*args)
        self._say("compiled as one graph")
        return result

    def _chooses(self, device: torch.device) -> bool:
        """Whether this call is to be compiled."""
        if self._mode != "auto":
            return bool(self._mode)
        eager = EAGER_CALLS.get(device.type)
        if eager is None:
            self._say(f"not compiled, which on a {device.type} takes longer than it saves; true compiles it")
            return False
        self._calls += 1
        return self._calls > eager

    def _say(self, choice: str) -> None:
        if not self.choice:
            _log.info("loss_fn.compile, loss '%s': %s", self._name, choice)
        self.choice = self.choice or choice

    def __reduce__(self) -> tuple[Any, ...]:
        # Where it arrives, another machine may have no compiler.
        return Compiled, (self._function, self._mode, self._name)
