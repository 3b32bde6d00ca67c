"""``logprob_backend: geomask_linear`` in NeMo-RL's DTensor workers: a transformers model's head passes its input on.

The head's call keeps its hooks: a tensor-parallel plan gathers the rows before it, FSDP the weight, which stays
gathered until the backward pass is over. Where the plan shares out the vocabulary, the hidden states travel as a
DTensor whose shards are each rank's whole states, as the logits' would be its columns.

DTensor v1's worker calls its model in the middle of one long method: there, what trains puts out hidden states, and the
forward passes for ``prev_logprobs`` and the reference policy have logits, which our kernels take from shards alone. In
v2 the functions around the call tell.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from nemo_geomask.integrations.nemo_rl import patch
from nemo_geomask.integrations.nemo_rl.hidden import (
    Hidden,
    OutputLayer,
    handing_on,
    refuse_altered,
    refuse_if,
    telling,
    wanted,
)
from nemo_geomask.integrations.nemo_rl.worker import filtering

__all__ = ["as_shards", "of_model", "of_workers"]


def of_model(model: torch.nn.Module, *, told: bool) -> list[patch.Patch]:
    """What lets a model put out hidden states in the place of logits.

    Args:
        model: a worker's, with FSDP and tensor parallelism applied; one without a known head gets a refusal when it
            is to train.
        told: the worker's functions say when, see :func:`of_workers`; else whenever it trains.
    """
    head = _LastLayer(model, told)
    patches = [patch.attribute(model, "forward", head.forward), head.marking()]
    if isinstance(head.layer, FSDPModule):
        # A group of its own, as Automodel makes of it, would give the weight back before it is used. FSDP does not say
        # whether it does; that it does is its default.
        kept = functools.partial(head.layer.set_reshard_after_forward, recurse=False)
        patches.append(patch.Patch(head.layer, "reshard", lambda: kept(False), lambda: kept(True)))
    return patches


def of_workers(train: Any, takes_hidden: Callable[[Any], bool]) -> list[patch.Patch]:
    """What tells the model of a DTensor v2 worker, and makes log-probs of what it puts out in a forward pass.

    Args:
        train: NeMo-RL's module ``models.automodel.train``.
        takes_hidden: whether a loss is one that takes them.
    """
    wants = functools.partial(_wants, train, takes_hidden)
    return [
        # The worker's class, which has it too, travels by value.
        patch.rebound(train, "forward_with_post_processing_fn", functools.partial(telling, wants)),
        patch.attribute(train, "get_logprobs_from_vocab_parallel_logits", _scoring_shards),
    ]


def as_shards(model: torch.nn.Module, mesh: DeviceMesh) -> patch.Patch:
    """What lets a model's logits be the one shard of a vocabulary in forward passes, in whatever the output is.

    NeMo-RL's DTensor v1 worker then makes log-probs of them as of any shard's, where our kernels are; of whole logits
    it does so in the middle of a method.

    Args:
        model: of a worker without tensor parallelism.
        mesh: the tensor-parallel one, of one rank.
    """

    def share(model: torch.nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if type(logits) is Tensor and not torch.is_grad_enabled():
            output.logits = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)

    return _hook(model, "shards", share)


def _hook(model: torch.nn.Module, name: str, hook: Callable[..., None]) -> patch.Patch:
    """A hook after the model's forward, and after those that are there."""
    handles: list[Any] = []

    def undo() -> None:
        handles.pop().remove()

    return patch.Patch(model, name, lambda: handles.append(model.register_forward_hook(hook)), undo)


class _LastLayer:
    """The output layer of a model."""

    def __init__(self, model: torch.nn.Module, told: bool) -> None:
        self._model = model
        self._told = told
        found = None
        # Not every model has it, and some of those that do raise; the name is the same in most.
        with contextlib.suppress(AttributeError, NotImplementedError):
            found = model.get_output_embeddings()  # type: ignore[operator]
        self.layer: Any = getattr(model, "lm_head", None) if found is None else found
        self._last: tuple[OutputLayer, Tensor] | None = None
        self._verified = False

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward, with a layer that passes its input on where hidden states are wanted."""

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            chosen = wanted.get()
            if chosen is None:
                chosen = not self._told and self._model.training and torch.is_grad_enabled()
            if not chosen:
                return original(*args, **kwargs)
            self._check()
            self._last = None
            with handing_on(self.layer, self._passing_on):
                output = original(*args, **kwargs)
            refuse_if(self._last is None and "a model that does not call its head")
            return output

        return forward

    def marking(self) -> patch.Patch:
        """What says of the model's output what it is: last, for FSDP may have made another tensor of it."""
        return _hook(self._model, "output", self._mark)

    def _check(self) -> None:
        layer = self.layer
        refuse_if(layer is None and f"a {type(self._model).__name__}, whose head is not known")
        known = getattr(type(layer), "forward", None) is torch.nn.Linear.forward
        refuse_if(not known and f"a head of type {type(layer).__name__}")
        refuse_altered(layer, "a head")

    def _passing_on(self, states: Tensor) -> Tensor:
        weight = self.layer.weight
        if not isinstance(weight, DTensor):
            refuse_if(isinstance(states, DTensor) and "a plan of tensor parallelism that leaves the head out")
            self._last = OutputLayer(weight, sequence_parallel=False, ranks=1), states
            # NeMo-RL divides by the temperature in place, and the norm before may keep its output.
            return states.clone()
        mesh = weight.device_mesh
        shared = mesh.ndim == 1 and weight.placements == (Shard(0),)
        refuse_if(not shared and f"a head whose weight is sharded as {weight.placements}")
        whole = isinstance(states, DTensor) and states.placements == (Replicate(),)
        refuse_if(not whole and "a plan of tensor parallelism that does not gather the rows before the head")
        # Every rank gets the gradient of the whole, as of a tensor that all of them hold.
        mine: Any = states
        mine = mine.to_local()
        self._last = OutputLayer(weight.to_local(), sequence_parallel=False, ranks=mesh.size()), mine
        return DTensor.from_local(mine.clone(), mesh, [Shard(-1)], run_check=False)

    def _mark(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if self._last is None:
            return
        (layer, states), self._last = self._last, None
        found: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        kind = type(self._model).__name__
        refuse_if(not isinstance(found, Tensor) and f"a {kind}, whose output has no logits")
        sharded = layer.ranks == 1 or isinstance(found, DTensor)
        mine = _local(found)
        gathered = not sharded or mine.numel() == layer.ranks * states.numel() > states.numel()
        refuse_if(gathered and "a plan of tensor parallelism that does not leave the logits sharded")
        if not self._verified:
            # A cap or a scale of the logits would be one of the hidden states now. Read once: it is the model's way.
            same = mine.shape == states.shape and _equal(mine, states.detach())
            refuse_if(not same and f"a {kind}, which changes its logits after the head")
            self._verified = True
        layer.mark(found)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=0.0, equal_nan=True)


def _local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found.detach()


def _wants(train: Any, takes_hidden: Callable[[Any], bool], given: Mapping[str, Any]) -> bool:
    post = given["post_processing_fn"]
    trains = takes_hidden(getattr(post, "loss_fn", None))
    refuse_if(trains and post.cp_size > 1 and "context parallelism of DTensor workers")
    scores = isinstance(post, train.LogprobsPostProcessor) and post.cp_size == 1
    return trains or (scores and not filtering(post.sampling_params))


def _scoring_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_logprobs_from_vocab_parallel_logits(logits: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = Hidden.of(logits)
        if hidden is None:
            return original(logits, input_ids, *args, **kwargs)
        return hidden.following(input_ids, logits.device_mesh.get_group("tp"))

    return get_logprobs_from_vocab_parallel_logits
