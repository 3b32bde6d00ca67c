"""NeMo-RL's real ``RayWorkerGroup``, its workers in this interpreter or in another; prints what happened as JSON.

Usage: workers.py OTHER_PYTHON FOLDER_WITH_NEMO_GEOMASK
"""

import json
import os
import subprocess
import sys

import ray
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

import nemo_geomask
from nemo_geomask.hosts.nemo_rl import prepare_policy

other, folder = sys.argv[1:]
ACTOR = "policy_worker.Worker"
environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]}
ray.init("local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="error")


class Policy:
    """NeMo-RL's policy over its real worker group, as far as a policy needs it for this."""

    def __init__(self, python, env_vars=None, packed=True):
        registry.ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = python
        self.cfg = {"sequence_packing": {"enabled": packed}}
        cluster = RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=1)
        try:
            self.worker_group = RayWorkerGroup(
                cluster, RayWorkerBuilder(ACTOR, {}), workers_per_node=1, env_vars=env_vars or {}
            )
        except BaseException:
            cluster.shutdown()
            raise

    def train(self, data, loss_fn):
        return ray.get(self.worker_group.workers[0].train.remote(loss_fn))

    def get_logprobs(self, data):
        raise NotImplementedError

    def is_prepared(self):
        return ray.get(self.worker_group.workers[0].is_prepared.remote())


def prepared(*args, **kwargs):
    """What a worker that is handed over to the package computes, or the error."""
    policy = None
    try:
        policy = Policy(*args, **kwargs)
        before = policy.is_prepared() if args[0] == sys.executable else None
        prepare_policy(policy, loss)
        return before, *policy.train({}, loss)
    except nemo_geomask.GeomaskError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if policy is not None:
            policy.worker_group.shutdown(cleanup_method=None)
        del policy  # and with it the cluster, whose name the next one takes


loss = nemo_geomask.build_loss({"name": "gspo", "token_level_loss": False, "reference_policy_kl_penalty": 0.0})
path = os.pathsep.join([environment["PYTHONPATH"], folder])
report = {
    "here": prepared(sys.executable),
    "padded": prepared(sys.executable, packed=False),
    "missing": prepared(other),
    "with_path": prepared(other, {"PYTHONPATH": path}),
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
