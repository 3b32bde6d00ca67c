"""Every attribute of NeMo-RL that this package replaces, with the reason: none of them has an extension point.

Nothing in the driver is replaced by default. In the workers, the two calls of the packing wrappers are replaced while
rows are packed, since NeMo-RL calls a loss once for each sequence of a packed row. All others belong to a
``logprob_backend`` or to the record of an asynchronous run. To "prepare" a worker process is to apply these patches in
it; :mod:`nemo_geomask.hosts.nemo_rl.worker_setup` does so for every policy worker. In a process that is not prepared,
NeMo-RL calls losses as it always does.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import HostAPIError
from nemo_geomask.hosts.nemo_rl import (
    forward_logprobs,
    hidden_dtensor,
    hidden_megatron,
    host_api,
    packed_microbatch,
    patch,
)
from nemo_geomask.hosts.nemo_rl.facts import REPLAY_BUFFERS
from nemo_geomask.hosts.nemo_rl.host_api import AUTOMODEL_TRAIN, LOSS_WRAPPERS, MEGATRON_TRAIN, MODEL_UTILS
from nemo_geomask.hosts.nemo_rl.loop_values import ReplayBufferClass
from nemo_geomask.hosts.nemo_rl.source_signature import Uses

_log = logging.getLogger("nemo_geomask")
_OWN_KERNELS = {"geomask", "geomask_linear"}  # values of logprob_backend that use this package's kernels


class PatchGroup(NamedTuple):
    """Attributes of NeMo-RL that are replaced together, and put back by :func:`nemo_geomask.uninstall`.

    Attributes:
        reason: what NeMo-RL does there, and why no extension point of its own would do.
        upstream_change: the change to NeMo-RL that would make the replacements unnecessary.
        attributes: module, dotted path in the module, and function that returns the replacement of the original.
        apis: what the replacements rely on.
        remedy: the setting that does without them, as an imperative sentence without full stop.
    """

    reason: str
    upstream_change: str
    attributes: tuple[tuple[str, str, Callable[[Any], Any]], ...]
    apis: tuple[Uses, ...] = ()
    remedy: str = ""


_wrap_packing = packed_microbatch.wrap_packing_call
PATCH_GROUPS = {
    "packed rows": PatchGroup(
        "calls the loss once for each sequence, and the training loops add up metrics that they do not know, so that "
        "maxima and quantiles would drift",
        "a packing wrapper that passes the whole row to a loss that asks for it",
        (
            (
                LOSS_WRAPPERS,
                "SequencePackingLossWrapper.__call__",
                functools.partial(_wrap_packing, packed_microbatch.loss_by_sequence),
            ),
            (
                LOSS_WRAPPERS,
                "SequencePackingFusionLossWrapper.__call__",
                functools.partial(_wrap_packing, packed_microbatch.loss_at_once),
            ),
        ),
        host_api.PACKED_ROWS,
        "Set loss_fn.logprob_backend: nemo_rl",
    ),
    "own kernels": PatchGroup(
        "computes the log-probs of forward passes, which should equal those of training to the bit",
        "a hook for the function that computes log-probs in forward passes",
        (
            (MODEL_UTILS, "DistributedLogprob", forward_logprobs.subclass_shard_logprobs),
            (MODEL_UTILS, "ChunkedDistributedLogprob", forward_logprobs.subclass_shard_logprobs),
            (
                AUTOMODEL_TRAIN,
                "LogprobsPostProcessor._compute_local_logprobs",
                forward_logprobs.wrap_full_vocabulary_logprobs,
            ),
        ),
        host_api.FORWARD_LOGPROBS,
        "Set loss_fn.logprob_backend: nemo_rl",
    ),
    "hidden states": PatchGroup(
        "runs the model to its logits, which this back end never forms, and computes log-probs from them",
        "a post-processor that receives hidden states and the output layer",
        (
            (MEGATRON_TRAIN, "forward_with_post_processing_fn", hidden_megatron.wrap_forward),
            (MEGATRON_TRAIN, "model_forward", hidden_megatron.wrap_model_forward),
            (MEGATRON_TRAIN, "LogprobsPostProcessor.__call__", hidden_megatron.wrap_logprobs_post_processor),
            (AUTOMODEL_TRAIN, "forward_with_post_processing_fn", hidden_dtensor.wrap_forward),
            (AUTOMODEL_TRAIN, "get_logprobs_from_vocab_parallel_logits", hidden_dtensor.wrap_shard_logprobs),
        ),
        host_api.HIDDEN_STATES,
        "Set loss_fn.logprob_backend: geomask",
    ),
    "asynchronous record": PatchGroup(
        "returns samples without the versions of the weights that generated them",
        "versions in what `ReplayBuffer.sample` returns",
        ((REPLAY_BUFFERS, "ReplayBuffer", ReplayBufferClass),),
    ),
}
"""All replaced attributes, by what a run needs if they are replaced; those of the last group in the driver.

- ``packed rows``: the workers pack several sequences into a row, under ``metrics: full`` or a loss that takes logits;
- ``own kernels``: ``logprob_backend: geomask`` or ``geomask_linear``;
- ``hidden states``: ``logprob_backend: geomask_linear``;
- ``asynchronous record``: ``record`` in NeMo-RL's asynchronous loops.
"""


def make_patches(conditions: Collection[str], *, actor: object = None) -> Iterator[patch.Patch]:
    """Yield the patches of some groups, after a check of the NeMo-RL APIs that they rely on.

    Modules that cannot be imported are left out: they belong to another kind of worker, whose requirements are missing.

    Args:
        conditions: keys of :data:`PATCH_GROUPS`.
        actor: the worker in whose process this is called; None: not in a worker.

    Raises:
        HostAPIError: an API differs from the tested versions.
    """
    for group in (PATCH_GROUPS[condition] for condition in conditions):
        for module_name, path, wrap in group.attributes:
            module = _import_or_none(module_name)
            if module is None:
                continue
            owner_name, _, name = path.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            if patch.in_force(owner, name):
                continue
            for uses in group.apis:
                if uses.module == module_name:
                    uses.require(getattr(module, uses.owner, None) if uses.owner else module, remedy=group.remedy)
            if not hasattr(owner, name):  # of an API that is not checked
                continue
            if not owner_name and isinstance(vars(module)[name], types.FunctionType):
                yield patch.function(module, name, wrap, namespaces=patch.nemo_rl_namespaces(actor))
            else:
                yield patch.attribute(owner, name, wrap)


def _import_or_none(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not isinstance(error, ImportError):
            _log.warning("%s can't be imported and is left as it is: %s: %s", name, type(error).__name__, error)
        return None


def needs_preparation(config: LossConfig, *, has_packed_rows: bool) -> bool:
    """Return True if workers must be prepared for a loss with these settings.

    Args:
        config: settings of the loss.
        has_packed_rows: True if the workers pack several sequences into a row.
    """
    is_packed_in_one_call = has_packed_rows and (config.metrics == "full" or config.logprob_backend != "nemo_rl")
    return is_packed_in_one_call or config.logprob_backend in _OWN_KERNELS


def prepare_worker(
    *, backends: Collection[str] = ("geomask",), has_packed_rows: bool = True, actor: object = None
) -> bool:
    """Prepare NeMo-RL in this process for this package's losses; other losses are not affected.

    Calling it again does nothing.

    Args:
        backends: the ``logprob_backend`` of each loss. ``nemo_rl``: NeMo-RL computes the log-probs, and a failed
            preparation only costs speed and the exactness of maxima and quantiles. Others: the loss computes them from
            logits (``geomask_linear``: from hidden states). With ``geomask`` and ``geomask_linear``, forward passes
            compute log-probs as training does; with ``mcore`` and ``te``, NeMo-RL computes those of forward passes.
        has_packed_rows: True if the workers pack several sequences into a row.
        actor: the worker; None: not a Ray actor.

    Returns:
        True if the process is prepared; False if NeMo-RL is missing here or differs from the tested versions.

    Raises:
        HostAPIError: a back end other than ``nemo_rl`` is requested, and NeMo-RL differs from the tested versions;
            nothing is changed.
    """
    try:
        importlib.import_module(LOSS_WRAPPERS)
    except ImportError:
        # A process that cannot import NeMo-RL runs none of its workers, so there is nothing to prepare.
        return False
    conditions = ["packed rows"] if has_packed_rows else []
    if not _OWN_KERNELS.isdisjoint(backends):
        conditions.append("own kernels")
    if "geomask_linear" in backends:
        conditions.append("hidden states")
    try:
        patch.apply_all(list(make_patches(conditions, actor=actor)))
    except HostAPIError as error:
        if any(backend != "nemo_rl" for backend in backends):
            raise
        _log.warning(
            "each packed sequence is a call of the loss, and maxima and quantiles of the metrics come from sums over "
            "sequences, since %s",
            error,
        )
        return False
    return True


def prepare_model(actor: Any, *, backends: Collection[str]) -> None:
    """Prepare the model of a worker for this package's losses; calling it again does nothing.

    Args:
        actor: the worker. Only NeMo-RL's DTensor workers have a model that needs preparation.
        backends: as for :func:`prepare_worker`.
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
