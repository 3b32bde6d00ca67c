"""``loss_fn.compile``: the pass as one graph, where a compiler works and the call repeats."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_geomask.losses.batch import Raw

__all__ = ["EAGER_CALLS", "Compiled", "differentiable", "with_gradient"]

_log = logging.getLogger("nemo_geomask")
EAGER_CALLS = {"cuda": 2}
"""Calls under ``auto`` before the first compilation, by device: a loss that is called once or twice does not earn its
cost. On others it never does: on a CPU a graph takes a minute to compile and saves milliseconds a call."""


def _guarded(guards: Sequence[Any]) -> list[bool]:
    # Of a call only its arguments differ, and torch's own state, which has no name: not what the loss is, nor any code.
    return [not guard.name or guard.name.startswith("args") for guard in guards]


Pass = Callable[..., tuple[Tensor, Tensor]]


def with_gradient(function: Pass, raw: Raw, *rest: Any) -> tuple[Tensor, ...]:
    """Loss, values of the metrics, and the loss's gradient by each of :attr:`Raw.moving`.

    In one graph, forward and backward need keep nothing for each other; the gradient is all that remains of a call.
    Nothing in ``raw`` needs require grad.
    """

    def loss_of(*moving: Tensor) -> tuple[Tensor, Tensor]:
        return function(raw.moved(moving), *rest)

    # In float32 until the trainer has scaled it: in half precision a small gradient would be 0 before.
    found: Any = torch.func.vjp(loss_of, *(value.float() for value in raw.moving), has_aux=True)
    loss, pull, values = found
    return loss, values, *pull(torch.ones_like(loss))


def differentiable(graph: Callable[..., tuple[Tensor, ...]], raw: Raw, *rest: Any) -> tuple[Tensor, Tensor]:
    """What the pass returns, from a graph of :func:`with_gradient`."""
    moving = raw.moving
    with torch.no_grad():
        loss, values, *gradient = graph(raw.moved([value.detach() for value in moving]), *rest)
    return _Known.apply(loss, *gradient, *moving), values  # type: ignore[no-untyped-call]


def _graph(function: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any) -> Any:
        return function(*args)

    # torch counts graphs, and looks for the one that fits, by code object: here each loss has its own.
    traced.__code__ = traced.__code__.replace()
    # A dictionary of its own: torch takes the filter out of the one that it is given.
    known = hasattr(torch.compiler, "skip_guard_on_globals_unsafe")
    options: Any = {"guard_filter_fn": _guarded} if known else None
    return torch.compile(traced, fullgraph=True, dynamic=True, options=options)


class _Known(torch.autograd.Function):
    """A number whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *gradient_and_moving: Tensor) -> Tensor:
        count = len(gradient_and_moving) // 2
        ctx.save_for_backward(*gradient_and_moving[:count])
        ctx.dtypes = [value.dtype for value in gradient_and_moving[count:]]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.saved_tensors
        scaled = ((value * grads[0]).to(dtype) for value, dtype in zip(gradient, ctx.dtypes, strict=True))
        return None, *(None for _ in gradient), *scaled


class Compiled:
    """The pass, compiled once it has been called a few times; itself where no compiler works.

    Args:
        function: traceable as a whole.
        mode: ``auto``, True (compile at the first call, and let a failure be one) or False.
        name: of the loss, for the log.

    Attributes:
        choice: what runs and why, in words, as it is logged once; empty until it is chosen.
    """

    def __init__(self, function: Pass, mode: bool | str, name: str) -> None:
        self.choice = ""
        self._function = function
        self._mode = mode
        self._name = name
        self._gave_up = False
        self._calls = 0
        self._graphs: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, raw: Raw, *rest: Any) -> tuple[Tensor, Tensor]:
        """What the function returns of these arguments."""
        if self._graphs is None:
            if not self._chooses(raw.curr.device):
                return self._function(raw, *rest)
            self._graphs = _graph(self._function), _graph(functools.partial(with_gradient, self._function))
        plain, trains = self._graphs
        moves = torch.is_grad_enabled() and any(value.requires_grad for value in raw.moving)
        # Bounds of a loss don't change; as a graph's inputs each would be a tensor to be made at every call. Not by
        # config.patch, which makes a class at every call.
        config: Any = torch._dynamo.config
        before, config.specialize_float = config.specialize_float, True
        try:
            result = differentiable(trains, raw, *rest) if moves else plain(raw, *rest)
        except Exception as error:
            # The function's own error is raised again by calling it.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
                return self._function(raw, *rest)  # one more kind of batch than torch keeps graphs of
            if self._mode is True:
                raise
            self._gave_up, self._graphs, self.choice = True, None, ""
            self._say(f"not compiled, {type(error).__name__}: {str(error).strip()}")
            return self._function(raw, *rest)
        finally:
            config.specialize_float = before
        self._say("compiled as one graph")
        return result

    def _chooses(self, device: torch.device) -> bool:
        """Whether this call is to be compiled."""
        if self._gave_up or self._mode != "auto":
            return self._mode is True
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
