"""Pre-step pass, step metrics and records in NeMo-RL, as methods of the policy that hands batches to the workers.

NeMo-RL's trainers hand a batch

- to ``Policy.train`` (GRPO, asynchronous GRPO, PPO),
- as keys in the data plane to ``TQPolicy.train_from_meta`` (synchronous GRPO),
- part by part, as samples are generated, to ``TQPolicy.train_microbatches_from_meta``, between
  ``TQPolicy.begin_train_step`` and ``TQPolicy.finish_train_step`` (the single controller).

:class:`StepMethods` overrides all of them in the subclasses of :mod:`nemo_geomask.hosts.nemo_rl.policies`. Before a
step, they run the pre-step pass of :class:`~nemo_geomask.losses.PrestepPass` (``batch_veto``, ``denominator: kept``,
budgets). After it, they make step metrics out of the metrics of all microbatches and ranks, and record the batch. Calls
with other losses pass through.

The state of a policy is created when its first batch arrives, so that it exists only in the process whose loop trains.
That need not be the driver: the single controller is a process of its own, which receives a pickled policy.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.hosts.nemo_rl.policy_methods import nemo_rl_method
from nemo_geomask.hosts.nemo_rl.step_recorder import StepRecorder, data_plane_fields
from nemo_geomask.losses import Decision, PolicyLoss, PrestepPass
from nemo_geomask.losses.policy_loss import BATCH_SCALAR_PREFIX, PREPARED_KEY
from nemo_geomask.losses.prestep import untrained_metrics, valid_counts
from nemo_geomask.metrics import GEOMASK_PREFIX, summarize_step

__all__ = ["DataPlaneStepMethods", "StepMethods", "needs_batch"]

_log = logging.getLogger("nemo_geomask")


def needs_batch(config: LossConfig) -> bool:
    """Return True if the settings need the complete batch of a step: for the pre-step pass or for its record."""
    return config.needs_prestep_pass or config.record is not None


class StepMethods:
    """Methods for a subclass of NeMo-RL's ``Policy``; it takes NeMo-RL's arguments and returns NeMo-RL's results."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, see NeMo-RL's ``Policy.train``."""
        method = nemo_rl_method(self, "train")
        bound = inspect.signature(method).bind(*args, **kwargs)
        loss, data = bound.arguments["loss_fn"], bound.arguments["data"]
        state = _state_of(self, loss)
        if state is None:
            return _summarize_metrics(method(*args, **kwargs))

        def run_step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            bound.arguments["loss_fn"] = loss
            if changes:
                # The trainer goes on to use its own batch, so a copy is changed.
                changed = bound.arguments["data"] = copy.copy(data)
                changed.update(_data_plane_columns(changes))
            return method(*bound.args, **bound.kwargs)

        return _summarize_metrics(_decide_and_run(self, state, bound.arguments, data, run_step))


class DataPlaneStepMethods(StepMethods):
    """Methods for a subclass of NeMo-RL's ``TQPolicy``, whose batches are in the data plane."""

    def train_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch in the data plane, see NeMo-RL's ``TQPolicy.train_from_meta``."""
        method = nemo_rl_method(self, "train_from_meta")
        bound = inspect.signature(method).bind(*args, **kwargs)
        loss, meta = bound.arguments["loss_fn"], bound.arguments["meta"]
        state = _state_of(self, loss)
        if state is None:
            return _summarize_metrics(method(*args, **kwargs))
        data = _read_batch(self, meta, loss)

        def run_step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            bound.arguments["loss_fn"] = loss
            columns = _data_plane_columns(changes)
            if not columns:
                return method(*bound.args, **bound.kwargs)
            self.write_to_dataplane(meta, fields=columns)  # type: ignore[attr-defined]
            restored = {name: data[name] for name in columns}
            with _run_at_end(self.write_to_dataplane, meta, fields=restored):  # type: ignore[attr-defined]
                return method(*bound.args, **bound.kwargs)

        return _summarize_metrics(_decide_and_run(self, state, bound.arguments, data, run_step))

    def begin_train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a step of the single controller, see NeMo-RL's ``TQPolicy.begin_train_step``."""
        method = nemo_rl_method(self, "begin_train_step")
        bound = inspect.signature(method).bind(*args, **kwargs)
        loss = bound.arguments["loss_fn"]
        _close_step(self)
        state = _state_of(self, loss)
        if state is not None:
            state.open_step = _OpenStep(loss, state)
            bound.arguments["loss_fn"] = state.keep_logprobs(state.for_prepared_batches(loss))
        return method(*bound.args, **bound.kwargs)

    def train_microbatches_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a part of a step's batch, see NeMo-RL's ``TQPolicy.train_microbatches_from_meta``."""
        method = nemo_rl_method(self, "train_microbatches_from_meta")
        state = _states.get(self)
        step = None if state is None else state.open_step
        if step is not None:
            meta = inspect.signature(method).bind(*args, **kwargs).arguments["meta"]
            # The data plane deletes a part once it is trained on, so it is read now.
            data = _read_batch(self, meta, step.loss)
            step.original_parts.append((data, meta))
            if step.open_batch is not None:
                changes = step.open_batch.add(data)
                step.prepared_parts.append({**data, **changes})
                self.write_to_dataplane(meta, fields=_data_plane_columns(changes))  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    def finish_train_step(self) -> Any:
        """Decide on a step of the single controller and end it, see NeMo-RL's ``TQPolicy.finish_train_step``."""
        method = nemo_rl_method(self, "finish_train_step")
        step = _close_step(self)
        if step is None:
            return _summarize_metrics(method())
        parts, metas = [data for data, _ in step.original_parts], [meta for _, meta in step.original_parts]
        with step.state.record_step(parts, metas):
            if step.open_batch is None:
                return _summarize_metrics(method())
            try:
                decision = step.open_batch.decide()
            except BatchVetoError:
                with _run_at_end(self.abort_train_step):  # type: ignore[attr-defined]
                    raise
            if decision.train:
                return _summarize_metrics(_add_metrics(method(), decision))
            self.abort_train_step()  # type: ignore[attr-defined]
        return _summarize_metrics(_untrained_results(step.loss, step.prepared_parts, decision, updates=1))


class _PolicyState:
    """State of one policy under the settings of one loss: consecutive vetoes, the last decision, the open step."""

    def __init__(self, policy: Any, config: LossConfig) -> None:
        self.config = config
        self.prestep = PrestepPass(config)
        self.recorder = None if config.record is None else StepRecorder(policy, config)
        self.open_step: _OpenStep | None = None
        self._last: tuple[dict[str, weakref.ref[Tensor]], Decision] | None = None

    def is_last_batch(self, data: Mapping[str, Any]) -> bool:
        """Return True if the batch is the one of the preceding call, as in the later epochs of PPO."""
        if self._last is None:
            return False
        references, _ = self._last
        return all(name not in data or data[name] is _dereference(references.get(name)) for name in _BATCH_IDENTITY)

    def decide_once(self, data: Mapping[str, Any]) -> Decision:
        """Return the decision on a batch, which is made and counted once."""
        if self._last is None or not self.is_last_batch(data):
            decision = self.prestep(data) if self.prestep.needed else Decision(True)
            self._last = {name: weakref.ref(data[name]) for name in _BATCH_IDENTITY if name in data}, decision
        return self._last[1]

    def for_prepared_batches(self, loss: Any, *changes: Mapping[str, Tensor]) -> Any:
        """Return ``loss`` for batches that went through the pre-step pass, if there is one."""
        return loss.for_prepared_batches(*changes) if self.prestep.needed else loss

    def keep_logprobs(self, loss: Any) -> Any:
        """Return ``loss`` for the next step; the workers keep its log-probs if the step is recorded."""
        return loss if self.recorder is None else self.recorder.keep_logprobs(loss)

    def record_step(
        self, parts: Sequence[Mapping[str, Any]], metas: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Record a step when the context ends, if steps are recorded."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.record_step(parts, metas)


_BATCH_IDENTITY = (PREV_LOGPROBS, GENERATION_LOGPROBS)
"""Keys of the tensors by whose identity a batch is recognised."""


def _dereference(reference: weakref.ref[Tensor] | None) -> Tensor | None:
    return None if reference is None else reference()


_states: weakref.WeakKeyDictionary[Any, _PolicyState] = weakref.WeakKeyDictionary()  # by policy


def _state_of(policy: Any, loss: Any) -> _PolicyState | None:
    """Return the policy's state under the loss's settings; None if the loss needs none."""
    inner = _policy_loss(loss)
    if not isinstance(inner, PolicyLoss) or not needs_batch(inner.config):
        return None
    state = _states.get(policy)
    if state is None or state.config != inner.config:
        state = _states[policy] = _PolicyState(policy, inner.config)
    return state


def _policy_loss(loss: Any) -> Any:
    return getattr(loss, "loss", loss)


class _OpenStep:
    """A step of the single controller: gradients accumulate part by part, and the decision is made at the end."""

    def __init__(self, loss: Any, state: _PolicyState) -> None:
        self.loss = loss
        self.state = state
        self.open_batch = state.prestep.open() if state.prestep.needed else None
        self.prepared_parts: list[dict[str, Any]] = []
        self.original_parts: list[tuple[dict[str, Any], Any]] = []  # each with its keys in the data plane


def _decide_and_run(
    policy: Any,
    state: _PolicyState,
    arguments: Mapping[str, Any],
    data: Any,
    run_step: Callable[[Any, Mapping[str, Tensor]], Any],
) -> Any:
    """Run the pre-step pass on a complete batch, and then the step if it is to be taken.

    Args:
        policy: NeMo-RL's.
        state: of the policy.
        arguments: of NeMo-RL's method, by name.
        data: the batch.
        run_step: calls NeMo-RL's method with a loss and changes to the batch.
    """
    loss, prestep = arguments["loss_fn"], state.prestep
    if arguments.get("eval_mode", False):
        changes = prestep.changes(data) if prestep.needed else {}
        return run_step(state.for_prepared_batches(loss, changes), changes)
    is_first_epoch = not state.is_last_batch(data)
    with state.record_step([data], [arguments.get("meta")]) if is_first_epoch else contextlib.nullcontext():
        decision = state.decide_once(data)
        if decision.train:
            prepared_loss = state.for_prepared_batches(loss, decision.changes)
            if is_first_epoch:
                prepared_loss = state.keep_logprobs(prepared_loss)
            return _add_metrics(run_step(prepared_loss, decision.changes), decision)
    size = arguments.get("gbs") or policy.cfg["train_global_batch_size"]
    updates = max(1, data["sample_mask"].shape[0] // size)
    return _untrained_results(loss, [{**data, **decision.changes}], decision, updates=updates)


@contextlib.contextmanager
def _run_at_end(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Call ``action`` when the context ends; if both fail, raise the context's error and log that of ``action``."""
    try:
        yield
    except BaseException:
        try:
            action(*args, **kwargs)
        except Exception:
            _log.exception("%s failed too, after the error that is raised below", getattr(action, "__name__", action))
        raise
    action(*args, **kwargs)


def _close_step(policy: Any) -> _OpenStep | None:
    """Close the policy's open step and return it; None if there is none."""
    state = _states.get(policy)
    if state is None:
        return None
    step, state.open_step = state.open_step, None
    return step


def _read_batch(policy: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """Read from the data plane what the pre-step pass, the loss and the record need of a batch."""
    fields = [GENERATION_LOGPROBS, "advantages", TOKEN_MASK, "sample_mask", *data_plane_fields(loss, meta)]
    if loss.config.needs_prev or loss.config.audit_fraction:
        fields.append(PREV_LOGPROBS)
    if loss.reference_policy_kl_penalty:
        fields.append(REFERENCE_POLICY_LOGPROBS)
    return dict(policy.read_from_dataplane(meta, select_fields=fields))


def _data_plane_columns(changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the changes to columns of the data plane, which are fixed; the loss itself carries the others."""
    return {
        name: value
        for name, value in changes.items()
        if name != PREPARED_KEY and not name.startswith(BATCH_SCALAR_PREFIX)
    }


def _untrained_results(loss: Any, parts: list[dict[str, Any]], decision: Decision, *, updates: int) -> dict[str, Any]:
    """Build NeMo-RL's training results of a step that is not taken: metrics of the unchanged policy, gradient norm 0.

    Args:
        loss: the loss.
        parts: the batch after the changes, whole or in parts.
        decision: on the batch.
        updates: number of optimiser steps that NeMo-RL would have taken; its counts are those of one step.
    """
    policy_loss: PolicyLoss = _policy_loss(loss)
    metrics = untrained_metrics(policy_loss, parts, decision)
    # In a step that is taken, NeMo-RL's workers add these.
    seqs, toks = valid_counts(parts)
    metrics["global_valid_seqs"], metrics["global_valid_toks"] = [float(seqs) / updates], [float(toks) / updates]
    _log.warning("no update on this batch: %s", decision.reason)
    return {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": metrics}


def _add_metrics(results: Any, decision: Decision) -> Any:
    if decision.metrics:
        results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results


def _summarize_metrics(results: Any) -> Any:
    """Summarize this package's metrics over the step.

    NeMo-RL's loops add up the microbatches' values of every metric that they do not know.
    """
    if isinstance(results, dict) and "all_mb_metrics" in results:
        metrics = results["all_mb_metrics"]
        geomask_metrics = {
            name: max(values) if name.endswith("_max") else sum(values)
            for name, values in metrics.items()
            if name.startswith(GEOMASK_PREFIX) and values
        }
        host_metrics = {name: values for name, values in metrics.items() if name not in geomask_metrics}
        step_metrics = {name: [value] for name, value in summarize_step(geomask_metrics).items()}
        results["all_mb_metrics"] = host_metrics | step_metrics
    return results
