"""One step of a policy: its pre-step pass, its record and its metrics, whichever way NeMo-RL hands over the batch.

Before a step, the pre-step pass of :class:`~nemo_geomask.losses.PrestepPass` runs (``batch_veto``, ``denominator:
kept``, budgets). After it, the metrics of all microbatches and ranks become step metrics, and the batch is recorded.

The state of a policy is created when its first batch arrives, so that it exists only in the process whose loop trains.
That need not be the driver: the single controller is a process of its own, which receives a pickled policy.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.hosts.nemo_rl.step_recorder import StepRecorder, data_plane_fields
from nemo_geomask.losses import Decision, PolicyLoss, PrestepPass
from nemo_geomask.losses.policy_loss import BATCH_SCALAR_PREFIX, PREPARED_KEY
from nemo_geomask.losses.prestep import untrained_metrics, valid_counts
from nemo_geomask.metrics import GEOMASK_PREFIX, summarize_step

_log = logging.getLogger("nemo_geomask")


class PolicyState:
    """State of one policy under the settings of one loss: consecutive vetoes, the last decision, the open step."""

    def __init__(self, policy: Any, config: LossConfig) -> None:
        self.config = config
        self.prestep = PrestepPass(config)
        self.recorder = None if config.record is None else StepRecorder(policy, config)
        self.open_step: OpenStep | None = None
        self._last: tuple[dict[str, weakref.ref[Tensor]], Decision] | None = None

    def is_last_batch(self, data: Mapping[str, Any]) -> bool:
        """Return True if the batch is the one of the preceding call, as in the later epochs of PPO."""
        if self._last is None:
            return False
        references, _ = self._last
        return all(name not in data or data[name] is references.get(name, lambda: None)() for name in _BATCH_IDENTITY)

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


_states: weakref.WeakKeyDictionary[Any, PolicyState] = weakref.WeakKeyDictionary()  # by policy


def state_of(policy: Any, loss: Any) -> PolicyState | None:
    """Return the policy's state under the loss's settings; None if the loss needs none."""
    inner = _policy_loss(loss)
    if not isinstance(inner, PolicyLoss) or not (inner.config.needs_prestep_pass or inner.config.record is not None):
        return None
    state = _states.get(policy)
    if state is None or state.config != inner.config:
        state = _states[policy] = PolicyState(policy, inner.config)
    return state


def stop_recording(policy: Any) -> None:
    """Record no further step of a policy."""
    if (state := _states.get(policy)) is not None:
        state.recorder = None


def _policy_loss(loss: Any) -> Any:
    return getattr(loss, "loss", loss)


class OpenStep:
    """A step of the single controller: gradients accumulate part by part, and the decision is made at the end."""

    def __init__(self, loss: Any, state: PolicyState) -> None:
        self.loss = loss
        self.state = state
        self.open_batch = state.prestep.open() if state.prestep.needed else None
        self.prepared_parts: list[dict[str, Any]] = []
        self.original_parts: list[tuple[dict[str, Any], Any]] = []  # each with its keys in the data plane


def decide_and_run(
    policy: Any,
    state: PolicyState,
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
            return add_metrics(run_step(prepared_loss, decision.changes), decision)
    size = arguments.get("gbs") or policy.cfg["train_global_batch_size"]
    updates = max(1, data["sample_mask"].shape[0] // size)
    return untrained_results(loss, [{**data, **decision.changes}], decision, updates=updates)


@contextlib.contextmanager
def run_at_end(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
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


def open_step_of(policy: Any, *, close: bool = False) -> OpenStep | None:
    """Return the policy's open step, None if there is none; with ``close``, the policy then has none any more."""
    state = _states.get(policy)
    if state is None:
        return None
    step = state.open_step
    if close:
        state.open_step = None
    return step


def read_batch(policy: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """Read from the data plane what the pre-step pass, the loss and the record need of a batch."""
    fields = [GENERATION_LOGPROBS, "advantages", TOKEN_MASK, "sample_mask"]
    if (state := state_of(policy, loss)) is not None and state.recorder is not None:
        fields += data_plane_fields(loss, meta)
    if loss.config.needs_prev or loss.config.audit_fraction:
        fields.append(PREV_LOGPROBS)
    if loss.reference_policy_kl_penalty:
        fields.append(REFERENCE_POLICY_LOGPROBS)
    return dict(policy.read_from_dataplane(meta, select_fields=fields))


def data_plane_columns(changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the changes to columns of the data plane, which are fixed; the loss itself carries the others."""
    return {
        name: value
        for name, value in changes.items()
        if name != PREPARED_KEY and not name.startswith(BATCH_SCALAR_PREFIX)
    }


def untrained_results(loss: Any, parts: list[dict[str, Any]], decision: Decision, *, updates: int) -> dict[str, Any]:
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


def add_metrics(results: Any, decision: Decision) -> Any:
    """Add the metrics of the pre-step pass to NeMo-RL's training results, and return these."""
    if decision.metrics:
        results["all_mb_metrics"].update({name: [value] for name, value in decision.metrics.items()})
    return results


def summarize_metrics(results: Any) -> Any:
    """Summarize this package's metrics over the step in NeMo-RL's training results, and return these.

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
