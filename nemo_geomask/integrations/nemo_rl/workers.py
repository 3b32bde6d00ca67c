"""NeMo-RL's Ray workers: checked for being able to open the loss before they start, prepared for it when they have.

NeMo-RL starts each worker through ``RayWorkerBuilder.IsolatedWorkerInitializer.create_worker``, in an interpreter and
with environment variables that may be the worker's own. A stand-in sees both, and asks Ray for a task in the same: on
every node, it imports nemo_geomask and opens the very loss. A worker that can't would else fail in the first training
step, after the models are loaded and the first batch is sampled.

When a ``RayWorkerGroup`` has its workers, each is told by a call of its own (Ray's ``__ray_call__``) to prepare its
process, see :func:`nemo_geomask.integrations.nemo_rl.worker.prepare`. That moment is there in every version of NeMo-RL:
in GRPO and PPO the loss is built first and the group later, in the single controller the other way round, and either
comes before anything trains. Ray's ``worker_process_setup_hook`` is no such moment: it belongs to a whole job, whose
``ray.init`` is NeMo-RL's, and it would also run, and fail, in workers that have no nemo_geomask and need none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

import nemo_geomask
from nemo_geomask.errors import GeomaskError
from nemo_geomask.integrations.nemo_rl import patch, probe, record, worker
from nemo_geomask.losses import PolicyLoss

if TYPE_CHECKING:
    from nemo_geomask.integrations.nemo_rl.logits import LogitLoss

__all__ = ["WorkerError", "Workers", "on_every_node", "receives_loss"]

_log = logging.getLogger("nemo_geomask")
_MODULE = "nemo_rl.distributed.worker_groups"
_PATIENCE = 300.0  # seconds; importing torch from a shared file system is slow

REMEDY = (
    "Give the workers the package, in one of these ways: in NeMo-RL's checkout `uv add nemo-geomask` (or its path) and "
    "start once with NRL_FORCE_REBUILD_VENVS=true, so that NeMo-RL builds its workers' environments with it; or export "
    "PYTHONPATH with a folder that holds nemo_geomask (NeMo-RL passes it on; the package needs only torch and "
    "pydantic). See docs/nemo_rl.md"
)


class WorkerError(GeomaskError, RuntimeError):
    """A worker that is to receive the loss can't open it, or is not prepared for it."""


class _Initializer:
    """Stands in for Ray's actor class; the method that starts a worker looks at the worker's environment first."""

    def __init__(self, actor_class: Any, workers: Workers) -> None:
        self._actor_class = actor_class
        self._workers = workers

    def options(self, **options: Any) -> _Initializer:
        return _Initializer(self._actor_class.options(**options), self._workers)

    def remote(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> Any:
        handle = self._actor_class.remote(ray_actor_class_fqn, *args, **kwargs)
        # On this handle alone; one that is pickled is Ray's own again.
        handle.create_worker = _CreateWorker(ray_actor_class_fqn, handle.create_worker, self._workers)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)


class _CreateWorker:
    def __init__(self, actor: str, method: Any, workers: Workers) -> None:
        self._actor = actor
        self._method = method
        self._workers = workers

    def remote(self, *args: Any, **options: Any) -> Any:
        self._workers.starting(self._actor, options.get("runtime_env") or {})
        return self._method.remote(*args, **options)


class Workers:
    """The workers that NeMo-RL starts, and the losses that it will send them."""

    def __init__(self) -> None:
        # Two groups may start in threads of their own.
        self._lock = threading.Lock()
        self._environments: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._losses: list[PolicyLoss | LogitLoss] = []
        self._verified: set[tuple[tuple[str, str, str], int]] = set()
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()

    def patches(self) -> list[patch.Patch]:
        """What lets this see the workers; importing NeMo-RL's worker groups imports Ray."""
        module = importlib.import_module(_MODULE)
        return [
            patch.attribute(
                module.RayWorkerBuilder, "IsolatedWorkerInitializer", lambda original: _Initializer(original, self)
            ),
            patch.attribute(module.RayWorkerGroup, "__init__", self._starting_a_group),
        ]

    def _starting_a_group(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            builder = signature.bind(group, *args, **kwargs).arguments["remote_worker_builder"]
            if receives_loss(builder.ray_actor_class_fqn):
                self._groups.add(group)
                record.remember_last_step(group, getattr(builder, "kwargs", {}))
                if self._losses:
                    _prepare(group, self._losses)

        return init

    def loss_built(self, loss: PolicyLoss | LogitLoss) -> None:
        """A loss will be sent to the workers, those that run and those to come.

        Raises:
            WorkerError: a running one can't open it.
            SeamError: the loss takes logits, and NeMo-RL is not as known in a running one.
        """
        with self._lock:
            self._losses.append(loss)
            self._verify()
        for group in list(self._groups):
            _prepare(group, [loss])

    def starting(self, actor: str, runtime_env: Mapping[str, Any]) -> None:
        """A worker of this class is about to start in this environment.

        Raises:
            WorkerError: it can't open the loss.
        """
        if not receives_loss(actor):
            return
        python = str(runtime_env.get("py_executable", ""))
        path = str((runtime_env.get("env_vars") or {}).get("PYTHONPATH", ""))
        with self._lock:
            self._environments.setdefault((actor, python, path), dict(runtime_env))
            self._verify()

    def _verify(self) -> None:
        # Either may come first: GRPO and PPO build the loss before the workers, the single controller after them.
        for key, runtime_env in self._environments.items():
            for loss in self._losses:
                if (key, id(loss)) not in self._verified:
                    _check(key[0], runtime_env, loss)
                    self._verified.add((key, id(loss)))


def _prepare(group: Any, losses: list[PolicyLoss | LogitLoss]) -> None:
    """Prepare the processes of a group's workers, and wait for it."""
    backends = {loss.config.logprob_backend for loss in losses}
    devices = importlib.import_module("ray").get(
        [actor.__ray_call__.remote(_prepare_actor, backends) for actor in group.workers]
    )
    _log.info("policy workers: %s", ", ".join(f"{count} on {name}" for name, count in Counter(devices).items()))


def _prepare_actor(actor: Any, backends: Collection[str]) -> str:
    worker.prepare(backends=backends)
    worker.prepare_model(actor, backends=backends)
    # One whose model is not loaded yet has chosen no device.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if started else "CPU"


def receives_loss(actor: str) -> bool:
    """Whether workers of this class, by its dotted name, may be sent the loss."""
    # NeMo-RL's generation, value and environment workers get none; of somebody's own workers that is not known.
    return ".policy." in actor or not actor.startswith("nemo_rl.")


def _check(actor: str, runtime_env: Mapping[str, Any], loss: PolicyLoss | LogitLoss) -> None:
    for report in on_every_node(runtime_env, _pickled(loss)):
        problem = _problem(report)
        if problem:
            raise WorkerError(
                f"{actor} can't receive the loss '{loss.config.name}': {problem}, in {report['executable']} (Python "
                f"{report['python']}) on {report['host']}. {REMEDY}"
            )


def _pickled(loss: PolicyLoss | LogitLoss) -> bytes:
    # By Ray's own pickler, as NeMo-RL will send it.
    sent: bytes = importlib.import_module("ray").cloudpickle.dumps(loss)
    return sent


def _problem(report: Mapping[str, Any]) -> str | None:
    errors = report["errors"]
    if "nemo_geomask" in errors:
        return f"nemo_geomask is not importable there ({errors['nemo_geomask']})"
    if report["version"] != nemo_geomask.__version__:
        return f"nemo_geomask is {report['version']} there and {nemo_geomask.__version__} here"
    if "loss" in errors:
        return f"the loss can't be opened there ({errors['loss']})"
    return None


def on_every_node(runtime_env: Mapping[str, Any], payload: bytes | None = None) -> list[dict[str, Any]]:
    """What :func:`~nemo_geomask.integrations.nemo_rl.probe.probe` reports from each node of the running Ray cluster.

    Args:
        runtime_env: Ray's, with the interpreter (``py_executable``) and environment variables.
        payload: a pickled loss to open there.

    Returns:
        A report a node; none of those that did not answer in time, which is logged.
    """
    ray = importlib.import_module("ray")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    # The function must arrive where this package is missing, so it travels as code.
    ray.cloudpickle.register_pickle_by_value(probe)
    try:
        task = ray.remote(num_cpus=0, max_retries=0, runtime_env=dict(runtime_env))(probe.probe)
        # As NeMo-RL, which builds no environment on a head node without CPUs.
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        pinned = [strategies.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        tasks = [task.options(scheduling_strategy=strategy).remote(payload) for strategy in pinned]
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)
    done, late = ray.wait(tasks, num_returns=len(tasks), timeout=_PATIENCE)
    if late:
        _log.warning(
            "%d of %d nodes did not say within %g s whether they can open the loss", len(late), len(tasks), _PATIENCE
        )
    reports: list[dict[str, Any]] = ray.get(done)
    return reports
