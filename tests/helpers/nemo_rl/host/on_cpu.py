"""``on_cpu.py SCRIPT …``: one of NeMo-RL's own scripts as ``nemo-geomask run`` runs it, GPUs' parts replaced."""

import importlib
import os
import sys

import fakes
import ray
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.utils import register_env

from nemo_geomask.errors import GeomaskError
from nemo_geomask.hosts.nemo_rl.launch import launch

for actor in ("fakes.Environment", *registry.ACTOR_ENVIRONMENT_REGISTRY):
    registry.ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
register_env("fake", "fakes.Environment")

for name in os.environ["HOST_MODULES"].split():
    module = importlib.import_module(name)
    module.RayVirtualCluster, module.Policy, module.VllmGeneration = fakes.Cluster, fakes.Policy, fakes.Generation
    if hasattr(module, "Value"):
        module.Value = fakes.Value
if os.environ.get("HOST_DATA_PLANE"):
    importlib.import_module("data_plane")

ray.init(
    "local", num_cpus=8, include_dashboard=False, runtime_env={"env_vars": dict(os.environ)}, logging_level="error"
)
# NeMo-RL's memory report looks for a cluster, and must not find another one on this machine.
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
script = sys.argv[1]
importlib.import_module("nemo_rl.distributed.virtual_cluster").init_ray = lambda *args, **kwargs: None
try:
    launch(script, sys.argv[2:])
except GeomaskError as error:
    print(f"nemo-geomask: error: {error}", file=sys.stderr)
    sys.exit(2)
