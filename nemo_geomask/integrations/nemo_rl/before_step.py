"""``batch_veto`` and ``denominator: kept`` in NeMo-RL: a look at the whole batch between advantages and training.

NeMo-RL's trainers hand the batch of a step to ``Policy.train`` (GRPO, async GRPO, PPO), or the keys of one that lies in
its data plane to ``TQPolicy.train_from_meta`` (synchronous GRPO), or those of its parts, as they are generated, to
``TQPolicy.train_microbatches_from_meta`` between the beginning of a step and its end (the single controller). All are
wrapped once a loss asks for it, in the process that calls them; calls with other losses pass through.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.integrations.nemo_rl import seams
from nemo_geomask.losses import BeforeStep, Decision, PolicyLoss, Review
from nemo_geomask.losses.loss import PREPARED
from nemo_geomask.losses.prestep import untrained_metrics, valid_counts

__all__ = ["unwatch", "watch"]

_log = logging.getLogger("nemo_geomask")
_ORIGINAL = "_nemo_geomask_original"


class _Gate(BeforeStep):
    """Travels with the loss: NeMo-RL's single controller trains in a process of its own."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__(config)
        self._last: tuple[dict[str, weakref.ref[Tensor]], Decision] | None = None

    def once(self, data: Mapping[str, Any]) -> Decision:
        """The decision on a batch; PPO trains on one for several epochs, and it is judged and counted once."""
        names = ("prev_logprobs", "generation_logprobs")
        last = self._last
        if last is None or any(name not in data or data[name] is not last[0][name]() for name in names):
            decision = self(data)
            last = self._last = {name: weakref.ref(data[name]) for name in names}, decision
        return last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _wrap_all(imported_only=True)


def watch(loss: Any) -> None:
    """Look at each batch before ``loss`` trains on it, if its settings ask for that, here and where it is sent.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known.
    """
    gate = _Gate(loss.config)
    if gate.needed:
        _wrap_all(imported_only=False)
        _policy_loss(loss).before_step = gate


def unwatch() -> None:
    """Take the wrappers away. Losses that need them refuse batches from then on."""
    for uses in seams.BEFORE_STEP:
        target = getattr(sys.modules.get(uses.module), uses.owner, None)
        for method in uses.methods:
            wrapped = vars(target).get(method) if target is not None else None
            if hasattr(wrapped, _ORIGINAL):
                setattr(target, method, getattr(wrapped, _ORIGINAL))


def _policy_loss(loss: Any) -> Any:
    return getattr(loss, "loss", loss)


def _gate(loss: Any) -> _Gate | None:
    gate = getattr(_policy_loss(loss), "before_step", None)
    return gate if isinstance(gate, _Gate) else None


def _train(original: Any) -> Any:
    signature = inspect.signature(original)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, data = given.arguments["loss_fn"], given.arguments["data"]
        gate = _gate(loss)
        if gate is None:
            return original(self, *args, **kwargs)

        def step(changes: Mapping[str, Tensor]) -> Any:
            # A copy: the trainer goes on with the batch as it came.
            changed = copy.copy(data)
            changed.update(_columns(changes))
            given.arguments["data"], given.arguments["loss_fn"] = changed, loss.for_prepared_batches()
            return original(*given.args, **given.kwargs)

        return _step(self, gate, given.arguments, data, step)

    return train


def _train_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, meta = given.arguments["loss_fn"], given.arguments["meta"]
        gate = _gate(loss)
        if gate is None:
            return original(self, *args, **kwargs)
        data = _read(self, meta, loss)

        def step(changes: Mapping[str, Tensor]) -> Any:
            given.arguments["loss_fn"] = loss.for_prepared_batches()
            columns = _columns(changes)
            self.write_to_dataplane(meta, fields=columns)
            with _afterwards(self.write_to_dataplane, meta, fields={name: data[name] for name in columns}):
                return original(*given.args, **given.kwargs)

        return _step(self, gate, given.arguments, data, step)

    return train_from_meta


def _step(
    policy: Any, gate: _Gate, given: Mapping[str, Any], data: Any, step: Callable[[Mapping[str, Tensor]], Any]
) -> Any:
    if given.get("eval_mode", False):
        return step(gate.open().add(data))
    decision = gate.once(data)
    if decision.train:
        return _reported(step(decision.changes), decision)
    size = given.get("gbs") or policy.cfg["train_global_batch_size"]
    updates = max(1, data["sample_mask"].shape[0] // size)
    return _untrained(given["loss_fn"], [{**data, **decision.changes}], decision, updates=updates)


@contextlib.contextmanager
def _afterwards(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Do it at the end; what failed before it goes first."""
    try:
        yield
    except BaseException:
        try:
            action(*args, **kwargs)
        except Exception:
            _log.exception("%s failed after what follows", getattr(action, "__name__", action))
        raise
    action(*args, **kwargs)


@dataclass
class _OpenStep:
    """A step of the single controller: gradients add up part by part, and its end decides."""

    loss: Any
    review: Review
    parts: list[dict[str, Any]] = field(default_factory=list)


_open: weakref.WeakKeyDictionary[Any, _OpenStep] = weakref.WeakKeyDictionary()


def _begin_train_step(original: Any) -> Any:
    signature = inspect.signature(original)

    def begin_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss = given.arguments["loss_fn"]
        gate = _gate(loss)
        _open.pop(self, None)
        if gate is not None:
            _open[self] = _OpenStep(loss, gate.open())
            given.arguments["loss_fn"] = loss.for_prepared_batches()
        return original(*given.args, **given.kwargs)

    return begin_train_step


def _train_microbatches_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_microbatches_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _open.get(self)
        if step is not None:
            meta = signature.bind(self, *args, **kwargs).arguments["meta"]
            data = _read(self, meta, step.loss)
            changes = step.review.add(data)
            # The data plane forgets a part once it is trained on.
            step.parts.append({**data, **changes})
            self.write_to_dataplane(meta, fields=_columns(changes))
        return original(self, *args, **kwargs)

    return train_microbatches_from_meta


def _finish_train_step(original: Any) -> Any:
    def finish_train_step(self: Any) -> Any:
        step = _open.pop(self, None)
        if step is None:
            return original(self)
        try:
            decision = step.review.decide()
        except BatchVetoError:
            with _afterwards(self.abort_train_step):
                raise
        if decision.train:
            return _reported(original(self), decision)
        self.abort_train_step()
        return _untrained(step.loss, step.parts, decision, updates=1)

    return finish_train_step


def _read(policy: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """What the decision and the loss need of a batch in the data plane."""
    fields = ["generation_logprobs", "prev_logprobs", "advantages", "token_mask", "sample_mask"]
    if loss.reference_policy_kl_penalty:
        fields.append("reference_policy_logprobs")
    return dict(policy.read_from_dataplane(meta, select_fields=fields))


def _columns(changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The data plane's columns are fixed; the loss is told instead.
    return {name: value for name, value in changes.items() if name != PREPARED}


def _untrained(loss: Any, parts: list[dict[str, Any]], decision: Decision, *, updates: int) -> dict[str, Any]:
    """NeMo-RL's training results of a step that was not taken: the loss's metrics, of the policy as it is; gradient 0.

    Args:
        loss: the loss.
        parts: the batch after the changes.
        decision: about it.
        updates: optimiser steps that NeMo-RL would have taken on it; its counts are those of one.
    """
    policy: PolicyLoss = _policy_loss(loss)
    metrics = untrained_metrics(policy, parts, decision)
    # NeMo-RL's workers add these.
    seqs, toks = valid_counts(parts)
    metrics["global_valid_seqs"], metrics["global_valid_toks"] = [float(seqs) / updates], [float(toks) / updates]
    _log.warning("no update on this batch: %s", decision.why)
    return {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": metrics}


def _reported(results: Any, decision: Decision) -> Any:
    results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results


_MAKE: dict[str, Callable[[Any], Any]] = {
    "train": _train,
    "train_from_meta": _train_from_meta,
    "begin_train_step": _begin_train_step,
    "train_microbatches_from_meta": _train_microbatches_from_meta,
    "finish_train_step": _finish_train_step,
}


def _wrap_all(*, imported_only: bool) -> None:
    for uses in seams.BEFORE_STEP:
        if not imported_only or uses.module in sys.modules:
            _wrap(uses)


def _wrap(uses: seams.Uses) -> None:
    try:
        target = getattr(importlib.import_module(uses.module), uses.owner)
    except (ImportError, AttributeError):
        # The data plane has requirements of its own.
        if uses.optional:
            return
        raise
    found = uses.in_memory(target)
    if not uses.present(found):
        return
    uses.require(found, otherwise="Remove loss_fn.batch_veto and set loss_fn.denominator: original")
    for name in uses.methods:
        original = vars(target)[name]
        if not hasattr(original, _ORIGINAL):
            wrapped = functools.wraps(original)(_MAKE[name](original))
            setattr(wrapped, _ORIGINAL, original)
            setattr(target, name, wrapped)
