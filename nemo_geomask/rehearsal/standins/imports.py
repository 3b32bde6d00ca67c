"""When a stand-in is put up: right after its module is imported, whoever imports it, in every process."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["STAND_INS", "AfterImport", "MissingModules", "register"]

_HERE = "nemo_geomask.rehearsal.standins"

STAND_INS: Mapping[str, str] = {
    "torch": "cuda:torch",
    "nemo_rl.utils.nvml": "host:nvml",
    "nemo_rl.utils.nsys": "host:ranges",
    "nemo_rl.models.policy.utils": "host:policy_utils",
    "nemo_rl.distributed.numa_utils": "host:numa",
    "nemo_rl.distributed.virtual_cluster": "host:ports",
    "nemo_rl.distributed.stateless_process_group": "host:weights_group",
    "nemo_rl.data_plane.adapters.transfer_queue": "host:data_plane",
    "nemo_rl.utils.packed_tensor": "host:packed_tensor",
    "vllm.engine.arg_utils": "engine:arguments",
    "vllm.model_executor.layers.utils": "engine:layers",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe": "engine:experts",
    "vllm.model_executor.layers.fused_moe.layer": "engine:fused_experts",
    "vllm.v1.engine.async_llm": "engine:requests",
    "vllm.v1.worker.gpu_model_runner": "engine:routes",
    "megatron.core.jit": "megatron:jit",
    "megatron.core.optimizer.clip_grads": "megatron:clip_grads",
    "megatron.core.tensor_parallel.random": "megatron:random",
    "megatron.core.distributed.param_and_grad_buffer": "megatron:buffers",
    "megatron.core.transformer.dot_product_attention": "attention:megatron",
    "megatron.core.transformer.torch_norm": "megatron:norm",
    "megatron.core.transformer.moe.token_dispatcher": "megatron:dispatcher",
    "megatron.core.transformer.moe.moe_utils": "megatron:experts",
    "megatron.bridge.training.initialize": "megatron:initialize",
    "megatron.bridge.models.gpt_provider": "megatron:layer_spec",
}
"""Module of a host: module and function here whose patches are applied to it."""

_NEEDING = {"megatron.bridge.peft.lora": "\nimport transformer_engine"}
"""Absent only where its source has this: later versions do without."""

ABSENT: Mapping[str, str] = {
    # Module: who imports it at its top, and needs nothing of it to train a plain model on a CPU.
    "nccl": "nemo_rl/distributed/stateless_process_group.py:23 (nccl4py; the group itself is host.weights_group)",
    "modelopt": "megatron/bridge: quantisation",
    "megatron.bridge.training.inprocess_restart": ":22 nvidia_resiliency_ext: restarts of CUDA processes",
    "megatron.bridge.training.pretrain": ":19 nvidia_resiliency_ext; not what NeMo-RL trains with",
    "megatron.bridge.peft.lora_layers": ":20 transformer_engine.pytorch",
    "megatron.bridge.peft.lora": ":22 transformer_engine.pytorch, v0.6.0's alone",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec": ":28 transformer_engine.pytorch",
    "nemo_automodel.components._peft.lora_kernel": "triton kernels, compiled at import",
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds a module as Python would, and puts up its stand-in once it has run.

    Args:
        stand_ins: as :data:`STAND_INS`.
    """

    def __init__(self, stand_ins: Mapping[str, str] = STAND_INS) -> None:
        self._stand_ins = stand_ins
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that goes on to the stand-in."""
        if fullname not in self._stand_ins or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Standing(spec.loader, self._stand_ins[fullname])
        return spec


class _Standing(importlib.abc.Loader):
    """A module's own loader, and then its stand-in."""

    def __init__(self, loader: importlib.abc.Loader, stand_in: str) -> None:
        self._loader = loader
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> object:
        # is_package, get_source and whatever else importlib's readers ask for.
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        home, _, function = self._stand_in.partition(":")
        # Not at the top: they import this package's integrations, and so torch, after whose import they are due.
        from nemo_geomask.integrations.nemo_rl import patch

        home = home if "." in home else f"{_HERE}.{home}"
        patch.apply_all(getattr(importlib.import_module(home), function)(module))


class MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that can't be there, and of which nothing is called: whatever is asked of them is an empty class.

    Args:
        absent: as :data:`ABSENT`; those of them that are importable are left alone.
    """

    def __init__(self, absent: Mapping[str, str] = ABSENT) -> None:
        self._absent = tuple(name for name in absent if "." in name or importlib.util.find_spec(name) is None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for one of the absent modules or for anything in it."""
        if needed := _NEEDING.get(fullname):
            source = Path(next(iter(path or ()), ""), f"{fullname.rpartition('.')[2]}.py")
            if not source.is_file() or needed not in source.read_text(encoding="utf-8"):
                return None
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._absent):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _Nothing:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


class _Empty(types.ModuleType):
    __file__ = "absent"
    __version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def register() -> None:
    """Put up the stand-ins in this process, each when its module is imported; for the start of a process."""
    sys.meta_path.insert(0, MissingModules())
    sys.meta_path.insert(0, AfterImport())
