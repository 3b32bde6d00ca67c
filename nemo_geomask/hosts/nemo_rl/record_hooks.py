"""``loss_fn.record`` in NeMo-RL: record the batch of each step when the driver hands it to the workers.

:mod:`nemo_geomask.hosts.nemo_rl.prestep_hooks` calls this module at each step. A record contains values that NeMo-RL
does not put into the training batch. They are taken from these places:

- Rewards: from the arguments of the advantage estimator's preceding call. In the single controller, which is a process
  of its own: from the data plane, NeMo-RL's storage of batches.
- Versions of the weights that generated each sample: from the tags of the data plane, or from the replay buffer of the
  asynchronous loops. The buffer's ``sample`` does not return the versions, so a function that runs in the buffer's
  actor adds them to the groups that it returns. Synchronous loops generate with the weights of the preceding step.

An error in this module never fails a step. A value that is not available is null in the record.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl import current_logprobs, host_api, patch, replay_stamp
from nemo_geomask.hosts.nemo_rl.facts import NO_ENTROPY, lacks_entropy
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.hosts.nemo_rl.resumed_step import resumed_step
from nemo_geomask.hosts.nemo_rl.source_signature import import_targets
from nemo_geomask.records.flight import FlightRecorder, join_parts, recorded_rows
from nemo_geomask.records.record_schema import require_arrow

__all__ = ["StepRecorder", "attach_recorder", "data_plane_fields"]

_log = logging.getLogger("nemo_geomask")
_VERSION_KEY = "geomask_weight_version"
_COLLECT_TIMEOUT = 600.0  # seconds
_T = TypeVar("_T")


def attach_recorder(loss: Any) -> None:
    """Patch advantage estimators and replay buffers to observe rewards and weight versions, if ``loss`` is recorded.

    Raises:
        ConfigError: ``entropy`` is requested under a log-prob backend that does not compute it.
        MissingDependencyError: pyarrow is missing.
        HostAPIError: NeMo-RL's advantage estimators differ from the tested versions; nothing is changed.
    """
    if loss.config.record is None:
        return
    if lacks_entropy(loss.config):
        raise ConfigError(Problem(("loss_fn.record.entropy",), NO_ENTROPY))
    require_arrow()
    patch.apply_all(_patches())


def _patches() -> Iterator[patch.Patch]:
    for _, estimator in import_targets(host_api.RECORD, otherwise="Remove loss_fn.record"):
        yield patch.attribute(estimator, "compute_advantage", _wrap_compute_advantage)
    buffers = importlib.import_module(host_api.REPLAY_BUFFERS)
    if hasattr(buffers, "ReplayBuffer"):
        yield patch.attribute(buffers, "ReplayBuffer", _ReplayBuffer)


@dataclass
class _Observed:
    """Values that this process's training loop computed for the batch on which it trains next."""

    rewards: Tensor | None = None
    versions: Tensor | None = None  # of the weights that generated each row
    is_asynchronous: bool = False


_observed = _Observed()


def _wrap_compute_advantage(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute_advantage(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        _observed.rewards = arguments.get("rewards")
        _observed.versions = (arguments.get("repeated_batch") or {}).get(_VERSION_KEY)
        return original(*args, **kwargs)

    return compute_advantage


class _ReplayBuffer:
    """Proxy of the replay buffer's Ray actor class; ``sample`` of its handles also returns weight versions."""

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **options: Any) -> _ReplayBuffer:
        return _ReplayBuffer(self._actor_class.options(**options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        _observed.is_asynchronous = True
        handle = self._actor_class.remote(*args, **kwargs)
        # Only this handle, which the training loop uses, is changed. Pickled copies are plain handles again.
        handle.sample = _SampleMethod(handle)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)


class _SampleMethod:
    """Replacement for the ``sample`` method of the replay buffer's handle."""

    def __init__(self, handle: Any) -> None:
        self._ray_call = handle.__ray_call__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        cloudpickle = importlib.import_module("ray").cloudpickle
        # The function is pickled by value, because this package may be missing in the buffer's process.
        cloudpickle.register_pickle_by_value(replay_stamp)
        try:
            return self._ray_call.remote(replay_stamp.sample_with_versions, _VERSION_KEY, args, kwargs)
        finally:
            cloudpickle.unregister_pickle_by_value(replay_stamp)


class StepRecorder:
    """Recorder of one policy's steps; errors are logged and fail no step.

    Args:
        policy: NeMo-RL's policy.
        config: the settings of the loss; ``record`` is not None.
    """

    def __init__(self, policy: Any, config: LossConfig) -> None:
        facts = {"nemo_rl": describe_version(), "policy_class": type(policy).__name__}
        assert config.record is not None
        self._settings = config.record
        # A strong reference would keep the policy alive: prestep_hooks holds this recorder in a dictionary with weak
        # keys, whose key is the policy.
        self._policy = weakref.proxy(policy)
        self._steps_done = resumed_step(policy)
        self._make_recorder = functools.partial(FlightRecorder, config, facts=facts)

    @functools.cached_property
    def _recorder(self) -> FlightRecorder:
        return self._make_recorder()

    def keep_logprobs(self, loss: Any) -> Any:
        """Return the loss to send to the workers: one that keeps its log-probs if the next step is recorded."""
        step = self._steps_done + 1
        try:
            return current_logprobs.keep_logprobs(loss, step) if self._recorder.takes(step) else loss
        except Exception:
            _log.exception("records: step %d will be without curr", step)
            return loss

    @contextlib.contextmanager
    def record_step(self, parts: Sequence[Mapping[str, Any]], metas: Sequence[Any]) -> Iterator[None]:
        """Record a step when the context ends, even if it ends with an error.

        Args:
            parts: the batch as a list of parts, or of one mapping that is the whole batch.
            metas: for each part, NeMo-RL's description of its keys in the data plane; None if it is not stored there.
        """
        step = self._steps_done + 1
        try:
            complete_parts = [
                {**part, **self._missing_values(part, meta)} for part, meta in zip(parts, metas, strict=True)
            ]
        except Exception:
            complete_parts = []
            _log.exception("records: step %d lost", step)
        _observed.rewards = _observed.versions = None
        has_trained = False
        try:
            yield
            has_trained = True
        finally:
            self._steps_done = step
            try:
                if complete_parts and self._recorder.takes(step):
                    # Ray workers run calls in order: this call is queued before the next step, whose log-probs would
                    # replace those of this step.
                    references = self._collect(step, complete_parts) if has_trained else []
                    self._recorder.record(step, *complete_parts, later=functools.partial(_receive, step, references))
            except Exception:
                _log.exception("records: step %d lost", step)

    def _collect(self, step: int, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Ask the workers for the log-probs that they kept of the recorded rows; return Ray references, unawaited."""
        try:
            requested = None
            if self._settings.fraction < 1:
                batch = join_parts(parts)
                rows = recorded_rows(self._settings, step, batch)
                requested = current_logprobs.fingerprints(batch["input_ids"][rows], batch["input_lengths"][rows])
            return current_logprobs.collect_from_workers(self._policy, step, requested)
        except Exception as error:
            return _log_missing_curr(step, error, [])

    def _missing_values(self, part: Mapping[str, Any], meta: Any) -> dict[str, Tensor]:
        """Return those of rewards, weight versions and staleness that are known for a part of the batch."""
        rows = len(part["sample_mask"])
        rewards = part["total_reward"] if _observed.rewards is None and "total_reward" in part else _observed.rewards
        versions = _observed.versions
        tags = getattr(meta, "tags", None) or ()
        if tags and all("weight_version" in tag for tag in tags):
            versions = torch.tensor([int(tag["weight_version"]) for tag in tags])
        elif versions is None and not _observed.is_asynchronous:
            # A synchronous loop generates with the weights of the last step, and its weight version is the step number.
            versions = torch.full((rows,), self._steps_done)
        values = {}
        if rewards is not None and rewards.numel() == rows:
            values["rewards"] = rewards.reshape(rows)
        if versions is not None and len(versions) == rows:
            values |= {"weight_version": versions, "staleness": self._steps_done - versions}
        return values


def _receive(step: int, references: list[Any], data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wait for the log-probs from the workers and merge them into tensors [B, T]; runs in the recorder's thread."""
    try:
        answers = importlib.import_module("ray").get(references, timeout=_COLLECT_TIMEOUT) if references else []
        return current_logprobs.merge_kept(answers, data["input_ids"], data["input_lengths"])
    except Exception as error:
        return _log_missing_curr(step, error, {})


def _log_missing_curr(step: int, error: Exception, fallback: _T) -> _T:
    _log.warning("records: step %d is without curr: %s: %s", step, type(error).__name__, error)
    return fallback


def data_plane_fields(loss: Any, meta: Any) -> list[str]:
    """Return the fields that the record needs to read from the data plane, beside those that training reads."""
    if loss.config.record is None:
        return []
    fields = ["input_ids", "input_lengths"]
    return [*fields, "total_reward"] if "total_reward" in (getattr(meta, "fields", None) or ()) else fields
