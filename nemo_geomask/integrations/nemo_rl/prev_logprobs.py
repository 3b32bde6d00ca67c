"""``ratio_anchor: gen`` in NeMo-RL: no forward pass for ``prev_logprobs`` that nothing reads.

For them and nothing else, NeMo-RL's trainers call ``Policy.get_logprobs`` (GRPO, asynchronous GRPO, PPO), or
``TQPolicy.get_logprobs_from_meta`` where the batch lies in the data plane (synchronous GRPO, single controller). Both
are wrapped in the driver once a loss without need for them is built, and give NaN: what reads it all the same shows.
Under ``audit_fraction`` they score a sample of the sequences. The single controller, a process of its own, gets a
policy of a subclass, as in :mod:`.before_step`.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.checks.gates import unread
from nemo_geomask.errors import ConfigError
from nemo_geomask.integrations.nemo_rl import patch, seams, source
from nemo_geomask.integrations.nemo_rl.record import last_step
from nemo_geomask.records.flight import by_hash

__all__ = ["follow"]


def follow(loss: Any) -> None:
    """Let NeMo-RL's trainers compute ``prev_logprobs`` if ``loss``, the last one built, or NeMo-RL needs them.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known; nothing is changed.
    """
    for mine in _patches:
        mine.undo()
    _patches[:] = _make(loss.config.audit_fraction) if loss.config.skips_prev else ()
    patch.apply_all(_patches)


_patches: list[patch.Patch] = []


def _make(fraction: float) -> Iterator[patch.Patch]:
    for uses, target in source.targets(seams.PREV_LOGPROBS, otherwise="Set loss_fn.ratio_anchor: prev"):
        # NeMo-RL's modules import a function by its name.
        change = patch.attribute if uses.owner else patch.rebound
        for name in uses.methods:
            yield change(target, name, functools.partial(_WRAP[name], fraction))
        if "get_logprobs_from_meta" in uses.methods:
            yield patch.carried(target, "prev_logprobs", functools.partial(_skipping, fraction))


_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _audited(policy: Any, rows: int, fraction: float) -> list[int]:
    """Rows to score, by a hash of the row and of the batch's number; as many as the workers divide."""
    if not fraction:
        return []
    step = _calls[policy] = _calls.get(policy, last_step(policy)) + 1
    # What NeMo-RL's sharding and its microbatches divide by.
    unit = policy.sharding_annotations.get_axis_size("data_parallel") * (policy.cfg.get("logprob_batch_size") or 1)
    return by_hash(step, rows, min(rows, math.ceil(fraction * rows / unit) * unit))


def _get_logprobs(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        data = given.arguments["data"]
        logprobs = torch.full(data["input_ids"].shape, torch.nan)
        if rows := _audited(self, logprobs.shape[0], fraction):
            given.arguments["data"] = data.select_indices(rows)
            logprobs[rows] = original(*given.args, **given.kwargs)["logprobs"].to(logprobs)
        return type(data)({"logprobs": logprobs})

    return get_logprobs


def _get_logprobs_from_meta(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs_from_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        meta = given.arguments["meta"]
        like = self.read_from_dataplane(meta, select_fields=["generation_logprobs"])["generation_logprobs"]
        self.write_to_dataplane(meta, fields={"prev_logprobs": torch.full(like.shape, torch.nan)})
        if rows := _audited(self, like.shape[0], fraction):
            given.arguments["meta"] = meta.subset(rows)
            original(*given.args, **given.kwargs)

    return get_logprobs_from_meta


def _mask_by_error(fraction: float, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mask_by_error(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        threshold = given["seq_logprob_error_threshold"]
        if threshold is not None:  # NaN is within none
            raise ConfigError(unread("seq_logprob_error_threshold", threshold, "masks sequences"))
        return original(*args, **kwargs)

    return mask_by_error


_WRAP: dict[str, Callable[[float, Any], Any]] = {
    "get_logprobs": _get_logprobs,
    "get_logprobs_from_meta": _get_logprobs_from_meta,
    "compute_and_apply_seq_logprob_error_masking": _mask_by_error,
}


def _skipping(fraction: float, kind: type) -> dict[str, Any]:
    """The wrapped method, where it is not wrapped already."""
    name = "get_logprobs_from_meta"
    method = getattr(kind, name)
    return {} if hasattr(method, "__wrapped__") else {name: _get_logprobs_from_meta(fraction, method)}
