"""``batch_veto``, ``denominator: kept``, budgets and ``record`` in NeMo-RL, and a whole step's metrics: a look at the
batch before it is trained on, and at what it gave.

NeMo-RL's trainers hand the batch of a step to ``Policy.train`` (GRPO, async GRPO, PPO), or the keys of one that lies in
its data plane to ``TQPolicy.train_from_meta`` (synchronous GRPO), or those of its parts, as they are generated, to
``TQPolicy.train_microbatches_from_meta`` between the beginning of a step and its end (the single controller). All are
wrapped once a loss asks for it, in the driver; calls with other losses pass through. They return the metrics of all
microbatches and ranks: there those of the step are made of them.

The single controller is a process of its own, to which the driver sends its policy. There nothing is changed: a policy
that is sent arrives as one of a subclass whose methods are the wrapped ones. What is counted belongs to the policy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.integrations.nemo_rl import patch, record, seams, source
from nemo_geomask.losses import BeforeStep, Decision, PolicyLoss
from nemo_geomask.losses.loss import BOUND, PREPARED
from nemo_geomask.losses.prestep import untrained_metrics, valid_counts
from nemo_geomask.metrics import OWN, summarized

__all__ = ["watch"]

_log = logging.getLogger("nemo_geomask")
_WATCHES = "_nemo_geomask_watches"


def watch(loss: Any) -> None:
    """Look at each batch before ``loss`` trains on it, if its settings ask for that.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known; nothing is changed.
    """
    if _asks(loss.config):
        patch.apply_all(_patches())
    elif loss.config.metrics == "full":
        try:
            patch.apply_all(_patches())
        except (source.SeamError, ImportError, AttributeError) as error:
            _log.warning("this package's metrics stay sums over microbatches, without quantiles, since %s", error)


def _asks(config: LossConfig) -> bool:
    return config.looks_before_step or config.record is not None


def _patches() -> Iterator[patch.Patch]:
    otherwise = "Remove loss_fn.batch_veto, record and masks with a budget, set loss_fn.denominator: original"
    for uses, target in source.targets(seams.BEFORE_STEP, otherwise=otherwise):
        for name in uses.methods:
            yield patch.attribute(target, name, functools.partial(_watching, name))
        if "begin_train_step" in uses.methods:
            yield patch.carried(target, "before_step", _watched)


class _Watcher:
    """What one policy's batches were found to be under one loss's settings: vetoes in a row, the step that is open."""

    def __init__(self, policy: Any, config: LossConfig) -> None:
        self.config = config
        self.before_step = BeforeStep(config)
        self.steps = None if config.record is None else record.PolicySteps(policy, config)
        self.open: _OpenStep | None = None
        self._last: tuple[dict[str, weakref.ref[Tensor]], Decision] | None = None

    def seen(self, data: Mapping[str, Any]) -> bool:
        """Whether it is the batch of the step before, on which PPO trains for several epochs."""
        return self._last is not None and all(
            name not in data or data[name] is self._last[0].get(name, _gone)() for name in _COMPARED
        )

    def once(self, data: Mapping[str, Any]) -> Decision:
        """The decision on a batch, which is judged and counted once."""
        if self._last is None or not self.seen(data):
            decision = self.before_step(data) if self.before_step.needed else Decision(True)
            self._last = {name: weakref.ref(data[name]) for name in _COMPARED if name in data}, decision
        return self._last[1]

    def prepared(self, loss: Any, *changes: Mapping[str, Tensor]) -> Any:
        """``loss`` for batches that are looked at, where they are."""
        return loss.for_prepared_batches(*changes) if self.before_step.needed else loss

    def keeping(self, loss: Any) -> Any:
        """``loss`` as the workers need it for the records of the step."""
        return loss if self.steps is None else self.steps.keeping(loss)

    def recorded(
        self, parts: Sequence[Mapping[str, Any]], metas: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """The step on a batch, recorded at its end where that is asked for."""
        return contextlib.nullcontext() if self.steps is None else self.steps.step(parts, metas)


_COMPARED = ("prev_logprobs", "generation_logprobs")


def _gone() -> None:
    """A reference to nothing."""


_watchers: weakref.WeakKeyDictionary[Any, _Watcher] = weakref.WeakKeyDictionary()


def _watcher(policy: Any, loss: Any) -> _Watcher | None:
    """Of the policy, where the loss asks for one."""
    inner = _policy_loss(loss)
    if not isinstance(inner, PolicyLoss) or not _asks(inner.config):
        return None
    watcher = _watchers.get(policy)
    if watcher is None or watcher.config != inner.config:
        watcher = _watchers[policy] = _Watcher(policy, inner.config)
    return watcher


def _policy_loss(loss: Any) -> Any:
    return getattr(loss, "loss", loss)


class _OpenStep:
    """A step of the single controller: gradients add up part by part, and its end decides."""

    def __init__(self, loss: Any, watcher: _Watcher) -> None:
        self.loss = loss
        self.watcher = watcher
        self.review = watcher.before_step.open() if watcher.before_step.needed else None
        self.parts: list[dict[str, Any]] = []
        self.taken: list[tuple[dict[str, Any], Any]] = []  # as they came, with their keys


def _train(original: Any) -> Any:
    signature = inspect.signature(original)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, data = given.arguments["loss_fn"], given.arguments["data"]
        watcher = _watcher(self, loss)
        if watcher is None:
            return original(self, *args, **kwargs)

        def step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            given.arguments["loss_fn"] = loss
            if changes:
                # A copy: the trainer goes on with the batch as it came.
                changed = given.arguments["data"] = copy.copy(data)
                changed.update(_columns(changes))
            return original(*given.args, **given.kwargs)

        return _step(self, watcher, given.arguments, data, step)

    return train


def _train_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss, meta = given.arguments["loss_fn"], given.arguments["meta"]
        watcher = _watcher(self, loss)
        if watcher is None:
            return original(self, *args, **kwargs)
        data = _read(self, meta, loss)

        def step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            given.arguments["loss_fn"] = loss
            columns = _columns(changes)
            if not columns:
                return original(*given.args, **given.kwargs)
            self.write_to_dataplane(meta, fields=columns)
            with _afterwards(self.write_to_dataplane, meta, fields={name: data[name] for name in columns}):
                return original(*given.args, **given.kwargs)

        return _step(self, watcher, given.arguments, data, step)

    return train_from_meta


def _step(
    policy: Any,
    watcher: _Watcher,
    given: Mapping[str, Any],
    data: Any,
    step: Callable[[Any, Mapping[str, Tensor]], Any],
) -> Any:
    loss, looks = given["loss_fn"], watcher.before_step
    if given.get("eval_mode", False):
        changes = looks.changes(data) if looks.needed else {}
        return step(watcher.prepared(loss, changes), changes)
    first = not watcher.seen(data)
    with watcher.recorded([data], [given.get("meta")]) if first else contextlib.nullcontext():
        decision = watcher.once(data)
        if decision.train:
            sent = watcher.prepared(loss, decision.changes)
            return _reported(step(watcher.keeping(sent) if first else sent, decision.changes), decision)
    size = given.get("gbs") or policy.cfg["train_global_batch_size"]
    updates = max(1, data["sample_mask"].shape[0] // size)
    return _untrained(loss, [{**data, **decision.changes}], decision, updates=updates)


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


def _begin_train_step(original: Any) -> Any:
    signature = inspect.signature(original)

    def begin_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        loss = given.arguments["loss_fn"]
        _left(self)
        watcher = _watcher(self, loss)
        if watcher is not None:
            watcher.open = _OpenStep(loss, watcher)
            given.arguments["loss_fn"] = watcher.keeping(watcher.prepared(loss))
        return original(*given.args, **given.kwargs)

    return begin_train_step


def _train_microbatches_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    def train_microbatches_from_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watchers.get(self)
        step = None if watcher is None else watcher.open
        if step is not None:
            meta = signature.bind(self, *args, **kwargs).arguments["meta"]
            data = _read(self, meta, step.loss)
            # The data plane forgets a part once it is trained on.
            step.taken.append((data, meta))
            if step.review is not None:
                changes = step.review.add(data)
                step.parts.append({**data, **changes})
                self.write_to_dataplane(meta, fields=_columns(changes))
        return original(self, *args, **kwargs)

    return train_microbatches_from_meta


def _finish_train_step(original: Any) -> Any:
    def finish_train_step(self: Any) -> Any:
        step = _left(self)
        if step is None:
            return original(self)
        with step.watcher.recorded([data for data, _ in step.taken], [meta for _, meta in step.taken]):
            if step.review is None:
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


def _left(policy: Any) -> _OpenStep | None:
    """The step that was open and is no more."""
    watcher = _watchers.get(policy)
    if watcher is None:
        return None
    step, watcher.open = watcher.open, None
    return step


def _read(policy: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """What the decision and the loss need of a batch in the data plane."""
    fields = ["generation_logprobs", "advantages", "token_mask", "sample_mask", *record.fields(loss, meta)]
    if loss.config.needs_prev or loss.config.audit_fraction:
        fields.append("prev_logprobs")
    if loss.reference_policy_kl_penalty:
        fields.append("reference_policy_logprobs")
    return dict(policy.read_from_dataplane(meta, select_fields=fields))


def _columns(changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The data plane's columns are fixed; the loss is told instead.
    return {name: value for name, value in changes.items() if name != PREPARED and not name.startswith(BOUND)}


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
    if decision.metrics:
        results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results


_MAKE: dict[str, Callable[[Any], Any]] = {
    "train": _train,
    "train_from_meta": _train_from_meta,
    "begin_train_step": _begin_train_step,
    "train_microbatches_from_meta": _train_microbatches_from_meta,
    "finish_train_step": _finish_train_step,
}


def _summarizing(method: Callable[..., Any]) -> Callable[..., Any]:
    """With this package's metrics as those of the whole step: NeMo-RL's loops add up whatever they do not know."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        results = method(*args, **kwargs)
        if isinstance(results, dict) and "all_mb_metrics" in results:
            found = results["all_mb_metrics"]
            own = {
                name: max(values) if name.endswith("_max") else sum(values)
                for name, values in found.items()
                if name.startswith(OWN) and values
            }
            others = {name: values for name, values in found.items() if name not in own}
            results["all_mb_metrics"] = others | {name: [value] for name, value in summarized(own).items()}
        return results

    return whole


def _watching(name: str, original: Any) -> Any:
    wrapped = functools.wraps(original)(_summarizing(_MAKE[name](original)))
    setattr(wrapped, _WATCHES, True)
    return wrapped


def _watched(kind: type) -> dict[str, Any]:
    """The wrapped methods, of those that are not wrapped already."""
    methods = {name: getattr(kind, name) for uses in seams.BEFORE_STEP for name in uses.methods if hasattr(kind, name)}
    return {name: _watching(name, method) for name, method in methods.items() if not hasattr(method, _WATCHES)}
