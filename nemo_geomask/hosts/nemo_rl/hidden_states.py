"""Hidden states in place of logits, for ``logprob_backend: geomask_linear``.

A worker's model runs with an output layer that returns its input. In place of the logits, NeMo-RL thus passes on hidden
states [B, S, H], to which a mark with their output layer is attached. NeMo-RL divides them by the temperature, as it
would divide logits. The layer has no bias, so the log-probs are the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_geomask.errors import ConfigError, Problem, WorkerError
from nemo_geomask.losses.packing import IGNORE
from nemo_geomask.parallel import linear_logprobs

_KEY = "loss_fn.logprob_backend"
_SETTING = "logprob_backend: geomask_linear"
_MARK = "_nemo_geomask_head"  # attribute of a model's output that holds its OutputLayer
hidden_states_requested: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "nemo_geomask_hidden_states_requested", default=None
)
"""True: the current forward pass should return hidden states; False: logits; None: the worker requested neither."""


class OutputLayer(NamedTuple):
    """The layer that would turn hidden states into logits.

    Attributes:
        weight: [V/TP, H], as the current forward pass uses it.
        sequence_parallel: True if the positions are sharded over the ranks.
        ranks: number of ranks that share the vocabulary.
    """

    weight: Tensor
    sequence_parallel: bool
    ranks: int

    def mark(self, output: Tensor) -> None:
        """Mark a model's output as hidden states of this layer."""
        setattr(output, _MARK, self)


class HiddenStates:
    """Hidden states in place of logits.

    Args:
        states: [B, S, H], or [B, S/TP, H] under sequence parallelism.
        layer: the output layer.
        length: use only the first ``length`` of the S positions; None: all.

    Attributes:
        shape: shape of the logits that they replace.
        device: their device.
    """

    def __init__(self, states: Tensor, layer: OutputLayer, length: int | None = None) -> None:
        self._states = states
        self._layer = layer
        self._positions = states.shape[1] * (layer.ranks if layer.sequence_parallel else 1)
        self.shape = (len(states), self._positions if length is None else length, len(layer.weight))
        self.device = states.device

    @classmethod
    def of(cls, output: Any) -> HiddenStates | None:
        """Return the hidden states that a prepared worker's model returned; None if it returned logits."""
        layer = getattr(output, _MARK, None)
        if layer is None:
            return None
        return cls(output.to_local() if isinstance(output, DTensor) else output, layer)

    @classmethod
    def require(cls, output: Any) -> HiddenStates:
        """Return the hidden states that a prepared worker's model returned.

        Raises:
            WorkerError: the model returned logits.
        """
        hidden = cls.of(output)
        if hidden is None:
            raise WorkerError(
                f"loss_fn.{_SETTING} needs the hidden states of a worker that is prepared for it, in a forward pass "
                "with gradient, but the loss was given logits; start with nemo-geomask run, or set "
                "logprob_backend: geomask"
            )
        return hidden

    @classmethod
    def refuse(cls, output: Any, loss_name: str) -> None:
        """Check that a model's output is logits.

        Raises:
            WorkerError: the model returned hidden states.
        """
        if cls.of(output) is not None:
            raise WorkerError(
                f"the loss {loss_name} takes logits, but this worker's model returns hidden states for another loss, "
                f"with loss_fn.{_SETTING}; set logprob_backend: geomask there"
            )

    def first(self, length: int) -> HiddenStates:
        """Return the hidden states of the first ``length`` positions."""
        return HiddenStates(self._states, self._layer, length)

    def logprobs(
        self,
        targets: Tensor,
        *,
        group: dist.ProcessGroup | None,
        ignore_index: int,
        validate: bool = True,
        entropy: bool = False,
    ) -> Any:
        """Compute log-probs [B, S] float32 of ``targets`` [B, S] int64, or the pair with entropies if ``entropy``.

        See :func:`nemo_geomask.parallel.linear_logprobs`.
        """
        width = targets.shape[1]
        padded = torch.nn.functional.pad(targets, (0, self._positions - width), value=ignore_index)
        is_sharded = self._layer.sequence_parallel and self._layer.ranks > 1
        # Sequence parallelism splits Megatron's layout, whose first dimension is the position.
        result: Any = linear_logprobs(
            self._states.transpose(0, 1) if is_sharded else self._states,
            self._layer.weight,
            padded.T.contiguous() if is_sharded else padded,
            group=group,
            sequence_parallel=is_sharded,
            ignore_index=ignore_index,
            validate=validate,
            entropy=entropy,  # type: ignore[call-overload]
        )
        rows = [
            values.T[:, :width] if is_sharded else values[:, :width] for values in (result if entropy else (result,))
        ]
        return tuple(rows) if entropy else rows[0]

    def next_token_logprobs(self, ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Compute log-probs [B, T-1] float32 of ``ids[:, 1:]`` int64; NaN for tokens outside the vocabulary."""
        # Without validation: an error on the ranks of one context-parallel share would leave the others waiting.
        logprobs: Tensor = self.logprobs(ids[:, 1:].long(), group=group, ignore_index=IGNORE, validate=False)
        return logprobs


def takes_hidden_states(loss: Any) -> bool:
    """Return True if a loss takes hidden states in place of logits."""
    return getattr(loss, "takes_hidden", False)


def computes_logprobs(post_processor: Any) -> bool:
    """Return True if a post-processor is the ``LogprobsPostProcessor`` of Megatron or of DTensor v2 workers."""
    return any(cls.__name__ == "LogprobsPostProcessor" for cls in type(post_processor).__mro__)


@contextlib.contextmanager
def replaced_forward(layer: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a layer's ``forward`` within the context; the hooks of its call still run."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def wrap_post_processing(
    needs_hidden_states: Callable[[Mapping[str, Any]], bool], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap ``forward_with_post_processing_fn`` of Megatron or DTensor v2 workers to request hidden states.

    Args:
        needs_hidden_states: decides by the call's arguments, by name.
        original: NeMo-RL's function.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_with_post_processing_fn(*args: Any, **kwargs: Any) -> Any:
        token = hidden_states_requested.set(needs_hidden_states(signature.bind(*args, **kwargs).arguments))
        try:
            return original(*args, **kwargs)
        finally:
            hidden_states_requested.reset(token)

    return forward_with_post_processing_fn


def refuse_if(condition: Any, feature: str) -> None:
    """Refuse a combination with ``geomask_linear``.

    Args:
        condition: True if the feature is in use.
        feature: what the back end does not support, as a noun phrase.

    Raises:
        ConfigError: the condition holds.
    """
    if condition:
        message = f"{_SETTING} does not go with {feature}; set logprob_backend: geomask"
        raise ConfigError(Problem((_KEY,), message))


def refuse_altered(layer: Any, description: str) -> None:
    """Refuse an output layer that does more than multiply by its weight.

    Args:
        layer: the output layer.
        description: such as ``a head``, for the error.

    Raises:
        ConfigError: the layer has a bias, or a ``forward`` that is not its class's.
    """
    refuse_if("forward" in vars(layer), f"{description} whose forward other code has replaced")
    # The temperature divides the hidden states, and so would not divide a bias.
    refuse_if(layer.bias is not None, f"{description} with a bias")
