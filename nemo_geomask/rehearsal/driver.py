"""The process that trains: NeMo-RL's own script, told to write down what happens. Run by ``nemo-geomask run``.

Without GPUs, Ray is started here, claiming some; with GPUs, NeMo-RL starts Ray itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_geomask.integrations.nemo_rl import patch
from nemo_geomask.losses import BeforeStep
from nemo_geomask.rehearsal import proof
from nemo_geomask.rehearsal.events import Events, stage_of
from nemo_geomask.rehearsal.models import TinyModel, write_model

__all__ = ["SETTINGS", "main"]

SETTINGS = "NEMO_GEOMASK_REHEARSAL_SETTINGS"
"""Environment variable with the path of what the command asks for, as JSON."""

_ENVIRONMENT = "nemo_geomask.rehearsal.environment.EvenWords"
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PATIENCE = 60.0


def main(script: str) -> int:
    """Rehearse.

    Args:
        script: NeMo-RL's; its arguments are in ``sys.argv``.

    Returns:
        0, or 1 after an error, which is then among the events.
    """
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    settings = json.loads(Path(os.environ[SETTINGS]).read_text(encoding="utf-8"))
    events = Events(Path(settings["events"]))
    try:
        if settings["model"] is not None:
            parameters = write_model(TinyModel(**settings["model"]), Path(settings["folder"]))
            events("model", parameters=parameters, model_type=settings["model"]["model_type"])
        patch.apply_all(_patches(events))
        _register_environment(settings["environment"])
        if not settings["gpus"]:
            _claim_cards(settings["cards"], settings["ray"])
        events("end", stage="start")
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        events("error", type=type(error).__name__, message=str(error), traceback=text)
        return 1
    events("done")
    return 0


def _register_environment(name: str | None) -> None:
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    executables = importlib.import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES
    if name is not None:
        registry.ACTOR_ENVIRONMENT_REGISTRY[_ENVIRONMENT] = executables.SYSTEM
        importlib.import_module("nemo_rl.environments.utils").register_env(name, _ENVIRONMENT)


def _claim_cards(cards: int, folder: str) -> None:
    """A Ray of this rehearsal's own, which says that it has GPUs; all processes in this interpreter's environment."""
    ray = importlib.import_module("ray")
    cluster = importlib.import_module("nemo_rl.distributed.virtual_cluster")
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    for actor in registry.ACTOR_ENVIRONMENT_REGISTRY:
        registry.ACTOR_ENVIRONMENT_REGISTRY[actor] = cluster.PY_EXECUTABLES.SYSTEM
    ray.init(
        "local",
        num_cpus=16,
        num_gpus=cards,
        include_dashboard=False,
        runtime_env={"env_vars": dict(os.environ)},
        logging_level="error",
        object_store_memory=300 << 20,
        _temp_dir=folder,
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    patch.attribute(cluster, "init_ray", lambda original: lambda *args, **kwargs: None).apply()


def _patches(events: Events) -> Iterator[patch.Patch]:
    """What lets the driver write down what NeMo-RL does; each calls what was there."""
    timer = importlib.import_module("nemo_rl.utils.timer").Timer
    logger = importlib.import_module("nemo_rl.utils.logger").Logger
    policies: weakref.WeakSet[Any] = weakref.WeakSet()
    yield patch.attribute(timer, "start", functools.partial(_timed, events, "begin"))
    yield patch.attribute(timer, "stop", functools.partial(_timed, events, "end"))
    yield patch.attribute(BeforeStep, "__call__", functools.partial(_staged, events, "veto", None))
    yield patch.attribute(logger, "log_metrics", functools.partial(_logged, events, policies))
    for module, name, then in (
        ("nemo_rl.models.policy.lm_policy", "Policy", functools.partial(_watched, policies)),
        ("nemo_rl.models.generation.vllm", "VllmGeneration", None),
    ):
        owner = getattr(importlib.import_module(module), name)
        yield patch.attribute(owner, "__init__", functools.partial(_staged, events, "workers", then))


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


def _watched(policies: weakref.WeakSet[Any], policy: Any) -> None:
    """Have the workers of a policy count the losses that they call."""
    workers = policy.worker_group.workers
    importlib.import_module("ray").get([worker.__ray_call__.remote(proof.count_calls) for worker in workers])
    policies.add(policy)


def _logged(events: Events, policies: weakref.WeakSet[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, metrics: Any, step: int, prefix: str = "", **kwargs: Any) -> Any:
        events("begin", stage="metrics", label=prefix)
        result = original(self, metrics, step, prefix=prefix, **kwargs)
        events("metrics", step=int(step), prefix=prefix, values=_numbers(metrics))
        if prefix == "train" and "loss" in metrics:
            events("proof", step=int(step), workers=_count(policies))
        events("end", stage="metrics", label=prefix)
        return result

    return call


def _count(policies: weakref.WeakSet[Any]) -> list[dict[str, Any]]:
    ray = importlib.import_module("ray")
    workers = [worker for policy in policies for worker in policy.worker_group.workers]
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


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    status = main(sys.argv[0])
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)  # for Ray's thread that prints what workers wrote
    # NeMo-RL's destructors would look for Ray again, and start one.
    os._exit(status)
