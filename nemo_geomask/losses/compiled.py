"""``loss_fn.compile``: compile the pass over a microbatch if that saves time and a compiler works."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_geomask.losses.raw_batch import RawBatch

_log = logging.getLogger("nemo_geomask")
EAGER_CALLS = {"cuda": 2}
"""Number of eager calls before ``auto`` compiles, by device type; on other devices ``auto`` never compiles.

Compiling a loss that is called once or twice takes longer than it saves. On a CPU this holds for every loss: compiling
takes a minute and saves milliseconds a call."""

# torch keeps a limited number of graphs of a function. Without isolation, all losses of a process share that number,
# and with them everything else that compiles a functools.partial. Older versions of torch have no isolation.
_SETTINGS: dict[str, Any] = {"fullgraph": True, "dynamic": True}
if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
    _SETTINGS["isolate_recompiles"] = True

Pass = Callable[..., tuple[Tensor, Tensor]]
"""Function of a :class:`RawBatch` and further arguments that returns the loss and the values of the metrics."""


def loss_and_gradient(function: Pass, raw: RawBatch, *args: Any) -> tuple[Tensor, ...]:
    """Return the loss, the metrics, and the gradient of the loss by each of :attr:`RawBatch.differentiable_inputs`.

    The forward and the backward pass form one graph, so no activations are stored, and only the gradient is kept after
    the call. No tensor in ``raw`` may require grad.
    """

    def loss_of(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return function(raw.with_differentiable_inputs(inputs), *args)

    # The gradient stays in float32 until the incoming gradient has scaled it, since half precision would turn small
    # values into 0.
    inputs = [value.float() for value in raw.differentiable_inputs]
    loss, vjp, metrics = torch.func.vjp(loss_of, *inputs, has_aux=True)  # type: ignore[misc]
    return loss, metrics, *vjp(torch.ones_like(loss))


def attach_gradient(graph: Callable[..., tuple[Tensor, ...]], raw: RawBatch, *args: Any) -> tuple[Tensor, Tensor]:
    """Call ``graph``, a compiled :func:`loss_and_gradient`; return a differentiable loss and the metrics."""
    inputs = raw.differentiable_inputs
    with torch.no_grad():
        detached = raw.with_differentiable_inputs([value.detach() for value in inputs])
        loss, metrics, *gradient = graph(detached, *args)
    return _PrecomputedGradient.apply(loss, *gradient, *inputs), metrics  # type: ignore[no-untyped-call]


class _PrecomputedGradient(torch.autograd.Function):
    """Scalar with a precomputed gradient.

    Arguments of ``apply``: the value, 0-d; its gradient by each input; the inputs, in the same order.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, *gradient_and_inputs: Tensor) -> Tensor:
        count = len(gradient_and_inputs) // 2
        ctx.save_for_backward(*gradient_and_inputs[:count])
        ctx.dtypes = [value.dtype for value in gradient_and_inputs[count:]]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.saved_tensors
        scaled = ((value * grads[0]).to(dtype) for value, dtype in zip(gradient, ctx.dtypes, strict=True))
        return None, *(None for _ in gradient), *scaled


class CompiledPass:
    """A pass that is compiled once it has been called a few times, and runs eagerly if it cannot be compiled.

    Args:
        function: the pass, traceable as one graph.
        mode: ``auto``, True (compile at the first call, and raise the compiler's errors) or False.
        name: name of the loss, for the log.

    Attributes:
        choice: what runs, compiled or eager, and why: the text that is logged once; empty until the choice is made.
    """

    def __init__(self, function: Pass, mode: bool | str, name: str) -> None:
        self.choice = ""
        self._function = function
        self._mode = mode
        self._name = name
        self._has_failed = False
        self._has_warned = False
        self._calls = 0
        self._graphs: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, raw: RawBatch, *args: Any) -> tuple[Tensor, Tensor]:
        """Return what the function returns for these arguments."""
        if self._graphs is None:
            if not self._compiles_on(raw.curr.device):
                return self._function(raw, *args)
            self._graphs = (
                torch.compile(self._function, **_SETTINGS),
                torch.compile(functools.partial(loss_and_gradient, self._function), **_SETTINGS),
            )
        without_gradient, with_gradient = self._graphs
        requires_grad = any(value.requires_grad for value in raw.differentiable_inputs)
        try:
            if requires_grad and torch.is_grad_enabled():
                loss_and_metrics = attach_gradient(with_gradient, raw, *args)
            else:
                loss_and_metrics = without_gradient(raw, *args)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
                self._warn_of_limit()
                return self._function(raw, *args)
            if self._mode is True:
                raise
            self._has_failed, self._graphs, self.choice = True, None, ""
            self._log_once(f"not compiled, {type(error).__name__}: {str(error).strip()}")
            # If the error was the function's own, this call raises it again.
            return self._function(raw, *args)
        self._log_once("compiled as one graph")
        return loss_and_metrics

    def _compiles_on(self, device: torch.device) -> bool:
        """Return True if the current call is to be compiled."""
        if self._has_failed or self._mode != "auto":
            return self._mode is True
        eager_calls = EAGER_CALLS.get(device.type)
        if eager_calls is None:
            self._log_once(
                f"not compiled, since on a {device.type} compiling takes longer than it saves; set true to compile"
            )
            return False
        self._calls += 1
        return self._calls > eager_calls

    def _warn_of_limit(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "loss_fn.compile, loss '%s': a batch of this kind needs one more graph than the %d that torch keeps, "
                "and is not compiled; raise torch._dynamo.config.recompile_limit, or set loss_fn.compile: false",
                self._name,
                torch._dynamo.config.recompile_limit,
            )

    def _log_once(self, choice: str) -> None:
        if not self.choice:
            _log.info("loss_fn.compile, loss '%s': %s", self._name, choice)
            self.choice = choice

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled copy decides anew, since its machine may have no compiler.
        return CompiledPass, (self._function, self._mode, self._name)
