"""Patches of NeMo-RL's worker code, so that one call of the loss gets a whole microbatch.

NeMo-RL passes logits, but not their process groups, to a loss of input type LOGIT. It also calls any loss once for each
sequence of a packed row. For this package's losses, two places are therefore patched: ``prepare_loss_input`` passes the
groups, and the two sequence-packing wrappers call the loss once for all sequences. If the loss computes its log-probs
with this package's kernels, further patches make the forward passes for ``prev_logprobs`` and the reference policy use
the same kernels.

To "prepare" a worker process is to apply these patches in it; :mod:`nemo_geomask.hosts.nemo_rl.worker_setup` does so
for every policy worker. In a process that is not prepared, NeMo-RL calls losses as it always does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl import (
    current_logprobs,
    hidden_dtensor,
    hidden_megatron,
    host_api,
    packed_microbatch,
    patch,
)
from nemo_geomask.hosts.nemo_rl.facts import describe_filter
from nemo_geomask.hosts.nemo_rl.hidden_states import Hidden
from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss, forward_logprobs
from nemo_geomask.hosts.nemo_rl.source_signature import Uses
from nemo_geomask.losses import PolicyLoss

__all__ = ["prepare", "prepare_model", "wrap_full_vocabulary_logprobs", "wrap_prepare_loss_input"]

_log = logging.getLogger("nemo_geomask")
_OWN_KERNELS = {"geomask", "geomask_linear"}  # values of logprob_backend that use this package's kernels
_PACKED_LOSSES = {
    "SequencePackingLossWrapper": packed_microbatch.loss_by_sequence,
    "SequencePackingFusionLossWrapper": packed_microbatch.loss_at_once,
}
_SHARD_PARAMETERS = {name for uses in host_api.FORWARD_LOGPROBS for name in uses.methods.get("forward", ())}


def prepare(*, backends: Collection[str] = ("geomask",)) -> bool:
    """Prepare NeMo-RL in this process for this package's losses; other losses are not affected.

    Calling it again does nothing.

    Args:
        backends: the ``logprob_backend`` of each loss. ``nemo_rl``: NeMo-RL computes the log-probs, and a failed
            preparation only costs speed. Others: the loss computes them from logits (``geomask_linear``: from hidden
            states) and cannot run without this preparation. With ``geomask`` and ``geomask_linear``, forward passes
            compute log-probs as training does; with ``mcore`` and ``te``, NeMo-RL computes those of forward passes.

    Returns:
        True if the process is prepared; False if NeMo-RL is missing here or differs from the tested versions.

    Raises:
        HostAPIError: a back end other than ``nemo_rl`` is requested, and NeMo-RL differs from the tested versions;
            nothing is changed.
    """
    try:
        utils = importlib.import_module(host_api.LOSS_UTILS)
        wrappers = importlib.import_module(host_api.LOSS_WRAPPERS)
    except ImportError:
        # A process that cannot import NeMo-RL runs none of its workers, so there is nothing to prepare.
        return False
    patches = [
        *(_hidden_state_patches() if "geomask_linear" in backends else []),
        *(_forward_pass_patches() if not _OWN_KERNELS.isdisjoint(backends) else []),
    ]
    if not patch.in_force(utils, "prepare_loss_input"):
        try:
            for uses in host_api.LOSS_INPUT:
                uses.require(sys.modules[uses.module], otherwise="Set loss_fn.logprob_backend: nemo_rl")
        except HostAPIError as error:
            if any(backend != "nemo_rl" for backend in backends):
                raise
            _log.warning("each packed sequence will be a call of the loss, since %s", error)
            return False
        patches.append(patch.rebound(utils, "prepare_loss_input", wrap_prepare_loss_input))
        for name, packed_loss in _PACKED_LOSSES.items():
            wrap = functools.partial(_wrap_packing_call, packed_loss)
            patches.append(patch.attribute(getattr(wrappers, name), "__call__", wrap))
    patch.apply_all(patches)
    return True


def prepare_model(actor: Any, *, backends: Collection[str]) -> None:
    """Prepare the model of a worker for this package's losses; calling it again does nothing.

    Args:
        actor: the worker. Only NeMo-RL's DTensor workers have a model that needs preparation.
        backends: as for :func:`prepare`.
    """
    modules = {cls.__module__ for cls in type(actor).__mro__} & set(host_api.DTENSOR_WORKERS)
    model, mesh = getattr(actor, "model", None), getattr(actor, "tp_mesh", None)
    if not modules or not isinstance(model, torch.nn.Module):
        return
    is_requested_by_worker = any(host_api.DTENSOR_WORKERS[module] for module in modules)
    patches = []
    if "geomask_linear" in backends and not patch.in_force(model, "forward"):
        patches += hidden_dtensor.model_patches(model, is_requested_by_worker=is_requested_by_worker)
    # The model's output is patched only if it is a policy that trains; a reward model returns scores and not logits.
    is_policy = getattr(actor, "optimizer", None) is not None and not getattr(actor, "_is_reward_model", False)
    uses_kernels = not _OWN_KERNELS.isdisjoint(backends)
    if is_policy and uses_kernels and not is_requested_by_worker and mesh is not None and mesh.size() == 1:
        patches.append(hidden_dtensor.logits_as_shard_patch(model, mesh))
    patch.apply_all(patches)


def _hidden_state_patches() -> list[patch.Patch]:
    """Return patches for losses that take hidden states; none for NeMo-RL modules that are missing or patched."""
    patches: list[patch.Patch] = []
    for name, make_patches in (
        (host_api.MEGATRON_TRAIN, hidden_megatron.worker_patches),
        (host_api.AUTOMODEL_TRAIN, hidden_dtensor.worker_patches),
    ):
        train = _import_unpatched(
            name, host_api.HIDDEN_STATES, "forward_with_post_processing_fn", sufficient_backend="geomask"
        )
        if train is not None:
            patches += make_patches(train)
    return patches


def _forward_pass_patches() -> list[patch.Patch]:
    """Return patches that make forward passes use our kernels; none for NeMo-RL modules that are missing or patched."""
    patches: list[patch.Patch] = []
    shards = [uses for uses in host_api.FORWARD_LOGPROBS if uses.module != host_api.AUTOMODEL_TRAIN]
    module = _import_unpatched(
        shards[0].module, host_api.FORWARD_LOGPROBS, shards[0].owner, sufficient_backend="nemo_rl"
    )
    if module is not None:
        patches += [patch.attribute(module, uses.owner, _subclass_shard_logprobs) for uses in shards]
    train = _import_unpatched(
        host_api.AUTOMODEL_TRAIN,
        host_api.FORWARD_LOGPROBS,
        "LogprobsPostProcessor._compute_local_logprobs",
        sufficient_backend="nemo_rl",
    )
    if train is not None:
        processor = train.LogprobsPostProcessor
        patches.append(patch.attribute(processor, "_compute_local_logprobs", wrap_full_vocabulary_logprobs))
    return patches


def _import_unpatched(
    name: str, apis: Iterable[Uses], patched: str, *, sufficient_backend: str
) -> types.ModuleType | None:
    """Import a module of NeMo-RL and check it; None if it cannot be imported or is patched already.

    Args:
        name: dotted name of the module.
        apis: descriptions of NeMo-RL's functions; those that belong to the module are checked.
        patched: dotted path in the module of one attribute that the patches change; tells whether they are applied.
        sufficient_backend: a ``logprob_backend`` that does not need the module; the error suggests it.
    """
    try:
        module = importlib.import_module(name)
    except Exception as error:  # the module may belong to another kind of worker, whose requirements are missing here
        if not isinstance(error, ImportError):
            _log.warning("%s can't be imported and is left as it is: %s: %s", name, type(error).__name__, error)
        return None
    owner, _, attribute = patched.rpartition(".")
    if patch.in_force(getattr(module, owner, None) if owner else module, attribute):
        return None
    for uses in apis:
        if uses.module == name:
            uses.require(module, otherwise=f"Set loss_fn.logprob_backend: {sufficient_backend}")
    return module


def _subclass_shard_logprobs(original: Any) -> Any:
    """Subclass an autograd function of NeMo-RL that takes a vocabulary shard; forward passes then use our kernels."""

    signature = inspect.signature(original.forward)

    def apply(logits: Any, target: Any, *rest: Any) -> Any:
        arguments = signature.bind(None, logits, target, *rest).arguments  # None: autograd's context
        # A parameter that only later versions have may change the result, so such a call is left to NeMo-RL.
        has_unknown = any(
            name not in _SHARD_PARAMETERS and value is not signature.parameters[name].default
            for name, value in list(arguments.items())[1:]
        )
        if arguments.get("inference_only") is not True or has_unknown:
            return original.apply(logits, target, *rest)
        group = arguments["tp_group"] if "tp_group" in arguments else arguments["group"]
        return forward_logprobs(logits, target, group)

    return type(original.__name__, (original,), {"apply": staticmethod(apply), "__module__": original.__module__})


def wrap_full_vocabulary_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of a DTensor v2 worker that computes log-probs of a whole vocabulary's logits.

    The wrapped method uses this package's kernels in forward passes, and also accepts hidden states in place of logits.
    """

    @functools.wraps(original)
    def compute_local_logprobs(self: Any, logits: Any, input_ids: Any) -> Any:
        hidden = Hidden.of(logits)
        if hidden is not None:
            return hidden.next_token_logprobs(input_ids, None)
        if describe_filter(self.sampling_params) or torch.is_grad_enabled():
            return original(self, logits, input_ids)
        targets = input_ids[:, 1:]
        return forward_logprobs(logits[:, : targets.shape[1]], targets, None)

    return compute_local_logprobs


def wrap_prepare_loss_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap NeMo-RL's ``prepare_loss_input`` to give a loss that takes logits their process groups."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_loss_input(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        loss = arguments["loss_fn"]
        if not isinstance(loss, LogitLoss):
            Hidden.refuse(arguments["logits"], type(loss).__name__)
            return original(*args, **kwargs)
        _refuse_filter(loss, arguments.get("sampling_params"))
        groups = {key: arguments.get(key) for key in ("vocab_parallel_group", "context_parallel_group")}
        return {"logits": arguments["logits"], **groups}, arguments["data"]

    return prepare_loss_input


def _wrap_packing_call(packed_loss: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of one of NeMo-RL's sequence-packing wrappers to call this package's losses once.

    Args:
        packed_loss: function that computes log-probs as NeMo-RL does and calls a loss that takes them. It is not used
            for a :class:`LogitLoss`, whose method ``packed`` takes the logits.
        original: ``__call__`` of NeMo-RL's wrapper.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = self.loss_fn
        arguments = signature.bind(self, *args, **kwargs).arguments
        logits, data = arguments["next_token_logits"], arguments["data"]
        counts = (arguments["global_valid_seqs"], arguments["global_valid_toks"])
        if isinstance(loss, LogitLoss):
            _refuse_filter(loss, getattr(self.prepare_fn, "keywords", {}).get("sampling_params"))
            return loss.packed(
                logits,
                data,
                *counts,
                cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_q_padded=self.cu_seqlens_q_padded,
                vocab_parallel_group=self.vocab_parallel_group,
                context_parallel_group=self.context_parallel_group,
            )
        Hidden.refuse(logits, type(loss).__name__)
        if not isinstance(loss, PolicyLoss):
            return original(self, *args, **kwargs)
        current_logprobs.add_fingerprints(loss, data)
        return packed_loss(self, logits, data, *counts)

    return call


def _refuse_filter(loss: LogitLoss, sampling_params: Any) -> None:
    if description := describe_filter(sampling_params):
        message = (
            f"logprob_backend: {loss.config.logprob_backend} computes log-probs over the whole vocabulary, but the "
            f"policy samples with {description}; set logprob_backend: nemo_rl, which filters as the "
            "sampler does, or sample without top-k and top-p"
        )
        raise ConfigError(Problem(("loss_fn.logprob_backend",), message))
