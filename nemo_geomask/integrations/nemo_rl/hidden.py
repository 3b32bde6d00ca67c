"""``logprob_backend: geomask_linear``: what takes the place of the logits on their way through NeMo-RL.

A worker's model is run with an output layer that passes its input on: hidden states [B, S, H], which know their head.
NeMo-RL divides them by the temperature as it would the logits, which is the same.
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

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.integrations.nemo_rl.workers import WorkerError
from nemo_geomask.integrations.packing import IGNORE
from nemo_geomask.parallel import linear_logprobs

__all__ = ["Hidden", "OutputLayer", "handing_on", "refuse_altered", "refuse_if", "telling", "wanted"]

_KEY = "loss_fn.logprob_backend"
_NAME = "logprob_backend: geomask_linear"
_ATTRIBUTE = "_nemo_geomask_head"
wanted: contextvars.ContextVar[bool | None] = contextvars.ContextVar("nemo_geomask_hidden_states_wanted", default=None)
"""Whether the forward pass under way is to put out hidden states; None where nobody has said."""


class OutputLayer(NamedTuple):
    """What would make logits of hidden states.

    Attributes:
        weight: [V/TP, H], of the forward pass under way.
        sequence_parallel: each rank holds its share of the positions.
        ranks: that hold a part of the vocabulary.
    """

    weight: Tensor
    sequence_parallel: bool
    ranks: int

    def mark(self, output: Tensor) -> None:
        """Say of a model's output that it is hidden states, and this its head."""
        setattr(output, _ATTRIBUTE, self)


class Hidden:
    """Hidden states in the place of logits.

    Args:
        states: [B, S, H], under sequence parallelism [B, S/TP, H].
        layer: what would make logits of them.
        length: how many of the S positions count; None: all.

    Attributes:
        shape: of the logits that they stand for.
        device: where they are.
    """

    def __init__(self, states: Tensor, layer: OutputLayer, length: int | None = None) -> None:
        self._states = states
        self._layer = layer
        self._whole = states.shape[1] * (layer.ranks if layer.sequence_parallel else 1)
        self.shape = (len(states), self._whole if length is None else length, len(layer.weight))
        self.device = states.device

    @classmethod
    def of(cls, output: Any) -> Hidden | None:
        """The hidden states that a prepared worker's model put out; None for logits."""
        layer = getattr(output, _ATTRIBUTE, None)
        if layer is None:
            return None
        return cls(output.to_local() if isinstance(output, DTensor) else output, layer)

    @classmethod
    def required_of(cls, output: Any) -> Hidden:
        """As :meth:`of`.

        Raises:
            WorkerError: they are logits.
        """
        found = cls.of(output)
        if found is None:
            raise WorkerError(
                f"loss_fn.{_NAME} needs the hidden states of a worker that is prepared for it, in a forward pass with "
                "gradient, but the loss was given logits; start with nemo-geomask run, or set logprob_backend: geomask"
            )
        return found

    @classmethod
    def refused_of(cls, output: Any, loss: str) -> None:
        """Let nothing but logits through to a loss of that name.

        Raises:
            WorkerError: they are hidden states.
        """
        if cls.of(output) is not None:
            raise WorkerError(
                f"the loss {loss} takes logits, but this worker's model puts out hidden states for another, of "
                f"loss_fn.{_NAME}; set logprob_backend: geomask there"
            )

    def first(self, length: int) -> Hidden:
        """Those of the first ``length`` positions."""
        return Hidden(self._states, self._layer, length)

    def logprobs(
        self,
        targets: Tensor,
        *,
        group: dist.ProcessGroup | None,
        ignore_index: int,
        validate: bool = True,
        entropy: bool = False,
    ) -> Any:
        """[B, S] float32 of ``targets`` [B, S] int64, or with ``entropy`` the pair, see
        :func:`nemo_geomask.parallel.linear_logprobs`."""
        width = targets.shape[1]
        goals = torch.nn.functional.pad(targets, (0, self._whole - width), value=ignore_index)
        shared = self._layer.sequence_parallel and self._layer.ranks > 1
        # Sequence parallelism shares out Megatron's order, positions first.
        found: Any = linear_logprobs(
            self._states.transpose(0, 1) if shared else self._states,
            self._layer.weight,
            goals.T.contiguous() if shared else goals,
            group=group,
            sequence_parallel=shared,
            ignore_index=ignore_index,
            validate=validate,
            entropy=entropy,  # type: ignore[call-overload]
        )
        results = [one.T[:, :width] if shared else one[:, :width] for one in (found if entropy else (found,))]
        return tuple(results) if entropy else results[0]

    def following(self, ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """[B, T-1] float32, of all tokens of ``ids`` [B, T] but the first; NaN outside the vocabulary."""
        # Not validated: an error on the ranks of one share would leave those of the others waiting.
        found: Tensor = self.logprobs(ids[:, 1:].long(), group=group, ignore_index=IGNORE, validate=False)
        return found


@contextlib.contextmanager
def handing_on(layer: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The layer's call runs its hooks, and ``forward`` in the place of its own."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def telling(wants: Callable[[Mapping[str, Any]], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's ``forward_with_post_processing_fn``, of Megatron's workers or DTensor v2's, that says what is wanted.

    Args:
        wants: from its arguments, by name.
        original: NeMo-RL's own.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_with_post_processing_fn(*args: Any, **kwargs: Any) -> Any:
        token = wanted.set(wants(signature.bind(*args, **kwargs).arguments))
        try:
            return original(*args, **kwargs)
        finally:
            wanted.reset(token)

    return forward_with_post_processing_fn


def refuse_if(found: Any) -> None:
    """Stop where there is something, in words, that the back end does not go with.

    Raises:
        ConfigError: there is.
    """
    if found:
        message = f"{_NAME} does not go with {found}; set logprob_backend: geomask"
        raise ConfigError(Problem((_KEY,), message))


def refuse_altered(layer: Any, words: str) -> None:
    """Stop where an output layer is more than the product with its weight.

    Raises:
        ConfigError: it has a bias, or a forward that is not its class's.
    """
    refuse_if("forward" in vars(layer) and f"{words} whose forward somebody else has replaced")
    # A bias would not be divided by the temperature as the hidden states are.
    refuse_if(layer.bias is not None and f"{words} with a bias")
