"""Versions of the weights that generated each sample of a NeMo-RL batch.

They are taken from the tags of the data plane, or from the replay buffer of the asynchronous loops. The buffer's
``sample`` does not return the versions, so a function that runs in the buffer's actor keeps them, and another one
returns them. Synchronous loops generate with the weights of the preceding step.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import STALENESS
from nemo_geomask.hosts.nemo_rl import replay_versions
from nemo_geomask.hosts.nemo_rl.resumed_step import resumed_step

__all__ = ["ReplayBufferClass", "ReplayedSample", "SampleVersions", "replayed"]

_log = logging.getLogger("nemo_geomask")
_TIMEOUT = 600.0  # seconds


@dataclass
class ReplayedSample:
    """What this process's loop drew last from the replay buffer."""

    versions: Any = None  # Ray's reference to the versions of the weights that generated each row
    is_asynchronous: bool = False  # True if the loop has a replay buffer


replayed = ReplayedSample()
"""The sample of this process's loop."""


class ReplayBufferClass:
    """Proxy of the Ray actor class of NeMo-RL's replay buffer; its handles' ``sample`` also requests weight versions.

    Args:
        actor_class: NeMo-RL's.
    """

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class

    def options(self, **options: Any) -> ReplayBufferClass:
        """Return the class with Ray's options."""
        return ReplayBufferClass(self._actor_class.options(**options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the buffer's actor and return its handle."""
        replayed.is_asynchronous = True
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
        # The functions are pickled by value, because this package may be missing in the buffer's process.
        cloudpickle.register_pickle_by_value(replay_versions)
        try:
            sample = self._ray_call.remote(replay_versions.sample_and_keep_versions, args, kwargs)
            # The actor runs calls in order.
            replayed.versions = self._ray_call.remote(replay_versions.versions_of_sample)
        finally:
            cloudpickle.unregister_pickle_by_value(replay_versions)
        return sample


class SampleVersions:
    """Versions of the weights that generated the samples of one policy's batches.

    Args:
        policy: NeMo-RL's.

    Attributes:
        steps_done: number of steps that the policy has trained; NeMo-RL's version of its weights.
    """

    def __init__(self, policy: Any) -> None:
        self.steps_done = resumed_step(policy)

    def read(self, part: Mapping[str, Any], meta: Any) -> dict[str, Tensor]:
        """Return ``weight_version`` and ``staleness``, int64 [B], of a part of the next batch; empty if not known.

        An error is logged.

        Args:
            part: NeMo-RL's batch, or a part of it.
            meta: NeMo-RL's description of its keys in the data plane; None if it is not stored there.
        """
        try:
            rows = len(part["sample_mask"])
            versions = self._find(meta, rows)
        except Exception:
            _log.exception("step %d: the versions of the weights that sampled are not known", self.steps_done + 1)
            return {}
        if versions is None or len(versions) != rows:
            return {}
        return {"weight_version": versions, STALENESS: self.steps_done - versions}

    def end_step(self) -> None:
        """Count a step; the next one trains on another sample of the replay buffer."""
        self.steps_done += 1
        replayed.versions = None

    def _find(self, meta: Any, rows: int) -> Tensor | None:
        tags = getattr(meta, "tags", None) or ()
        if tags and all("weight_version" in tag for tag in tags):
            return torch.tensor([int(tag["weight_version"]) for tag in tags], device="cpu")
        if replayed.versions is not None:
            versions = importlib.import_module("ray").get(replayed.versions, timeout=_TIMEOUT)
            return None if versions is None else torch.tensor(versions, device="cpu")
        if replayed.is_asynchronous:
            return None
        # A synchronous loop generates with the weights of the last step, and its weight version is the step number.
        return torch.full((rows,), self.steps_done, device="cpu")
