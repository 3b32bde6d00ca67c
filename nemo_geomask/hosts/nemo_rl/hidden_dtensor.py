"""``logprob_backend: geomask_linear`` in NeMo-RL's DTensor workers: the head of a transformers model returns its input.

The hooks of the head's call still run: a tensor-parallel plan gathers the rows before the call, and FSDP gathers the
weight, which stays gathered until the end of the backward pass. If the plan shards the vocabulary, the hidden states
travel as a DTensor whose shard on each rank is the complete hidden states, in place of the rank's columns of the
logits.

DTensor v1's worker calls its model in the middle of a long method. There, training passes return hidden states, and the
forward passes for ``prev_logprobs`` and the reference policy return logits, for which this package's kernels are used
if they are sharded. In v2, functions around the call request hidden states.
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

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.hosts.nemo_rl.facts import describe_filter
from nemo_geomask.hosts.nemo_rl.hidden_states import (
    HiddenStates,
    OutputLayer,
    computes_logprobs,
    hidden_states_requested,
    refuse_altered,
    refuse_if,
    replaced_forward,
    takes_hidden_states,
    wrap_post_processing,
)


def model_patches(model: torch.nn.Module, *, is_requested_by_worker: bool) -> list[patch.Patch]:
    """Return the patches that let a worker's model return hidden states in place of logits.

    Args:
        model: a model with FSDP and tensor parallelism applied. One whose head is unknown is refused when it trains.
        is_requested_by_worker: True if the worker requests hidden states, see :func:`wrap_forward`; otherwise the
            model returns them whenever it trains.
    """
    head = _ModelHead(model, is_requested_by_worker)
    patches = [patch.attribute(model, "forward", head.wrap_model_forward), head.mark_output_patch()]
    if isinstance(head.layer, FSDPModule):
        # If the head is an FSDP group of its own, as Automodel makes it, FSDP would free the weight before it is used.
        # FSDP does not tell whether it reshards after forward; that it does is its default.
        set_reshard = functools.partial(head.layer.set_reshard_after_forward, recurse=False)
        patches.append(patch.Patch(head.layer, "reshard", lambda: set_reshard(False), lambda: set_reshard(True)))
    return patches


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_with_post_processing_fn`` of DTensor v2 workers to request hidden states."""
    return wrap_post_processing(_needs_hidden_states, original)


def logits_as_shard_patch(model: torch.nn.Module, mesh: DeviceMesh) -> patch.Patch:
    """Return the patch that turns a model's logits into the only shard of a vocabulary, in forward passes.

    NeMo-RL's DTensor v1 worker then computes log-probs as for any shard, in functions that use this package's kernels;
    for logits that are no DTensor it does so in the middle of a method.

    Args:
        model: the model of a worker without tensor parallelism.
        mesh: the tensor-parallel mesh, of one rank.
    """

    def as_shard(model: torch.nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if type(logits) is Tensor and not torch.is_grad_enabled():
            output.logits = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)

    return _forward_hook_patch(model, "shards", as_shard)


def _forward_hook_patch(model: torch.nn.Module, name: str, hook: Callable[..., None]) -> patch.Patch:
    """Return a patch that adds a hook after the model's forward, behind those that it has already."""
    handles: list[Any] = []

    def undo() -> None:
        handles.pop().remove()

    return patch.Patch(model, name, lambda: handles.append(model.register_forward_hook(hook)), undo)


class _ModelHead:
    """The output layer of a transformers model.

    Attributes:
        layer: the layer, or None if it is unknown.
    """

    def __init__(self, model: torch.nn.Module, is_requested_by_worker: bool) -> None:
        self._model = model
        self._is_requested_by_worker = is_requested_by_worker
        layer = None
        # Some models lack the method and some raise; most of those call their head lm_head.
        with contextlib.suppress(AttributeError, NotImplementedError):
            layer = model.get_output_embeddings()  # type: ignore[operator]
        self.layer: Any = getattr(model, "lm_head", None) if layer is None else layer
        self._last_call: tuple[OutputLayer, Tensor] | None = None  # with the hidden states that it returned
        self._is_verified = False

    def wrap_model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the model's forward to run with a head that returns its input, if hidden states are requested."""

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            is_requested = hidden_states_requested.get()
            if is_requested is None:
                is_training = self._model.training and torch.is_grad_enabled()
                is_requested = not self._is_requested_by_worker and is_training
            if not is_requested:
                return original(*args, **kwargs)
            self._check_layer()
            self._last_call = None
            with replaced_forward(self.layer, self._return_input):
                output = original(*args, **kwargs)
            refuse_if(self._last_call is None, "a model that does not call its head")
            return output

        return forward

    def mark_output_patch(self) -> patch.Patch:
        """Return the patch that marks the model's output.

        It is a hook and runs last, because FSDP's own hook may return another tensor.
        """
        return _forward_hook_patch(self._model, "output", self._mark_output)

    def _check_layer(self) -> None:
        layer = self.layer
        refuse_if(layer is None, f"a {type(self._model).__name__}, whose head is not known")
        is_linear = getattr(type(layer), "forward", None) is torch.nn.Linear.forward
        refuse_if(not is_linear, f"a head of type {type(layer).__name__}")
        refuse_altered(layer, "a head")

    def _return_input(self, states: Tensor) -> Tensor:
        weight = self.layer.weight
        if not isinstance(weight, DTensor):
            refuse_if(isinstance(states, DTensor), "a plan of tensor parallelism that leaves the head out")
            self._last_call = OutputLayer(weight, sequence_parallel=False, ranks=1), states
            # NeMo-RL divides by the temperature in place, and the preceding norm may have saved its output for
            # backward.
            return states.clone()
        mesh = weight.device_mesh
        shards_vocabulary = mesh.ndim == 1 and weight.placements == (Shard(0),)
        refuse_if(not shards_vocabulary, f"a head whose weight is sharded as {weight.placements}")
        is_gathered = isinstance(states, DTensor) and states.placements == (Replicate(),)
        refuse_if(not is_gathered, "a plan of tensor parallelism that does not gather the rows before the head")
        # Each rank gets the gradient of the complete tensor, as for a replicated one.
        replicated: Any = states
        local = replicated.to_local()
        self._last_call = OutputLayer(weight.to_local(), sequence_parallel=False, ranks=mesh.size()), local
        return DTensor.from_local(local.clone(), mesh, [Shard(-1)], run_check=False)

    def _mark_output(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if self._last_call is None:
            return
        (layer, states), self._last_call = self._last_call, None
        logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        model_type = type(self._model).__name__
        refuse_if(not isinstance(logits, Tensor), f"a {model_type}, whose output has no logits")
        local = (logits.to_local() if isinstance(logits, DTensor) else logits).detach()
        is_sharded = layer.ranks == 1 or isinstance(logits, DTensor)
        is_gathered = not is_sharded or local.numel() == layer.ranks * states.numel() > states.numel()
        refuse_if(is_gathered, "a plan of tensor parallelism that does not leave the logits sharded")
        if not self._is_verified:
            # A model that caps or scales its logits would do so to the hidden states. One comparison, which waits for
            # the device, is enough, because a model always does the same.
            is_unchanged = local.shape == states.shape and _is_equal(local, states.detach())
            refuse_if(not is_unchanged, f"a {model_type}, which changes its logits after the head")
            self._is_verified = True
        layer.mark(logits)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)


def _needs_hidden_states(arguments: Mapping[str, Any]) -> bool:
    post_processor = arguments["post_processing_fn"]
    is_training = takes_hidden_states(getattr(post_processor, "loss_fn", None))
    refuse_if(is_training and post_processor.cp_size > 1, "context parallelism of DTensor workers")
    if is_training:
        return True
    is_scoring = computes_logprobs(post_processor) and post_processor.cp_size == 1
    return is_scoring and not describe_filter(post_processor.sampling_params)


def wrap_shard_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_logprobs_from_vocab_parallel_logits`` to also take hidden states in place of logits."""

    @functools.wraps(original)
    def get_logprobs_from_vocab_parallel_logits(logits: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = HiddenStates.of(logits)
        if hidden is None:
            return original(logits, input_ids, *args, **kwargs)
        return hidden.next_token_logprobs(input_ids, logits.device_mesh.get_group("tp"))

    return get_logprobs_from_vocab_parallel_logits
