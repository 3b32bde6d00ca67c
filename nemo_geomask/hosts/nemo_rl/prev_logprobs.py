"""``ratio_anchor: gen`` in NeMo-RL: skip the forward pass for ``prev_logprobs`` that nothing reads.

NeMo-RL's trainers compute them by ``Policy.get_logprobs`` (GRPO, asynchronous GRPO, PPO), or by
``TQPolicy.get_logprobs_from_meta`` where the batch is in the data plane (synchronous GRPO, single controller); they
call neither for anything else. The driver wraps both methods when a loss that does not read ``prev_logprobs`` is built,
and they return NaN, which makes any unexpected reader visible. Under ``audit_fraction`` they compute a sample of the
rows. The single controller runs in a process of its own, and receives a policy of a subclass, as described in
:mod:`nemo_geomask.hosts.nemo_rl.prestep_hooks`.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import host_api, patch
from nemo_geomask.hosts.nemo_rl.facts import missing_prev
from nemo_geomask.hosts.nemo_rl.resumed_step import resumed_step
from nemo_geomask.hosts.nemo_rl.source_signature import import_targets
from nemo_geomask.records.flight import choose_by_hash

__all__ = ["wrap_policy"]


def wrap_policy(loss: Any) -> None:
    """Let NeMo-RL's trainers compute only the ``prev_logprobs`` that ``loss``, the last one built, needs.

    Args:
        loss: one of this package's losses, as NeMo-RL will pass it on.

    Raises:
        HostAPIError: NeMo-RL's policy differs from the tested versions; nothing is changed.
    """
    for change in _patches:
        change.undo()
    _patches[:] = _make_patches(loss.config.audit_fraction) if loss.config.skips_prev else ()
    patch.apply_all(_patches)


_patches: list[patch.Patch] = []  # of the last loss


def _make_patches(fraction: float) -> Iterator[patch.Patch]:
    for uses, target in import_targets(host_api.PREV_LOGPROBS, otherwise="Set loss_fn.ratio_anchor: prev"):
        # Other modules of NeMo-RL import the function by its name.
        make_patch = patch.attribute if uses.owner else patch.rebound
        for name in uses.methods:
            yield make_patch(target, name, functools.partial(_WRAPPERS[name], fraction))
        if "get_logprobs_from_meta" in uses.methods:
            yield patch.carried(target, PREV_LOGPROBS, functools.partial(_subclass_methods, fraction))


_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by policy


def _audited_rows(policy: Any, rows: int, fraction: float) -> list[int]:
    """Choose the rows to compute by a hash of row and batch number, as many as the workers can share equally."""
    if not fraction:
        return []
    batch = _calls[policy] = _calls.get(policy, resumed_step(policy)) + 1
    # NeMo-RL splits the rows over data-parallel ranks and microbatches.
    unit = policy.sharding_annotations.get_axis_size("data_parallel") * (policy.cfg.get("logprob_batch_size") or 1)
    return choose_by_hash(batch, rows, min(rows, math.ceil(fraction * rows / unit) * unit))


def _wrap_get_logprobs(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        data = bound.arguments["data"]
        logprobs = torch.full(data["input_ids"].shape, torch.nan)
        if rows := _audited_rows(self, logprobs.shape[0], fraction):
            bound.arguments["data"] = data.select_indices(rows)
            logprobs[rows] = original(*bound.args, **bound.kwargs)["logprobs"].to(logprobs)
        return type(data)({"logprobs": logprobs})

    return get_logprobs


def _wrap_get_logprobs_from_meta(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs_from_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        meta = bound.arguments["meta"]
        shape = self.read_from_dataplane(meta, select_fields=[GENERATION_LOGPROBS])[GENERATION_LOGPROBS].shape
        self.write_to_dataplane(meta, fields={PREV_LOGPROBS: torch.full(shape, torch.nan)})
        if rows := _audited_rows(self, shape[0], fraction):
            bound.arguments["meta"] = meta.subset(rows)
            original(*bound.args, **bound.kwargs)

    return get_logprobs_from_meta


def _wrap_error_masking(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute_and_apply_seq_logprob_error_masking(*args: Any, **kwargs: Any) -> Any:
        threshold = signature.bind(*args, **kwargs).arguments["seq_logprob_error_threshold"]
        if threshold is not None:  # NaN would exceed any threshold
            raise ConfigError(missing_prev("seq_logprob_error_threshold", threshold, "masks sequences"))
        return original(*args, **kwargs)

    return compute_and_apply_seq_logprob_error_masking


_WRAPPERS: dict[str, Callable[[float, Any], Any]] = {
    "get_logprobs": _wrap_get_logprobs,
    "get_logprobs_from_meta": _wrap_get_logprobs_from_meta,
    "compute_and_apply_seq_logprob_error_masking": _wrap_error_masking,
}


def _subclass_methods(fraction: float, cls: type) -> dict[str, Any]:
    """Return the wrapped method for a subclass of ``cls``, unless ``cls`` has it already."""
    name = "get_logprobs_from_meta"
    method = getattr(cls, name)
    return {} if hasattr(method, "__wrapped__") else {name: _wrap_get_logprobs_from_meta(fraction, method)}
