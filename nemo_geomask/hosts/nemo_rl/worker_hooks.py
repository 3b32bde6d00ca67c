"""Preparation of NeMo-RL's worker processes, where a loss needs it.

NeMo-RL calls any loss once for each sequence of a packed row. The packing wrappers are therefore replaced, so that one
call of the loss gets the whole row. If the loss computes its log-probs with this package's kernels, the forward passes
for ``prev_logprobs`` and the reference policy are made to use the same kernels. To "prepare" a worker process is to
apply these patches in it, see :mod:`nemo_geomask.hosts.nemo_rl.host_patches`;
:mod:`nemo_geomask.hosts.nemo_rl.worker_setup` does so for every policy worker. In a process that is not prepared,
NeMo-RL calls losses as it always does.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection
from typing import Any

import torch

from nemo_geomask.config import LossConfig
from nemo_geomask.hosts.nemo_rl import hidden_dtensor, host_api, patch
from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.host_patches import Condition, make_patches

__all__ = ["needs_preparation", "prepare", "prepare_model"]

_log = logging.getLogger("nemo_geomask")
_OWN_KERNELS = {"geomask", "geomask_linear"}  # values of logprob_backend that use this package's kernels


def needs_preparation(config: LossConfig, *, has_packed_rows: bool) -> bool:
    """Return True if workers must be prepared for a loss with these settings.

    Args:
        config: settings of the loss.
        has_packed_rows: True if the workers pack several sequences into a row.
    """
    is_packed_in_one_call = has_packed_rows and (config.metrics == "full" or config.logprob_backend != "nemo_rl")
    return is_packed_in_one_call or config.logprob_backend in _OWN_KERNELS


def prepare(*, backends: Collection[str] = ("geomask",), has_packed_rows: bool = True, actor: object = None) -> bool:
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
        importlib.import_module(host_api.LOSS_WRAPPERS)
    except ImportError:
        # A process that cannot import NeMo-RL runs none of its workers, so there is nothing to prepare.
        return False
    conditions: list[Condition] = ["packed rows"] if has_packed_rows else []
    if not _OWN_KERNELS.isdisjoint(backends):
        conditions.append("own kernels")
    if "geomask_linear" in backends:
        conditions.append("hidden states")
    try:
        patch.apply_all(list(make_patches(conditions, process="worker", actor=actor)))
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
