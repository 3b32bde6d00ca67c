"""NeMo-RL's Ray workers: checked before they start, prepared when they have started.

NeMo-RL starts each worker through ``RayWorkerBuilder.IsolatedWorkerInitializer.create_worker``, possibly in an
interpreter and with environment variables of its own. A proxy of that actor sees both, and runs a Ray task with the
same settings on every node, which imports nemo_geomask and unpickles the loss. Otherwise, a worker that cannot do this
would fail in the first training step, after loading the models and generating the first batch.

When a ``RayWorkerGroup`` has its workers, a call to each of them (Ray's ``__ray_call__``) prepares its process, see
:func:`nemo_geomask.hosts.nemo_rl.worker_hooks.prepare`. This works in every version of NeMo-RL: GRPO and PPO build the
loss before the group, the single controller builds it after, and both exist before training starts. Ray's
``worker_process_setup_hook`` would not do: it belongs to a whole job, whose ``ray.init`` is NeMo-RL's, and it would
also run in workers that have no nemo_geomask and need none, and fail there.
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
from typing import Any

import torch

import nemo_geomask
from nemo_geomask.hosts.nemo_rl import environment_probe, patch, worker_hooks
from nemo_geomask.hosts.nemo_rl.host_api import WORKER_GROUPS
from nemo_geomask.hosts.nemo_rl.host_errors import WorkerError
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.hosts.nemo_rl.resumed_step import remember_resumed_step
from nemo_geomask.losses import PolicyLoss

__all__ = ["REMEDY", "Workers", "on_every_node", "receives_loss"]

_log = logging.getLogger("nemo_geomask")
_PROBE_TIMEOUT = 300.0  # seconds; importing torch from a shared file system is slow

REMEDY = (
    "Give the workers the package, in one of these ways: in NeMo-RL's checkout `uv add nemo-geomask` (or its path) and "
    "start once with NRL_FORCE_REBUILD_VENVS=true, so that NeMo-RL builds its workers' environments with it; or export "
    "PYTHONPATH with a folder that contains nemo_geomask (NeMo-RL passes it on; the package needs only torch and "
    "pydantic). See docs/nemo_rl.md"
)

Loss = PolicyLoss | LogitLoss
Environment = tuple[str, str, str]  # worker class, interpreter, PYTHONPATH


class _Initializer:
    """Proxy of Ray's actor class that starts workers; it checks a worker's environment before the worker starts."""

    def __init__(self, actor_class: Any, workers: Workers) -> None:
        self._actor_class = actor_class
        self._workers = workers

    def options(self, **options: Any) -> _Initializer:
        return _Initializer(self._actor_class.options(**options), self._workers)

    def remote(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> Any:
        handle = self._actor_class.remote(ray_actor_class_fqn, *args, **kwargs)
        # Only this handle is changed. Pickled copies are plain handles again.
        handle.create_worker = _CreateWorker(ray_actor_class_fqn, handle.create_worker, self._workers)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)


class _CreateWorker:
    """Replacement for the method ``create_worker`` of one handle."""

    def __init__(self, worker_class: str, method: Any, workers: Workers) -> None:
        self._worker_class = worker_class
        self._method = method
        self._workers = workers

    def remote(self, *args: Any, **options: Any) -> Any:
        self._workers.add_environment(self._worker_class, options.get("runtime_env") or {})
        return self._method.remote(*args, **options)


class Workers:
    """The workers that NeMo-RL starts, and the losses that it will send them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # NeMo-RL may start two groups from two threads
        self._environments: dict[Environment, dict[str, Any]] = {}  # with Ray's runtime_env
        self._losses: list[Loss] = []
        self._verified: set[tuple[Environment, int]] = set()  # with the id of a loss
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()

    def patches(self) -> list[patch.Patch]:
        """Return the patches that report starting workers to this object; imports Ray."""
        module = importlib.import_module(WORKER_GROUPS)
        return [
            patch.attribute(
                module.RayWorkerBuilder, "IsolatedWorkerInitializer", lambda original: _Initializer(original, self)
            ),
            patch.attribute(module.RayWorkerGroup, "__init__", self._wrap_group_init),
        ]

    def _wrap_group_init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            builder = signature.bind(group, *args, **kwargs).arguments["remote_worker_builder"]
            if receives_loss(builder.ray_actor_class_fqn):
                self._groups.add(group)
                remember_resumed_step(group, getattr(builder, "kwargs", {}))
                if self._losses:
                    _prepare_group(group, self._losses)

        return init

    def add_loss(self, loss: Loss) -> None:
        """Register a loss that will be sent to the workers, and check and prepare those that run.

        Raises:
            WorkerError: a worker cannot load the loss.
            HostAPIError: the loss takes logits, and NeMo-RL in a worker differs from the tested versions.
        """
        with self._lock:
            self._losses.append(loss)
            self._verify()
        for group in list(self._groups):
            _prepare_group(group, [loss])

    def add_environment(self, worker_class: str, runtime_env: Mapping[str, Any]) -> None:
        """Register the environment of a worker that is about to start, and check it.

        Args:
            worker_class: dotted name.
            runtime_env: Ray's.

        Raises:
            WorkerError: the worker could not load a loss.
        """
        if not receives_loss(worker_class):
            return
        python = str(runtime_env.get("py_executable", ""))
        path = str((runtime_env.get("env_vars") or {}).get("PYTHONPATH", ""))
        with self._lock:
            self._environments.setdefault((worker_class, python, path), dict(runtime_env))
            self._verify()

    def _verify(self) -> None:
        # Losses and environments come in either order: the single controller starts workers first.
        for environment, runtime_env in self._environments.items():
            for loss in self._losses:
                if (environment, id(loss)) not in self._verified:
                    _check_environment(environment[0], runtime_env, loss)
                    self._verified.add((environment, id(loss)))


def _prepare_group(group: Any, losses: list[Loss]) -> None:
    """Prepare the processes of a group's workers, and wait until they are."""
    backends = {loss.config.logprob_backend for loss in losses}
    devices = importlib.import_module("ray").get(
        [actor.__ray_call__.remote(_prepare_actor, backends) for actor in group.workers]
    )
    _log.info("policy workers: %s", ", ".join(f"{count} on {name}" for name, count in Counter(devices).items()))


def _prepare_actor(actor: Any, backends: Collection[str]) -> str:
    """Prepare the process of a worker, in that process; return the name of its device."""
    worker_hooks.prepare(backends=backends)
    worker_hooks.prepare_model(actor, backends=backends)
    # A worker that has not loaded its model yet has not initialised CUDA.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if uses_cuda else "CPU"


def receives_loss(worker_class: str) -> bool:
    """Return True if workers of this class may be sent the loss.

    NeMo-RL's generation, value and environment workers are not; workers of other packages may be.

    Args:
        worker_class: dotted name.
    """
    return ".policy." in worker_class or not worker_class.startswith("nemo_rl.")


def _check_environment(worker_class: str, runtime_env: Mapping[str, Any], loss: Loss) -> None:
    # Ray's own pickler, which NeMo-RL uses to send the loss.
    payload = importlib.import_module("ray").cloudpickle.dumps(loss)
    for report in on_every_node(runtime_env, payload):
        failure = _describe_failure(report)
        if failure:
            raise WorkerError(
                f"{worker_class} can't receive the loss '{loss.config.name}': {failure}, in {report['executable']} "
                f"(Python {report['python']}) on {report['host']}. {REMEDY}"
            )


def _describe_failure(report: Mapping[str, Any]) -> str | None:
    errors = report["errors"]
    if "nemo_geomask" in errors:
        return f"nemo_geomask is not importable there ({errors['nemo_geomask']})"
    if report["version"] != nemo_geomask.__version__:
        return f"nemo_geomask is {report['version']} there and {nemo_geomask.__version__} here"
    if "loss" in errors:
        return f"the loss can't be opened there ({errors['loss']})"
    return None


def on_every_node(runtime_env: Mapping[str, Any], payload: bytes | None = None) -> list[dict[str, Any]]:
    """Run :func:`~nemo_geomask.hosts.nemo_rl.environment_probe.probe` on each node of the Ray cluster.

    Args:
        runtime_env: Ray's, with the interpreter (``py_executable``) and environment variables.
        payload: a pickled loss to load there.

    Returns:
        A report for each node; nodes that do not answer in time are left out and logged.
    """
    ray = importlib.import_module("ray")
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    # The function is sent as code, because the environment may lack this package.
    ray.cloudpickle.register_pickle_by_value(environment_probe)
    try:
        task = ray.remote(num_cpus=0, max_retries=0, runtime_env=dict(runtime_env))(environment_probe.probe)
        # Like NeMo-RL, which builds no environment on a head node without CPUs.
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        strategies = [scheduling.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        tasks = [task.options(scheduling_strategy=strategy).remote(payload) for strategy in strategies]
    finally:
        ray.cloudpickle.unregister_pickle_by_value(environment_probe)
    done, late = ray.wait(tasks, num_returns=len(tasks), timeout=_PROBE_TIMEOUT)
    if late:
        _log.warning(
            "%d of %d nodes did not report within %g s whether they can open the loss",
            len(late),
            len(tasks),
            _PROBE_TIMEOUT,
        )
    reports: list[dict[str, Any]] = ray.get(done)
    return reports
