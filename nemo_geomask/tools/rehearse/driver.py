"""Driver process of a rehearsal: runs NeMo-RL's own script as ``nemo-geomask run`` does, and logs its events.

Without GPUs, this module starts a Ray that claims to have some; with GPUs, NeMo-RL starts Ray itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.hosts.nemo_rl.launch import launch
from nemo_geomask.tools.rehearse.event_hooks import patches
from nemo_geomask.tools.rehearse.event_log import EVENTS, Events
from nemo_geomask.tools.rehearse.launch_environment import SETTINGS
from nemo_geomask.tools.rehearse.plan import ENVIRONMENT, TEACHER
from nemo_geomask.tools.rehearse.tiny_models import TinyModel, write_model

_ENVIRONMENT_CLASS = "nemo_geomask.tools.rehearse.even_words.EvenWords"
_PR_SET_PDEATHSIG = 1


def main(script: str) -> int:
    """Run NeMo-RL's script with event hooks.

    Returns:
        0, or 1 after an error, which is logged as an event.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel ends this process with its parent
    settings = json.loads(Path(os.environ[SETTINGS]).read_text(encoding="utf-8"))
    folder, model = Path(settings["folder"]), TinyModel(**settings["model"])
    events = Events(folder / EVENTS)
    try:
        events("model", parameters=write_model(model, folder), model_type=model.model_type)
        if settings["teacher"]:
            write_model(model, folder / TEACHER.parent, seed=1)
        patch.apply_all(patches(events, controller="single_controller" in script, first_seed=settings["first_seed"]))
        if settings["job"] is not None:
            patch.apply_all(in_place_of_training(*settings["job"]))
        if not settings["own_environment"]:
            register_environment()
        if settings["teacher"] and not settings["own_environment"]:
            _name_agents()
        if not settings["gpus"]:
            start_ray_without_gpus(settings["gpu_count"], settings["ray"])
        events("end", stage="start")
        launch(script, sys.argv[1:])
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        events("error", type=type(error).__name__, message=str(error), traceback=text)
        return 1
    return 0


def register_environment() -> None:
    """Register the built-in environment with NeMo-RL."""
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    executables = importlib.import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES
    registry.ACTOR_ENVIRONMENT_REGISTRY[_ENVIRONMENT_CLASS] = executables.SYSTEM
    importlib.import_module("nemo_rl.environments.utils").register_env(ENVIRONMENT, _ENVIRONMENT_CLASS)


def _name_agents() -> None:
    """Name an agent for each prompt, as NeMo-Gym's rollouts do; on-policy distillation finds the teacher by it."""
    collate = importlib.import_module("nemo_geomask.tools.rehearse.even_words").collate_with_agents
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    patch.attribute(grpo, "rl_collate_fn", lambda original: functools.partial(collate, ENVIRONMENT)).apply()


def start_ray_without_gpus(gpu_count: int, folder: str) -> None:
    """Start a private Ray that claims to have GPUs, with all processes in this interpreter's environment."""
    ray = importlib.import_module("ray")
    cluster = importlib.import_module("nemo_rl.distributed.virtual_cluster")
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    for actor in registry.ACTOR_ENVIRONMENT_REGISTRY:
        registry.ACTOR_ENVIRONMENT_REGISTRY[actor] = cluster.PY_EXECUTABLES.SYSTEM
    ray.init(
        "local",
        num_cpus=16,
        num_gpus=gpu_count,
        include_dashboard=False,
        runtime_env={"env_vars": dict(os.environ)},
        logging_level="error",
        object_store_memory=300 << 20,
        _temp_dir=folder,
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    patch.attribute(cluster, "init_ray", lambda original: lambda *args, **kwargs: None).apply()


_TRAINERS = (
    ("nemo_rl.algorithms.grpo", "grpo_train"),
    ("nemo_rl.algorithms.grpo", "async_grpo_train"),
    ("nemo_rl.algorithms.grpo_sync", "grpo_train_sync"),
)
"""Training functions of NeMo-RL's GRPO scripts, in the versions that have them."""


def in_place_of_training(function: str, file: str) -> Iterator[patch.Patch]:
    """Yield patches by which NeMo-RL's training functions run a job.

    Args:
        function: ``module:function``; it is called with the training function's arguments, by name, and ``file``.
    """
    module_name, _, name = function.partition(":")
    job = getattr(importlib.import_module(module_name), name)
    for module, trainer in _TRAINERS:
        if importlib.util.find_spec(module) is not None:
            owner = importlib.import_module(module)
            yield patch.attribute(owner, trainer, functools.partial(_hosting, job, Path(file)))


def _hosting(job: Callable[..., None], file: Path, trainer: Callable[..., Any]) -> Callable[..., None]:
    signature = inspect.signature(trainer)

    @functools.wraps(trainer)
    def run(*args: Any, **kwargs: Any) -> None:
        job(**signature.bind(*args, **kwargs).arguments, file=file)

    return run


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    status = main(sys.argv[0])
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)  # lets Ray's thread print what workers wrote
    # Without Python's exit: NeMo-RL's destructors would connect to Ray again, and start one.
    os._exit(status)
