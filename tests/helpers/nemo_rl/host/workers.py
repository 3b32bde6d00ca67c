"""NeMo-RL's real ``RayWorkerGroup``, its workers in this interpreter or in another; prints what happened as JSON.

Usage: workers.py OTHER_PYTHON FOLDER_WITH_NEMO_GEOMASK
"""

import json
import os
import subprocess
import sys

import ray
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from pydantic import BaseModel

import nemo_geomask

other, folder = sys.argv[1:]
ACTOR = "policy_worker.Worker"
environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]}
ray.init("local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="error")


def config(**settings):
    if issubclass(ClippedPGLossConfig, BaseModel):
        return ClippedPGLossConfig(**settings)
    return {**nemo_geomask.build_loss({}).config.model_dump(exclude={"name", "masks", "options"}), **settings}


def group(python, env_vars=None):
    registry.ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = python
    cluster = RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=1)
    try:
        return RayWorkerGroup(cluster, RayWorkerBuilder(ACTOR, {}), workers_per_node=1, env_vars=env_vars or {})
    except BaseException:
        cluster.shutdown()
        raise


def outcome(function):
    nemo_geomask.install()
    try:
        return function()
    except nemo_geomask.GeomaskError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        nemo_geomask.uninstall()


def trained(started, loss):
    answer = ray.get(started.workers[0].train.remote(loss))
    started.shutdown(cleanup_method=None)
    return answer


def loss():
    return ClippedPGLossFn(config(name="gspo", token_level_loss=False, reference_policy_kl_penalty=0.0))


def here():
    sent = loss()
    return trained(group(sys.executable), sent)


def with_path():
    sent = loss()
    path = os.pathsep.join([environment["PYTHONPATH"], folder])
    return trained(group(other, {"PYTHONPATH": path}), sent)


def workers_first():
    started = group(other)
    try:
        loss()
    finally:
        started.shutdown(cleanup_method=None)


def here_workers_first():
    started = group(sys.executable)
    before = ray.get(started.workers[0].is_prepared.remote())
    return before, *trained(started, loss())


def without_name():
    own = ClippedPGLossFn(config(reference_policy_kl_penalty=0.0))
    found = []
    for python, method in ((other, "is_alive"), (sys.executable, "is_prepared")):
        started = group(python)
        found.append(ray.get(getattr(started.workers[0], method).remote()))
        started.shutdown(cleanup_method=None)
        del started  # and with it the cluster, whose name the next one takes
    return type(own).__name__, *found


report = {
    "here": outcome(here),
    "here_workers_first": outcome(here_workers_first),
    "missing": outcome(lambda: (loss(), group(other))),
    "workers_first": outcome(workers_first),
    "with_path": outcome(with_path),
    "without_name": outcome(without_name),
}
address = ray.get_runtime_context().gcs_address
for name, options in {"doctor": [], "doctor_ray": ["--ray", address]}.items():
    done = subprocess.run(
        [sys.executable, "-m", "nemo_geomask.cli", "doctor", "--worker", other, *options],
        capture_output=True,
        text=True,
    )
    report[name] = [done.returncode, done.stdout, done.stderr]
print("report:" + json.dumps(report))
