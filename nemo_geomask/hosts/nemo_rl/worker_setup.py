"""NeMo-RL's Ray workers: their environments are checked before they start, and they are prepared once they run.

NeMo-RL starts each worker in an interpreter and with environment variables that may be its own. Before ``setup``, a Ray
task with the interpreter of the policy's workers runs on every node, imports nemo_geomask and unpickles the loss. After
``setup``, the workers themselves do so, since NeMo-RL may have built their environment only then. Otherwise a worker
that cannot receive the loss would fail in the first training step, after generating the first batch.

Workers are prepared by a call to each of them (Ray's ``__ray_call__``), see
:func:`nemo_geomask.hosts.nemo_rl.prepare_worker`, and only if the loss needs it. Ray's
``worker_process_setup_hook`` would not do: it belongs to a whole job, whose ``ray.init`` is NeMo-RL's, and it would
also run in workers that have no nemo_geomask and need none, and fail there.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import nemo_geomask
from nemo_geomask.errors import WorkerError
from nemo_geomask.hosts.nemo_rl import environment_probe, host_patches
from nemo_geomask.hosts.nemo_rl.facts import policy_worker_class
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.losses import PolicyLoss

_log = logging.getLogger("nemo_geomask")
_PROBE_TIMEOUT = 300.0  # seconds; importing torch from a shared file system is slow

REMEDY = (
    "Give the workers the package, in one of these ways: in NeMo-RL's checkout `uv add nemo-geomask` (or its path) and "
    "start once with NRL_FORCE_REBUILD_VENVS=true, so that NeMo-RL builds its workers' environments with it; or export "
    "PYTHONPATH with a folder that contains nemo_geomask (NeMo-RL passes it on; the package needs only torch and "
    "pydantic). See docs/reference/nemo_rl.md"
)

Loss = PolicyLoss | LogitLoss


def check_environment(policy_settings: Mapping[str, Any], loss: Loss) -> None:
    """Check, before the policy's workers start, that their environment can load the loss.

    Nothing is checked if NeMo-RL has yet to build the environment or Ray does not run yet, see :func:`check_workers`.

    Args:
        policy_settings: section ``policy`` of the recipe.
        loss: the loss that will be sent to the workers.

    Raises:
        WorkerError: the environment cannot load the loss.
    """
    worker_class = policy_worker_class(policy_settings)
    if worker_class is None or not importlib.import_module("ray").is_initialized():
        return
    python = worker_interpreter(worker_class)
    if python is None:
        return
    runtime_env: dict[str, Any] = {} if python == sys.executable else {"py_executable": python}
    section = policy_settings.get("megatron_cfg" if "megatron" in worker_class else "dtensor_cfg") or {}
    path = (section.get("env_vars") or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    if path:
        runtime_env["env_vars"] = {"PYTHONPATH": str(path)}
    for report in on_every_node(runtime_env, _pickled(loss)):
        _require_loadable(report, worker_class, loss)


def worker_interpreter(worker_class: str) -> str | None:
    """Return the command with which NeMo-RL starts the Python of a worker; None if it has yet to build the environment.

    Args:
        worker_class: dotted name; it must be one that NeMo-RL has registered.
    """
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    command = registry.ACTOR_ENVIRONMENT_REGISTRY.get(worker_class)
    if command is None:
        return None
    # As in NeMo-RL, a command that starts with uv stands for an environment that has the name of the worker class.
    if not command.startswith("uv"):
        return str(command) if command == sys.executable else shlex.split(command)[0]
    venvs = importlib.import_module("nemo_rl.utils.venvs")
    folder = Path(os.environ.get("NEMO_RL_VENV_DIR", venvs.DEFAULT_VENV_DIR))
    python = folder / worker_class / "bin" / "python"
    # NeMo-RL builds the environment again if it is asked to.
    is_rebuilt = os.environ.get("NRL_FORCE_REBUILD_VENVS", "false").lower() == "true"
    return str(python) if python.exists() and not is_rebuilt else None


def check_workers(policy: Any, loss: Loss) -> None:
    """Check that the running workers of a policy can load the loss.

    Args:
        policy: NeMo-RL's.
        loss: the loss that will be sent to the workers.

    Raises:
        WorkerError: a worker cannot load the loss.
    """
    for report in _call_workers(policy, environment_probe.probe_actor, _pickled(loss)):
        _require_loadable(report, f"a worker of {type(policy).__name__}", loss)


def prepare_workers(policy: Any, loss: Loss, *, has_packed_rows: bool) -> None:
    """Prepare the processes of a policy's workers, if the loss needs it, and wait until they are.

    Args:
        policy: NeMo-RL's.
        loss: the loss that will be sent to the workers.
        has_packed_rows: True if the workers pack several sequences into a row.

    Raises:
        HostAPIError: the loss cannot run without the preparation, and NeMo-RL in a worker differs from the tested
            versions.
    """
    if not host_patches.needs_preparation(loss.config, has_packed_rows=has_packed_rows):
        return
    devices = _call_workers(policy, _prepare_actor, loss.config.logprob_backend, has_packed_rows)
    _log.info("policy workers: %s", ", ".join(f"{count} on {name}" for name, count in Counter(devices).items()))


def _call_workers(policy: Any, function: Any, *arguments: Any) -> list[Any]:
    """Call a function with each worker of a policy, in the worker's process; return the results."""
    with _probe_as_code() as ray:
        calls = [worker.__ray_call__.remote(function, *arguments) for worker in policy.worker_group.workers]
    results: list[Any] = ray.get(calls)
    return results


@contextlib.contextmanager
def _probe_as_code() -> Iterator[Any]:
    """Send the probe as code while the context lasts, because an environment may lack this package; yields ``ray``."""
    ray = importlib.import_module("ray")
    ray.cloudpickle.register_pickle_by_value(environment_probe)
    try:
        yield ray
    finally:
        ray.cloudpickle.unregister_pickle_by_value(environment_probe)


def _prepare_actor(actor: Any, backend: str, has_packed_rows: bool) -> str:
    """Prepare the process of a worker, in that process; return the name of its device."""
    host_patches.prepare_worker(backends=(backend,), has_packed_rows=has_packed_rows, actor=actor)
    host_patches.prepare_model(actor, backends=(backend,))
    # A worker that has not loaded its model yet has not initialised CUDA.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if uses_cuda else "CPU"


def _pickled(loss: Loss) -> bytes:
    """Pickle a loss by Ray's own pickler, which NeMo-RL uses to send it."""
    payload: bytes = importlib.import_module("ray").cloudpickle.dumps(loss)
    return payload


def _require_loadable(report: Mapping[str, Any], description: str, loss: Loss) -> None:
    """Raise WorkerError if the report of a probe says that a process cannot load the loss."""
    failure = _describe_failure(report)
    if failure:
        raise WorkerError(
            f"{description} can't receive the loss '{loss.config.name}': {failure}, in {report['executable']} "
            f"(Python {report['python']}) on {report['host']}. {REMEDY}"
        )


def _describe_failure(report: Mapping[str, Any]) -> str | None:
    errors = report["errors"]
    if "nemo_geomask" in errors:
        return f"nemo_geomask is not importable there ({errors['nemo_geomask']})"
    if report["version"] != nemo_geomask.__version__:
        return f"nemo_geomask is {report['version']} there and {nemo_geomask.__version__} here"
    source = environment_probe.source_hash(Path(nemo_geomask.__file__).parent)
    if report["source"] != source:
        return (
            f"nemo_geomask {nemo_geomask.__version__} has other code there ({report['source']}) than here ({source}): "
            "an older build; `uv sync --reinstall-package nemo-geomask`, with NRL_FORCE_REBUILD_VENVS=true for workers"
        )
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
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    with _probe_as_code() as ray:
        task = ray.remote(num_cpus=0, max_retries=0, runtime_env=dict(runtime_env))(environment_probe.probe)
        # Like NeMo-RL, which builds no environment on a head node without CPUs.
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        strategies = [scheduling.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        tasks = [task.options(scheduling_strategy=strategy).remote(payload) for strategy in strategies]
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
