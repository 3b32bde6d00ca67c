"""``loss_fn.record`` in NeMo-RL: each step's batch, where the driver hands it to the workers, see :mod:`.before_step`.

What that batch lacks comes from elsewhere: rewards from the call of the advantage estimator before it (where the batch
lies in the data plane of the single controller, from there), the version of the weights that sampled from the replay
buffer of the asynchronous loops, whose answer says nothing of it: a function that is called in the buffer's actor adds
it to each group. Nothing of this can fail a step; what is not found is null.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_geomask.checks.gates import NO_ENTROPY, lacks_entropy
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.integrations.nemo_rl import current, patch, seams, source, stamp
from nemo_geomask.records.flight import FlightRecorder, chosen_rows, joined
from nemo_geomask.records.schema import require_arrow

__all__ = ["PolicySteps", "fields", "follow", "last_step", "remember_last_step"]

_log = logging.getLogger("nemo_geomask")
_BUFFERS = "nemo_rl.algorithms.async_utils"
_VERSION = "geomask_weight_version"
_PATIENCE = 600.0  # seconds
_LAST_STEP = "_nemo_geomask_last_step"
_T = TypeVar("_T")


def follow(loss: Any) -> None:
    """Listen to what a batch lacks, if ``loss`` is to be recorded.

    Raises:
        ConfigError: ``entropy`` under a log-prob backend that doesn't compute it.
        MissingDependencyError: there is no pyarrow.
        SeamError: NeMo-RL's advantage estimators are not as known; nothing is changed.
    """
    if loss.config.record is None:
        return
    if lacks_entropy(loss.config):
        raise ConfigError(Problem(("loss_fn.record.entropy",), NO_ENTROPY))
    require_arrow()
    patch.apply_all(_patches())


def _patches() -> Iterator[patch.Patch]:
    for _, kind in source.targets(seams.RECORD, otherwise="Remove loss_fn.record"):
        yield patch.attribute(kind, "compute_advantage", _listening)
    buffers = importlib.import_module(_BUFFERS)
    if hasattr(buffers, "ReplayBuffer"):
        yield patch.attribute(buffers, "ReplayBuffer", _ReplayBuffer)


class _Heard:
    """What the loop in this process said of its next batch."""

    rewards: Tensor | None = None
    versions: Tensor | None = None
    asynchronous = False


def _listening(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute_advantage(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        _Heard.rewards = given.get("rewards")
        _Heard.versions = (given.get("repeated_batch") or {}).get(_VERSION)
        return original(*args, **kwargs)

    return compute_advantage


class _ReplayBuffer:
    """Stands in for Ray's actor class of the replay buffer: samples come with their weights' versions."""

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **options: Any) -> _ReplayBuffer:
        return _ReplayBuffer(self._actor_class.options(**options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        _Heard.asynchronous = True
        handle = self._actor_class.remote(*args, **kwargs)
        # On this handle alone, which is the training loop's; one that is pickled is Ray's own again.
        handle.sample = _Draw(handle)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)


class _Draw:
    def __init__(self, handle: Any) -> None:
        self._call = handle.__ray_call__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        cloudpickle = importlib.import_module("ray").cloudpickle
        # The function must arrive where this package is missing, so it travels as code.
        cloudpickle.register_pickle_by_value(stamp)
        try:
            return self._call.remote(stamp.sample, _VERSION, args, kwargs)
        finally:
            cloudpickle.unregister_pickle_by_value(stamp)


class PolicySteps:
    """Records the steps of one policy; a fault is logged and fails nothing.

    Args:
        policy: NeMo-RL's.
        config: the settings in force, with ``record``.
    """

    def __init__(self, policy: Any, config: LossConfig) -> None:
        facts = {"nemo_rl": source.version(), "policy_class": type(policy).__name__}
        self._taken = last_step(policy)
        assert config.record is not None
        self._settings = config.record
        self._policy = weakref.proxy(policy)  # which is what this is kept for
        self._make = functools.partial(FlightRecorder, config, facts=facts)

    @functools.cached_property
    def _recorder(self) -> FlightRecorder:
        return self._make()

    def keeping(self, loss: Any) -> Any:
        """``loss`` for the next step: if that is recorded, the workers keep the log-probs that they call it with."""
        try:
            return current.keeping(loss, self._taken + 1) if self._recorder.takes(self._taken + 1) else loss
        except Exception:
            _log.exception("records: step %d will be without curr", self._taken + 1)
            return loss

    @contextlib.contextmanager
    def step(self, parts: Sequence[Mapping[str, Any]], metas: Sequence[Any]) -> Iterator[None]:
        """A step on a batch, whole or in parts, which is recorded at its end, however it ends.

        Args:
            parts: of the batch.
            metas: their keys in the data plane, or None.
        """
        step = self._taken + 1
        try:
            known = [{**part, **self._beside(part, meta)} for part, meta in zip(parts, metas, strict=True)]
        except Exception:
            known = []
            _log.exception("records: step %d lost", step)
        _Heard.rewards = _Heard.versions = None
        trained = False
        try:
            yield
            trained = True
        finally:
            self._taken = step
            try:
                if known and self._recorder.takes(step):
                    # What comes next waits behind this in the workers, so they still have it.
                    asked = self._ask(step, known) if trained else []
                    self._recorder.record(step, *known, later=functools.partial(_later, step, asked))
            except Exception:
                _log.exception("records: step %d lost", step)

    def _ask(self, step: int, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        try:
            wanted = None
            if self._settings.fraction < 1:
                whole = joined(parts)
                rows = chosen_rows(self._settings, step, whole)
                wanted = current.marks(whole["input_ids"][rows], whole["input_lengths"][rows])
            return current.ask(self._policy, step, wanted)
        except Exception as error:
            return _without_curr(step, error, [])

    def _beside(self, part: Mapping[str, Any], meta: Any) -> dict[str, Tensor]:
        """What is known of a batch that it doesn't hold itself."""
        rows, trained = len(part["sample_mask"]), self._taken
        rewards = part["total_reward"] if _Heard.rewards is None and "total_reward" in part else _Heard.rewards
        versions = _Heard.versions
        tags = getattr(meta, "tags", None) or ()
        if tags and all("weight_version" in tag for tag in tags):
            versions = torch.tensor([int(tag["weight_version"]) for tag in tags])
        elif versions is None and not _Heard.asynchronous:
            versions = torch.full((rows,), trained)  # as many steps as were taken
        found = {}
        if rewards is not None and rewards.numel() == rows:
            found["rewards"] = rewards.reshape(rows)
        if versions is not None and len(versions) == rows:
            found |= {"weight_version": versions, "staleness": trained - versions}
        return found


def _later(step: int, asked: list[Any], data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        answers = importlib.import_module("ray").get(asked, timeout=_PATIENCE) if asked else []
        return current.joined(answers, data["input_ids"], data["input_lengths"])
    except Exception as error:
        return _without_curr(step, error, {})


def _without_curr(step: int, error: Exception, instead: _T) -> _T:
    _log.warning("records: step %d is without curr: %s: %s", step, type(error).__name__, error)
    return instead


def fields(loss: Any, meta: Any) -> list[str]:
    """Of a batch in the data plane, what is recorded beside what the masks are made of."""
    if loss.config.record is None:
        return []
    given = getattr(meta, "fields", None) or ()
    return ["input_ids", "input_lengths", *(name for name in ("total_reward",) if name in given)]


def remember_last_step(group: Any, worker_settings: Mapping[str, Any]) -> None:
    """Note, on the group of a policy's workers, which step they resume after; a group that is sent takes it along."""
    found = re.findall(r"step_(\d+)", str(worker_settings.get("weights_path") or ""))
    setattr(group, _LAST_STEP, int(found[-1]) if found else 0)


def last_step(policy: Any) -> int:
    """The step after which the run of a policy was resumed, 0 where it began."""
    return getattr(getattr(policy, "worker_group", None), _LAST_STEP, 0)
