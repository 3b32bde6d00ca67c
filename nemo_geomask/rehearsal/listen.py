"""What a process that runs NeMo-RL's loop writes down: stages, metrics, and what its workers say they called."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.integrations.nemo_rl import patch
from nemo_geomask.losses import BeforeStep
from nemo_geomask.rehearsal import proof
from nemo_geomask.rehearsal.events import Events, stage_of

__all__ = ["patches"]

_PATIENCE = 60.0
# Those of this process that train.
_policies: weakref.WeakSet[Any] = weakref.WeakSet()


def patches(events: Events, *, controller: bool = False, first_seed: int | None = None) -> Iterator[patch.Patch]:
    """What lets a process write down what NeMo-RL does in it; each calls what was there.

    Args:
        events: where to.
        controller: whether NeMo-RL's single controller, a process of its own, runs the loop; it then listens as well.
        first_seed: of the samplers' generators at the first batch, counted up by one a batch, so that a resumed run
            draws what the whole one drew; None leaves them alone.
    """
    timer = importlib.import_module("nemo_rl.utils.timer").Timer
    logger = importlib.import_module("nemo_rl.utils.logger").Logger
    yield patch.attribute(timer, "start", functools.partial(_timed, events, "begin"))
    yield patch.attribute(timer, "stop", functools.partial(_timed, events, "end"))
    yield patch.attribute(BeforeStep, "__call__", functools.partial(_staged, events, "veto", None))
    yield patch.attribute(logger, "log_metrics", functools.partial(_logged, events))
    for module, name, then in (
        ("nemo_rl.models.policy.lm_policy", "Policy", _watched),
        ("nemo_rl.models.generation.vllm", "VllmGeneration", None),
    ):
        owner = getattr(importlib.import_module(module), name)
        yield patch.attribute(owner, "__init__", functools.partial(_staged, events, "workers", then))
    if first_seed is not None:
        sampler = importlib.import_module("nemo_rl.models.generation.vllm").VllmGeneration
        yield patch.attribute(sampler, "generate", functools.partial(_seeded, itertools.count(first_seed)))
    if controller:
        controllers = importlib.import_module("nemo_rl.algorithms.single_controller")
        yield patch.attribute(controllers, "SingleControllerActor", functools.partial(_Controller, events))


def _seeded(seeds: Iterator[int], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = next(seeds)
        workers = self.worker_group.workers
        importlib.import_module("ray").get([worker.__ray_call__.remote(proof.seed, seed) for worker in workers])
        return original(self, *args, **kwargs)

    return call


class _Controller:
    """In the place of the actor's class: starts it, and has its process listen."""

    def __init__(self, events: Events, actor_class: Any) -> None:
        self._events = events
        self._actor_class = actor_class

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor = self._actor_class.remote(*args, **kwargs)
        importlib.import_module("ray").get(actor.__ray_call__.remote(_listen, self._events))
        return actor


def _listen(actor: Any, events: Events) -> None:
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    _policies.update(value for value in vars(actor).values() if isinstance(value, policy))
    patch.apply_all(patches(events))


def _timed(events: Events, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, label: str, *args: Any, **kwargs: Any) -> Any:
        stage = stage_of(label)
        if stage is not None:
            # Stopped on the way out of an error, it is the stage that failed.
            events(kind, stage=stage, label=label, failed=kind == "end" and sys.exc_info()[0] is not None)
        return original(self, label, *args, **kwargs)

    return call


def _staged(
    events: Events, stage: str, then: Callable[[Any], None] | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        label = type(self).__name__
        events("begin", stage=stage, label=label)
        try:
            result = original(self, *args, **kwargs)
            if then is not None:
                then(self)
        except BaseException:
            events("end", stage=stage, label=label, failed=True)
            raise
        events("end", stage=stage, label=label)
        return result

    return call


def _watched(policy: Any) -> None:
    """Have the workers of a policy count the losses that they call."""
    workers = policy.worker_group.workers
    importlib.import_module("ray").get([worker.__ray_call__.remote(proof.count_calls) for worker in workers])
    _policies.add(policy)


def _logged(events: Events, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, metrics: Any, step: int, prefix: str = "", **kwargs: Any) -> Any:
        events("begin", stage="metrics", label=prefix)
        result = original(self, metrics, step, prefix=prefix, **kwargs)
        events("metrics", step=int(step), prefix=prefix, values=_numbers(metrics))
        if prefix == "train" and "loss" in metrics:
            events("proof", step=int(step), workers=_count())
        events("end", stage="metrics", label=prefix)
        return result

    return call


def _count() -> list[dict[str, Any]]:
    ray = importlib.import_module("ray")
    workers = [worker for policy in _policies for worker in policy.worker_group.workers]
    said: list[dict[str, Any]] = ray.get(
        [worker.__ray_call__.remote(proof.counted) for worker in workers], timeout=_PATIENCE
    )
    return said


def _numbers(metrics: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in metrics.items():
        try:
            found[str(key)] = float(value)
        except (TypeError, ValueError):
            continue  # tables and lists
    return found
