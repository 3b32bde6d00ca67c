"""Every attribute of NeMo-RL that this package replaces, with the reason: none of them has an extension point.

Nothing in the driver is replaced by default. In the workers, the two calls of the packing wrappers are replaced while
rows are packed. All others belong to a ``logprob_backend`` or to the record of an asynchronous run.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nemo_geomask.hosts.nemo_rl import (
    forward_logprobs,
    hidden_dtensor,
    hidden_megatron,
    host_api,
    packed_microbatch,
    patch,
    step_recorder,
)
from nemo_geomask.hosts.nemo_rl.facts import REPLAY_BUFFERS
from nemo_geomask.hosts.nemo_rl.source_signature import Uses

__all__ = ["HOST_PATCHES", "Condition", "HostPatch", "make_patches"]

_log = logging.getLogger("nemo_geomask")

Condition = Literal["packed rows", "own kernels", "hidden states", "asynchronous record"]
"""What a run needs if an attribute is replaced.

- ``packed rows``: the workers pack several sequences into a row, under ``metrics: full`` or a loss that takes logits;
- ``own kernels``: ``logprob_backend: geomask`` or ``geomask_linear``;
- ``hidden states``: ``logprob_backend: geomask_linear``;
- ``asynchronous record``: ``record`` in NeMo-RL's asynchronous loops.
"""


@dataclass(frozen=True)
class HostPatch:
    """An attribute of NeMo-RL that is replaced, and put back by :func:`nemo_geomask.uninstall`.

    Attributes:
        module: dotted name of the module.
        attribute: dotted path in the module.
        condition: when it is replaced.
        process: the process in which it is replaced.
        reason: why no extension point of NeMo-RL would do.
        versions: tested versions that have it.
        upstream_change: the change to NeMo-RL that would make the replacement unnecessary.
        wrap: returns the replacement; called with the module and the original.
    """

    module: str
    attribute: str
    condition: Condition
    process: Literal["driver", "worker"]
    reason: str
    versions: str
    upstream_change: str
    wrap: Callable[[types.ModuleType, Any], Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def _ignoring_module(wrap: Callable[[Any], Any]) -> Callable[[types.ModuleType, Any], Any]:
    return lambda module, original: wrap(original)


_ALL = "all"
_PACKING_REASON = (
    "calls the loss once for each sequence, and the training loops add up metrics that they do not know, so that "
    "maxima and quantiles would drift"
)
_PACKING_CHANGE = "a packing wrapper that passes the whole row to a loss that asks for it"
_SCORING_REASON = "computes the log-probs of forward passes, which should equal those of training to the bit"
_SCORING_CHANGE = "a hook for the function that computes log-probs in forward passes"
_HIDDEN_REASON = "runs the model to its logits, which this back end never forms"
_HIDDEN_CHANGE = "a post-processor that receives hidden states and the output layer"

HOST_PATCHES: tuple[HostPatch, ...] = (
    *(
        HostPatch(
            host_api.LOSS_WRAPPERS,
            f"{name}.__call__",
            "packed rows",
            "worker",
            _PACKING_REASON,
            _ALL,
            _PACKING_CHANGE,
            _ignoring_module(functools.partial(packed_microbatch.wrap_packing_call, compute)),
        )
        for name, compute in (
            ("SequencePackingLossWrapper", packed_microbatch.loss_by_sequence),
            ("SequencePackingFusionLossWrapper", packed_microbatch.loss_at_once),
        )
    ),
    *(
        HostPatch(
            host_api.MODEL_UTILS,
            name,
            "own kernels",
            "worker",
            _SCORING_REASON,
            _ALL,
            _SCORING_CHANGE,
            _ignoring_module(forward_logprobs.subclass_shard_logprobs),
        )
        for name in ("DistributedLogprob", "ChunkedDistributedLogprob")
    ),
    HostPatch(
        host_api.AUTOMODEL_TRAIN,
        "LogprobsPostProcessor._compute_local_logprobs",
        "own kernels",
        "worker",
        _SCORING_REASON,
        _ALL,
        _SCORING_CHANGE,
        _ignoring_module(forward_logprobs.wrap_full_vocabulary_logprobs),
    ),
    HostPatch(
        host_api.MEGATRON_TRAIN,
        "forward_with_post_processing_fn",
        "hidden states",
        "worker",
        _HIDDEN_REASON,
        _ALL,
        _HIDDEN_CHANGE,
        hidden_megatron.wrap_forward,
    ),
    HostPatch(
        host_api.MEGATRON_TRAIN,
        "model_forward",
        "hidden states",
        "worker",
        _HIDDEN_REASON,
        _ALL,
        _HIDDEN_CHANGE,
        _ignoring_module(hidden_megatron.wrap_model_forward),
    ),
    HostPatch(
        host_api.MEGATRON_TRAIN,
        "LogprobsPostProcessor.__call__",
        "hidden states",
        "worker",
        _SCORING_REASON,
        _ALL,
        _HIDDEN_CHANGE,
        _ignoring_module(hidden_megatron.wrap_logprobs_post_processor),
    ),
    HostPatch(
        host_api.AUTOMODEL_TRAIN,
        "forward_with_post_processing_fn",
        "hidden states",
        "worker",
        _HIDDEN_REASON,
        _ALL,
        _HIDDEN_CHANGE,
        hidden_dtensor.wrap_forward,
    ),
    HostPatch(
        host_api.AUTOMODEL_TRAIN,
        "get_logprobs_from_vocab_parallel_logits",
        "hidden states",
        "worker",
        _SCORING_REASON,
        _ALL,
        _HIDDEN_CHANGE,
        _ignoring_module(hidden_dtensor.wrap_shard_logprobs),
    ),
    HostPatch(
        REPLAY_BUFFERS,
        "ReplayBuffer",
        "asynchronous record",
        "driver",
        "returns samples without the versions of the weights that generated them",
        _ALL,
        "versions in what `ReplayBuffer.sample` returns",
        _ignoring_module(step_recorder.ReplayBufferClass),
    ),
)
"""All replaced attributes."""

_CHECKED_APIS: dict[Condition, tuple[Uses, ...]] = {
    "packed rows": host_api.PACKED_ROWS,
    "own kernels": host_api.FORWARD_LOGPROBS,
    "hidden states": host_api.HIDDEN_STATES,
}


def make_patches(
    conditions: Collection[Condition], *, process: Literal["driver", "worker"], actor: object = None
) -> Iterator[patch.Patch]:
    """Yield the patches that a process needs, after a check of the NeMo-RL APIs that they rely on.

    Modules that cannot be imported are left out: they belong to another kind of worker, whose requirements are missing.

    Args:
        conditions: what the run needs.
        process: the kind of process.
        actor: the worker in whose process this is called; None: not in a worker.

    Raises:
        HostAPIError: an API differs from the tested versions.
    """
    for row in HOST_PATCHES:
        if row.condition not in conditions or row.process != process:
            continue
        module = _import_or_none(row.module)
        if module is None:
            continue
        owner_name, _, name = row.attribute.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if patch.in_force(owner, name):
            continue
        for uses in _CHECKED_APIS.get(row.condition, ()):
            if uses.module == row.module:
                uses.require(module, remedy=_REMEDIES[row.condition])
        if not hasattr(owner, name):  # of an API that is not checked
            continue
        wrap = functools.partial(row.wrap, module)
        if not owner_name and isinstance(vars(module)[name], types.FunctionType):
            yield patch.function(module, name, wrap, namespaces=patch.nemo_rl_namespaces(actor))
        else:
            yield patch.attribute(owner, name, wrap)


_REMEDIES: dict[Condition, str] = {
    "packed rows": "Set loss_fn.logprob_backend: nemo_rl",
    "own kernels": "Set loss_fn.logprob_backend: nemo_rl",
    "hidden states": "Set loss_fn.logprob_backend: geomask",
}


def _import_or_none(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not isinstance(error, ImportError):
            _log.warning("%s can't be imported and is left as it is: %s: %s", name, type(error).__name__, error)
        return None
