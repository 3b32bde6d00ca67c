"""Environment of the driver: variables, Python path and files."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nemo_geomask
from nemo_geomask.recipe import ROOT_VARIABLE
from nemo_geomask.tools.rehearse.cpu_shims.nemo_rl_shim import IDENTITY
from nemo_geomask.tools.rehearse.plan import Plan

SETTINGS = "NEMO_GEOMASK_REHEARSAL_SETTINGS"
"""Environment variable with the path of the rehearsal's settings, a JSON file."""

_SITE = """import nemo_geomask.tools.rehearse.cpu_shims

nemo_geomask.tools.rehearse.cpu_shims.register()
"""
_OLD_PYTHON = """import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses typing's before Python 3.12
typing.override = typing_extensions.override  # Megatron-LM imports it
"""


@contextmanager
def launch_environment(
    plan: Plan, *, first_seed: int | None = None, job: tuple[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Write the driver's files and yield its environment variables; files outside the folder are removed at the end.

    The arguments are those of :func:`~.rehearsed_run.driver`.
    """
    folder, checkout = plan.folder, plan.options.checkout
    identity = uuid.uuid4().hex[:12]
    # A short path: Ray makes sockets in it, and the path of a socket has at most 107 bytes.
    ray = Path(tempfile.mkdtemp(prefix="rehearse-", dir="/tmp" if len(tempfile.gettempdir()) > 30 else None))
    settings = {
        "folder": str(folder),
        "model": dataclasses.asdict(plan.model),
        "teacher": plan.has_teacher,
        "own_environment": plan.options.own_environment,
        "gpus": plan.options.gpus,
        "gpu_count": plan.gpu_count,
        "ray": str(ray),
        "first_seed": first_seed,
        "job": job,
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    path = [str(checkout), *_submodules(checkout, plan.uses_automodel)]
    variables = {
        SETTINGS: str(folder / "settings.json"),
        ROOT_VARIABLE: str(checkout),
        IDENTITY: identity,
        # Libraries keep copies of the tiny model, locks and caches here; by default in the home folder and in /tmp.
        "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "megatron"),
        "MEGATRON_CONFIG_LOCK_DIR": str(folder / "megatron"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TMPDIR": str(ray / "tmp"),
    }
    for name in ("NRL_MEGATRON_CHECKPOINT_DIR", "TMPDIR"):
        Path(variables[name]).mkdir()
    if not plan.options.gpus:
        site = folder / "site"
        site.mkdir()
        text = (_OLD_PYTHON if sys.version_info < (3, 12) else "") + _SITE
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        path.insert(0, str(site))
        package_parent = Path(nemo_geomask.__file__).resolve().parent.parent
        # A checkout that is not installed. Not with GPUs: there the rehearsal shows whether workers find the package.
        if package_parent.name != "site-packages":
            path.append(str(package_parent))
        variables |= _CPU
        if not plan.options.own_environment:
            # Built-in prompts and a local model: nothing has to be downloaded.
            variables |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    # Absolute: the driver runs in NeMo-RL's checkout.
    user_paths = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    variables["PYTHONPATH"] = os.pathsep.join([*path, *user_paths])
    try:
        # These would hide the GPUs that Ray claims to have, or make it join another cluster.
        unset = {"CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"}
        kept = {name: value for name, value in os.environ.items() if plan.options.gpus or name not in unset}
        yield {**kept, **variables}
    finally:
        shutil.rmtree(ray, ignore_errors=True)
        for socket in Path("/tmp").glob(f"CPU-{identity}-*.sock"):
            socket.unlink(missing_ok=True)


def has_automodel(checkout: Path) -> bool:
    """Return True if Automodel is importable, here or from NeMo-RL's checkout."""
    return importlib.util.find_spec("nemo_automodel") is not None or _is_fetched(_automodel_folder(checkout))


def supports_fp8_cache() -> bool:
    """Return True if vLLM has kernels for an fp8 KV cache on this processor (cpu_attn.py of vLLM 0.27.1)."""
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").backends.cpu.get_cpu_capability().startswith("AVX512"))


def _automodel_folder(checkout: Path) -> Path:
    return checkout / "3rdparty" / "Automodel-workspace" / "Automodel"


def _is_fetched(folder: Path) -> bool:
    # An empty folder is a submodule that was not fetched.
    return folder.is_dir() and any(folder.iterdir())


def _submodules(checkout: Path, uses_automodel: bool) -> list[str]:
    """Return the source folders of Megatron and Automodel in NeMo-RL's checkout, if its submodules were fetched."""
    # DTensor v1's workers use Automodel whenever it is importable, and then fail on mixtures of experts.
    workspaces = checkout / "3rdparty"
    folders = (
        workspaces / "Megatron-Bridge-workspace" / "Megatron-Bridge" / "src",
        workspaces / "Megatron-Bridge-workspace" / "Megatron-Bridge" / "3rdparty" / "Megatron-LM",
        workspaces / "Megatron-LM-workspace" / "Megatron-LM",
        *([_automodel_folder(checkout)] if uses_automodel else ()),
    )
    return [str(folder) for folder in filter(_is_fetched, folders)]


_CPU = {
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CUDA_ARCH_LIST": "9.0",  # Megatron's workers read it
    # Ray: no authentication, all output in the log, and no change of CUDA_VISIBLE_DEVICES in processes without a GPU.
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start a process per core in advance, and is told of more cores than there are.
    "RAY_prestart_worker_first_driver": "0",
    "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
    # vLLM: keep the weights in their original layout, so that a refit can replace them.
    "VLLM_CPU_SGL_KERNEL": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # Compute latent attention as plain attention, which gives the same result; vLLM has no other on CPUs.
    "VLLM_MLA_DISABLE": "1",
}
