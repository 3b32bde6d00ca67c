"""``loss_fn.record`` in NeMo-RL: record the batch of each step when the driver hands it to the workers.

:mod:`nemo_geomask.hosts.nemo_rl.training_step` calls this module at each step. Values that are not in the batch come
from the data plane, NeMo-RL's storage of batches (rewards and weight versions in the single controller), from the
training loop, see :mod:`nemo_geomask.hosts.nemo_rl.loop_values`, and from the workers (``curr`` and entropies). An
error in this module never fails a step. A value that is not available is null in the record.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl import current_logprobs
from nemo_geomask.hosts.nemo_rl.facts import EXPERT_COUNTS
from nemo_geomask.hosts.nemo_rl.honoured_settings import NO_ENTROPY, lacks_entropy
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.hosts.nemo_rl.loop_values import LoggedRows, give_up_logged_rows, loop_values
from nemo_geomask.records.flight import FlightRecorder, join_parts, recorded_rows
from nemo_geomask.records.record_schema import require_arrow

_log = logging.getLogger("nemo_geomask")
_COLLECT_TIMEOUT = 600.0  # seconds
_T = TypeVar("_T")


def check_recording(config: LossConfig) -> None:
    """Check that the batches of a loss can be recorded, if they are to be.

    Raises:
        ConfigError: ``entropy`` is requested under a log-prob backend that does not compute it.
        MissingDependencyError: pyarrow is missing.
    """
    if config.record is None:
        return
    if lacks_entropy(config):
        raise ConfigError(Problem(("loss_fn.record.entropy",), NO_ENTROPY))
    require_arrow()


def _count_experts(policy: Any) -> dict[str, int]:
    """Return ``experts``, the number of experts in a layer of the policy's model; nothing if its name doesn't tell."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(policy.cfg["model_name"]).get_text_config()
    except Exception:  # no model_name, no network, or a model that needs code of its own: the record then says nothing
        return {}
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    return {"experts": next((count for count in counts if type(count) is int), 0)}


def _describe_engines(policy: Any) -> dict[str, str]:
    """Return ``sampler`` and ``trainer``, the engines with their precision; nothing if the policy's name none."""
    try:
        generation = policy.cfg["generation"]
        backend = generation["backend"]
        sampler = f"{backend} in {generation[f'{backend}_cfg']['precision']}"
        return {"sampler": sampler, "trainer": str(policy.cfg["precision"])}
    except (AttributeError, KeyError, TypeError):
        return {}


class StepRecorder:
    """Recorder of one policy's steps; errors are logged and fail no step.

    Args:
        policy: NeMo-RL's policy.
        config: the settings of the loss; ``record`` is not None.
    """

    def __init__(self, policy: Any, config: LossConfig) -> None:
        names = {"nemo_rl": describe_version(), "policy_class": type(policy).__name__}
        facts = names | _describe_engines(policy) | _count_experts(policy)
        assert config.record is not None
        self._settings = config.record
        # A strong reference would keep the policy alive: training_step holds this recorder in a dictionary with weak
        # keys, whose key is the policy.
        self._policy = weakref.proxy(policy)
        self._steps_done: int = policy.geomask_resumed_step
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
        loop_values.versions = None
        loop_values.uses_data_plane = any(meta is not None for meta in metas)
        give_up_logged_rows()
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
                    logged_rows: Future[LoggedRows] | None = None
                    if has_trained and not all("rewards" in part for part in complete_parts):
                        logged_rows = loop_values.logged_rows = Future()
                    later = functools.partial(_receive, step, references, logged_rows)
                    self._recorder.record(step, *complete_parts, later=later)
                    # At exit, the recorder waits until it has written what is queued. It must not wait for rewards that
                    # nobody will log. This handler runs first, because it is registered last.
                    atexit.unregister(give_up_logged_rows)
                    atexit.register(give_up_logged_rows)
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
        values = {}
        if "rewards" not in part and "total_reward" in part and part["total_reward"].numel() == rows:
            values["rewards"] = part["total_reward"].reshape(rows)
        versions, trained_version = None, self._steps_done
        tags = getattr(meta, "tags", None) or ()
        if tags and all("weight_version" in tag for tag in tags):
            versions = torch.tensor([int(tag["weight_version"]) for tag in tags], device="cpu")
        elif loop_values.versions is not None:
            versions = importlib.import_module("ray").get(loop_values.versions, timeout=_COLLECT_TIMEOUT)
            versions = None if versions is None else torch.tensor(versions, device="cpu")
            if loop_values.trained_version is not None:
                # While asynchronous PPO warms up its critic, versions advance and the policy does not train.
                trained_version = loop_values.trained_version
        elif not loop_values.is_asynchronous:
            # A synchronous loop generates with the weights of the last step, and its weight version is the step number.
            versions = torch.full((rows,), self._steps_done, device="cpu")
        if versions is not None and len(versions) == rows:
            values |= {"weight_version": versions, "staleness": trained_version - versions}
        return values


def _receive(
    step: int, references: list[Any], logged_rows: Future[LoggedRows] | None, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Wait for what is logged and for the workers' log-probs; return values by key; runs in the recorder's thread."""
    values: dict[str, Any] = {}
    logged = LoggedRows() if logged_rows is None else logged_rows.result()
    row_count = len(data["input_ids"])
    if logged.rewards is not None and len(logged.rewards) == row_count:
        values["rewards"] = torch.tensor(logged.rewards, dtype=torch.float32, device="cpu")
    if logged.environments is not None and len(logged.environments) == row_count:
        values["environment"] = logged.environments
    try:
        answers = importlib.import_module("ray").get(references, timeout=_COLLECT_TIMEOUT) if references else []
        return values | current_logprobs.merge_kept(answers, data["input_ids"], data["input_lengths"])
    except Exception as error:
        return _log_missing_curr(step, error, values)


def _log_missing_curr(step: int, error: Exception, fallback: _T) -> _T:
    _log.warning("records: step %d is without curr: %s: %s", step, type(error).__name__, error)
    return fallback


def data_plane_fields(loss: Any, meta: Any) -> list[str]:
    """Return the fields that the record needs to read from the data plane, beside those that training reads."""
    if loss.config.record is None:
        return []
    fields = ["input_ids", "input_lengths"]
    return [*fields, "total_reward"] if "total_reward" in (getattr(meta, "fields", None) or ()) else fields
