"""Subclasses of NeMo-RL's policies: pre-step pass, step metrics, records and skipped forward passes.

NeMo-RL's trainers hand a batch

- to ``Policy.train`` (GRPO, asynchronous GRPO, PPO),
- as keys in the data plane to ``TQPolicy.train_from_meta`` (synchronous GRPO),
- part by part, as samples are generated, to ``TQPolicy.train_microbatches_from_meta``, between
  ``TQPolicy.begin_train_step`` and ``TQPolicy.finish_train_step`` (the single controller).

They have ``prev_logprobs`` computed by ``Policy.get_logprobs`` or, where the batch is in the data plane, by
``TQPolicy.get_logprobs_from_meta``; they call neither for anything else. Under ``ratio_anchor: gen``, where nothing
reads ``prev_logprobs``, both return NaN, which makes any unexpected reader visible; under ``audit_fraction`` they
compute a sample of the rows.

The subclasses are importable, so that Ray pickles a policy by reference to its class: the single controller, a process
of its own, receives the policy of the driver.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS
from nemo_geomask.errors import BatchVetoError
from nemo_geomask.hosts.nemo_rl import host_api, training_step
from nemo_geomask.hosts.nemo_rl.facts import DATA_PLANE_POLICY, POLICY
from nemo_geomask.hosts.nemo_rl.source_signature import require_targets
from nemo_geomask.hosts.nemo_rl.training_step import OpenStep, add_metrics, state_of, summarize_metrics
from nemo_geomask.records.flight import choose_by_hash

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of the audit, by policy


class PolicyMethods:
    """Methods for a subclass of NeMo-RL's ``Policy``; they take NeMo-RL's arguments and return NeMo-RL's results.

    Attributes:
        geomask_config: settings of the loss that trains.
        geomask_resumed_step: step after which the run was resumed; 0 if it started from the beginning.
    """

    geomask_config: LossConfig
    geomask_resumed_step: int

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, see NeMo-RL's ``Policy.train``."""
        method, bound = _bind(self, "train", args, kwargs)
        state, data = state_of(self, bound.arguments["loss_fn"]), bound.arguments["data"]
        if state is None:
            return summarize_metrics(method(*bound.args, **bound.kwargs))

        def run_step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            bound.arguments["loss_fn"] = loss
            if changes:
                # The trainer goes on to use its own batch, so a copy is changed.
                changed = bound.arguments["data"] = copy.copy(data)
                changed.update(training_step.data_plane_columns(changes))
            return method(*bound.args, **bound.kwargs)

        return summarize_metrics(training_step.decide_and_run(self, state, bound.arguments, data, run_step))

    def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the ``prev_logprobs`` that the loss reads, see NeMo-RL's ``Policy.get_logprobs``; NaN elsewhere."""
        method, bound = _bind(self, "get_logprobs", args, kwargs)
        if not self.geomask_config.skips_prev:
            return method(*bound.args, **bound.kwargs)
        data = bound.arguments["data"]
        logprobs = torch.full_like(data["input_ids"], torch.nan, dtype=torch.float32)
        if rows := _audited_rows(self, logprobs.shape[0], self.geomask_config.audit_fraction):
            bound.arguments["data"] = data.select_indices(rows)
            logprobs[rows] = method(*bound.args, **bound.kwargs)["logprobs"].to(logprobs)
        return type(data)({"logprobs": logprobs})


class DataPlaneMethods(PolicyMethods):
    """Methods for a subclass of NeMo-RL's ``TQPolicy``, whose batches are in the data plane."""

    read_from_dataplane: Callable[..., Any]
    write_to_dataplane: Callable[..., Any]
    abort_train_step: Callable[..., Any]

    def train_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch in the data plane, see NeMo-RL's ``TQPolicy.train_from_meta``."""
        method, bound = _bind(self, "train_from_meta", args, kwargs)
        loss, meta = bound.arguments["loss_fn"], bound.arguments["meta"]
        state = state_of(self, loss)
        if state is None:
            return summarize_metrics(method(*bound.args, **bound.kwargs))
        data = training_step.read_batch(self, meta, loss)

        def run_step(loss: Any, changes: Mapping[str, Tensor]) -> Any:
            bound.arguments["loss_fn"] = loss
            columns = training_step.data_plane_columns(changes)
            if not columns:
                return method(*bound.args, **bound.kwargs)
            self.write_to_dataplane(meta, fields=columns)
            restored = {name: data[name] for name in columns}
            with training_step.run_at_end(self.write_to_dataplane, meta, fields=restored):
                return method(*bound.args, **bound.kwargs)

        return summarize_metrics(training_step.decide_and_run(self, state, bound.arguments, data, run_step))

    def begin_train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a step of the single controller, see NeMo-RL's ``TQPolicy.begin_train_step``."""
        method, bound = _bind(self, "begin_train_step", args, kwargs)
        loss = bound.arguments["loss_fn"]
        training_step.open_step_of(self, close=True)
        state = state_of(self, loss)
        if state is not None:
            state.open_step = OpenStep(loss, state)
            bound.arguments["loss_fn"] = state.keep_logprobs(state.for_prepared_batches(loss))
        return method(*bound.args, **bound.kwargs)

    def train_microbatches_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a part of a step's batch, see NeMo-RL's ``TQPolicy.train_microbatches_from_meta``."""
        method, bound = _bind(self, "train_microbatches_from_meta", args, kwargs)
        step = training_step.open_step_of(self)
        if step is not None:
            meta = bound.arguments["meta"]
            # The data plane deletes a part once it is trained on, so it is read now.
            data = training_step.read_batch(self, meta, step.loss)
            step.original_parts.append((data, meta))
            if step.open_batch is not None:
                changes = step.open_batch.add(data)
                step.prepared_parts.append({**data, **changes})
                self.write_to_dataplane(meta, fields=training_step.data_plane_columns(changes))
        return method(*bound.args, **bound.kwargs)

    def finish_train_step(self) -> Any:
        """Decide on a step of the single controller and end it, see NeMo-RL's ``TQPolicy.finish_train_step``."""
        method, _ = _bind(self, "finish_train_step", (), {})
        step = training_step.open_step_of(self, close=True)
        if step is None:
            return summarize_metrics(method())
        parts, metas = [data for data, _ in step.original_parts], [meta for _, meta in step.original_parts]
        with step.state.record_step(parts, metas):
            if step.open_batch is None:
                return summarize_metrics(method())
            try:
                decision = step.open_batch.decide()
            except BatchVetoError:
                with training_step.run_at_end(self.abort_train_step):
                    raise
            if decision.train:
                return summarize_metrics(add_metrics(method(), decision))
            self.abort_train_step()
        results = training_step.untrained_results(step.loss, step.prepared_parts, decision, updates=1)
        return summarize_metrics(results)

    def get_logprobs_from_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``prev_logprobs`` as :meth:`get_logprobs` does, for NeMo-RL's ``TQPolicy.get_logprobs_from_meta``."""
        method, bound = _bind(self, "get_logprobs_from_meta", args, kwargs)
        if not self.geomask_config.skips_prev:
            return method(*bound.args, **bound.kwargs)
        meta = bound.arguments["meta"]
        shape = self.read_from_dataplane(meta, select_fields=[GENERATION_LOGPROBS])[GENERATION_LOGPROBS].shape
        self.write_to_dataplane(meta, fields={PREV_LOGPROBS: torch.full(shape, torch.nan)})
        if rows := _audited_rows(self, shape[0], self.geomask_config.audit_fraction):
            bound.arguments["meta"] = meta.subset(rows)
            method(*bound.args, **bound.kwargs)
        return None


def _bind(policy: Any, name: str, args: Any, kwargs: Any) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Return a method of a policy as NeMo-RL's class defines it, and the arguments of a call of it."""
    method = getattr(policy.geomask_base, name).__get__(policy)
    return method, inspect.signature(method).bind(*args, **kwargs)


def _audited_rows(policy: Any, rows: int, fraction: float) -> list[int]:
    """Choose the rows to compute by a hash of row and batch number, as many as the workers can share equally."""
    if not fraction:
        return []
    batch = _calls[policy] = _calls.get(policy, policy.geomask_resumed_step) + 1
    # NeMo-RL splits the rows over data-parallel ranks and microbatches.
    unit = policy.sharding_annotations.get_axis_size("data_parallel") * (policy.cfg.get("logprob_batch_size") or 1)
    return choose_by_hash(batch, rows, min(rows, math.ceil(fraction * rows / unit) * unit))


def convert_policy(policy: Any, config: LossConfig, *, checkpoint: object = None) -> Any:
    """Make a policy of NeMo-RL train with a loss of this package, by replacing its class by a :func:`geomask_class`.

    Args:
        policy: NeMo-RL's ``Policy``, ``TQPolicy``, or an object of a subclass of them.
        config: settings of the loss that will train it.
        checkpoint: path of the checkpoint from which the run was resumed, in a folder ``step_N``; None if it starts
            from the beginning.

    Returns: the policy, which is the same object.

    Raises:
        HostAPIError: the policy differs from the tested versions of NeMo-RL.
    """
    require_targets(host_api.PRESTEP, remedy="Remove loss_fn.name")
    if config.skips_prev:
        require_targets(host_api.PREV_LOGPROBS, remedy="Set loss_fn.ratio_anchor: prev and proximal_policy: recomputed")
    if not hasattr(policy, "geomask_base"):
        policy.__class__ = geomask_class(type(policy))
    policy.geomask_config = config
    steps = re.findall(r"step_(\d+)", str(checkpoint or ""))
    policy.geomask_resumed_step = int(steps[-1]) if steps else 0
    return policy


subclasses: dict[type, type] = {}
"""The subclasses that this process has defined, by the policy class from which they derive."""


def geomask_class(base: type) -> type:
    """Return the subclass of one of NeMo-RL's policy classes that :func:`convert_policy` gives to a policy.

    Its methods are copies of those above, whose classes do not become its bases. Python gives an object another class
    only if both lay out their objects in the same way, which is certain for a single base: NeMo-RL's policies derive
    from ``abc.ABC``, and a further base would give the subclass another layout. A policy class of another package gets
    a subclass too, which Ray pickles by value.
    """
    if base not in subclasses:
        holder = DataPlaneMethods if hasattr(base, "train_from_meta") else PolicyMethods
        functions = [item for cls in reversed(holder.__mro__) for item in vars(cls).items()]
        methods = {name: value for name, value in functions if isinstance(value, types.FunctionType)}
        name = f"Geomask{base.__name__}"
        description = f"NeMo-RL's {base.__name__} for the losses of nemo_geomask."
        attributes = {"geomask_base": base, "__module__": __name__, "__qualname__": name, "__doc__": description}
        subclasses[base] = type(name, (base,), {**methods, **attributes})
    return subclasses[base]


_NEMO_RL_CLASSES = {"GeomaskPolicy": POLICY, "GeomaskTQPolicy": DATA_PLANE_POLICY}
"""NeMo-RL's classes, by the name under which this module has their subclasses."""


def __getattr__(name: str) -> Any:
    # GeomaskPolicy and GeomaskTQPolicy are defined on first use, since they need NeMo-RL.
    if name in _NEMO_RL_CLASSES:
        module, class_name = _NEMO_RL_CLASSES[name]
        return geomask_class(getattr(importlib.import_module(module), class_name))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
