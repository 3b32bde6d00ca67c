"""Hooks that log events from NeMo-RL's loop: stages, metrics, and the losses that its workers called."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.losses import PrestepPass
from nemo_geomask.tools.rehearse import loss_calls
from nemo_geomask.tools.rehearse.event_log import Events, stage_of

__all__ = ["patches"]

_PATIENCE = 60.0
# Policies of this process whose workers train.
_policies: weakref.WeakSet[Any] = weakref.WeakSet()


def patches(events: Events, *, controller: bool = False, first_seed: int | None = None) -> Iterator[patch.Patch]:
    """Yield patches that log what NeMo-RL does in this process; each calls the original.

    Args:
        events: the log.
        controller: True if NeMo-RL's single controller, a process of its own, runs the loop; it is patched too.
        first_seed: seed of the samplers' generators at the first batch, one more at each batch, so that a resumed run
            draws the same samples; None: the generators are not seeded.
    """
    timer = importlib.import_module("nemo_rl.utils.timer").Timer
    logger = importlib.import_module("nemo_rl.utils.logger").Logger
    yield patch.attribute(timer, "start", functools.partial(_log_timer, events, "begin"))
    yield patch.attribute(timer, "stop", functools.partial(_log_timer, events, "end"))
    yield patch.attribute(PrestepPass, "__call__", functools.partial(_log_stage, events, "veto", None))
    yield patch.attribute(logger, "log_metrics", functools.partial(_log_metrics, events))
    for module, name, on_success in (
        ("nemo_rl.models.policy.lm_policy", "Policy", _count_losses),
        ("nemo_rl.models.generation.vllm", "VllmGeneration", None),
    ):
        owner = getattr(importlib.import_module(module), name)
        yield patch.attribute(owner, "__init__", functools.partial(_log_stage, events, "workers", on_success))
    if first_seed is not None:
        sampler = importlib.import_module("nemo_rl.models.generation.vllm").VllmGeneration
        yield patch.attribute(sampler, "generate", functools.partial(_seed_sampler, itertools.count(first_seed)))
    if controller:
        controllers = importlib.import_module("nemo_rl.algorithms.single_controller")
        yield patch.attribute(controllers, "SingleControllerActor", functools.partial(_Controller, events))


def _seed_sampler(seeds: Iterator[int], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = next(seeds)
        workers = self.worker_group.workers
        importlib.import_module("ray").get([worker.__ray_call__.remote(loss_calls.seed, seed) for worker in workers])
        return original(self, *args, **kwargs)

    return call


class _Controller:
    """Replacement of the actor's class that starts the actor and patches its process."""

    def __init__(self, events: Events, actor_class: Any) -> None:
        self._events = events
        self._actor_class = actor_class

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor = self._actor_class.remote(*args, **kwargs)
        importlib.import_module("ray").get(actor.__ray_call__.remote(_patch_actor, self._events))
        return actor


def _patch_actor(actor: Any, events: Events) -> None:
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    _policies.update(value for value in vars(actor).values() if isinstance(value, policy))
    patch.apply_all(patches(events))


def _log_timer(events: Events, event_type: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, label: str, *args: Any, **kwargs: Any) -> Any:
        stage = stage_of(label)
        if stage is not None:
            # A timer that is stopped while an exception propagates belongs to the stage that failed.
            events(event_type, stage=stage, label=label, failed=event_type == "end" and sys.exc_info()[0] is not None)
        return original(self, label, *args, **kwargs)

    return call


def _log_stage(
    events: Events, stage: str, on_success: Callable[[Any], None] | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        label = type(self).__name__
        events("begin", stage=stage, label=label)
        try:
            result = original(self, *args, **kwargs)
            if on_success is not None:
                on_success(self)
        except BaseException:
            events("end", stage=stage, label=label, failed=True)
            raise
        events("end", stage=stage, label=label)
        return result

    return call


def _count_losses(policy: Any) -> None:
    """Make the workers of a policy count the losses that they call."""
    workers = policy.worker_group.workers
    importlib.import_module("ray").get([worker.__ray_call__.remote(loss_calls.count_calls) for worker in workers])
    _policies.add(policy)


def _log_metrics(events: Events, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, metrics: Any, step: int, prefix: str = "", **kwargs: Any) -> Any:
        events("begin", stage="metrics", label=prefix)
        result = original(self, metrics, step, prefix=prefix, **kwargs)
        events("metrics", step=int(step), prefix=prefix, values=_numeric_metrics(metrics))
        if prefix == "train" and "loss" in metrics:
            events("proof", step=int(step), workers=_read_counts())
        events("end", stage="metrics", label=prefix)
        return result

    return call


def _read_counts() -> list[dict[str, Any]]:
    ray = importlib.import_module("ray")
    workers = [worker for policy in _policies for worker in policy.worker_group.workers]
    counts: list[dict[str, Any]] = ray.get(
        [worker.__ray_call__.remote(loss_calls.read_counts) for worker in workers], timeout=_PATIENCE
    )
    return counts


def _numeric_metrics(metrics: Any) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError):
            continue  # tables and lists
    return numbers
