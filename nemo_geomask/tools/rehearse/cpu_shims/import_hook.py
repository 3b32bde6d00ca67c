"""Import hooks that apply each shim right after its module is imported, in every process."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE = "nemo_geomask.tools.rehearse.cpu_shims"

SHIMS: Mapping[str, str] = {
    "torch": "cuda_shim:torch",
    "nemo_rl.utils.nvml": "nemo_rl_shim:nvml",
    "nemo_rl.utils.nsys": "nemo_rl_shim:ranges",
    "nemo_rl.models.policy.utils": "nemo_rl_shim:policy_utils",
    "nemo_rl.distributed.numa_utils": "nemo_rl_shim:numa",
    "nemo_rl.distributed.virtual_cluster": "nemo_rl_shim:ports",
    "nemo_rl.distributed.stateless_process_group": "nemo_rl_shim:weights_group",
    "nemo_rl.data_plane.adapters.transfer_queue": "nemo_rl_shim:data_plane",
    "nemo_rl.utils.packed_tensor": "nemo_rl_shim:packed_tensor",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": "nemo_rl_shim:stacked_experts",
    "vllm.engine.arg_utils": "vllm_shim:arguments",
    "vllm.model_executor.layers.utils": "vllm_shim:layers",
    "vllm.model_executor.layers.rotary_embedding.base": "vllm_shim:positions",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe": "vllm_shim:experts",
    "vllm.model_executor.layers.fused_moe.config": "vllm_shim:moe_config",
    "vllm.model_executor.layers.fused_moe.layer": "vllm_shim:fused_experts",
    "vllm.v1.engine.async_llm": "vllm_shim:requests",
    "vllm.v1.worker.gpu_model_runner": "vllm_shim:routes",
    "megatron.core.jit": "megatron_shim:jit",
    "megatron.core.optimizer.clip_grads": "megatron_shim:clip_grads",
    "megatron.core.tensor_parallel.random": "megatron_shim:random",
    "megatron.core.tensor_parallel.layers": "megatron_shim:reduced",
    "megatron.core.distributed.param_and_grad_buffer": "megatron_shim:buffers",
    "megatron.core.transformer.dot_product_attention": "attention_shim:megatron",
    "megatron.core.transformer.torch_norm": "megatron_shim:norm",
    "megatron.core.transformer.moe.token_dispatcher": "megatron_shim:dispatcher",
    "megatron.core.transformer.moe.moe_layer": "megatron_shim:latent_experts",
    "megatron.core.transformer.moe.moe_utils": "megatron_shim:experts",
    "megatron.bridge.training.initialize": "megatron_shim:initialize",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "megatron_shim:yarn",
    "megatron.core.ssm.gated_delta_net.common": "delta_net_shim:kernels",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": "delta_net_shim:block_spec",
    "megatron.core.models.hybrid.hybrid_block": "megatron_shim:final_norm",
    "megatron.bridge.models.gpt_provider": "megatron_shim:layer_spec",
    "megatron.bridge.models.transformer_config": "megatron_shim:fusions",
    "megatron.bridge.models.hybrid.hybrid_provider": "megatron_shim:hybrid_spec",
}
"""By module of a host: the module and function of this package that yield the patches to apply to it."""

_ABSENT_IF_SOURCE_HAS = {"megatron.bridge.peft.lora": "\nimport transformer_engine"}
"""By module of :data:`ABSENT`: it counts as absent only if its source contains this text, as early versions do."""

_ABSENT_WITHOUT = {
    "transformers.models.qwen2_vl.image_processing_qwen2_vl": "torchvision",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl": "torchvision",
}
"""By module of :data:`ABSENT`: it counts as absent only if this package is not installed."""

ABSENT: Mapping[str, str] = {
    # By module: the import that would fail, in code that training on a CPU does not call.
    "nccl": "nemo_rl/distributed/stateless_process_group.py:23 (nccl4py; see nemo_rl_shim.weights_group)",
    "modelopt": "megatron/bridge: quantisation",
    "megatron.bridge.training.inprocess_restart": ":22 nvidia_resiliency_ext: restarts of CUDA processes",
    "megatron.bridge.training.pretrain": ":19 nvidia_resiliency_ext; not what NeMo-RL trains with",
    "megatron.bridge.peft.lora_layers": ":20 transformer_engine.pytorch",
    "megatron.bridge.peft.lora": ":22 transformer_engine.pytorch, v0.6.0's alone",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec": ":28 transformer_engine.pytorch",
    "nemo_automodel.components._peft.lora_kernel": "triton kernels, compiled at import",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl": ":25 torchvision; vllm's qwen3_5.py:82 imports it",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl": "torchvision; vllm's qwen3_5.py:82 imports it",
}

IN_TORCH = ("mamba_ssm", "causal_conv1d")
"""Packages of CUDA kernels whose functions :mod:`~.mamba_shim` has in plain torch."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that finds a module as Python would, and applies its shim once the module has run.

    Args:
        shims: see :data:`SHIMS`.
    """

    def __init__(self, shims: Mapping[str, str] = SHIMS) -> None:
        self._shims = shims
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that applies the shim afterwards."""
        if fullname not in self._shims or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ShimLoader(spec.loader, self._shims[fullname])
        return spec


class _ShimLoader(importlib.abc.Loader):
    """Loader of a module that applies the module's shim afterwards."""

    def __init__(self, loader: importlib.abc.Loader, shim: str) -> None:
        self._loader = loader
        self._shim = shim

    def __getattr__(self, name: str) -> object:
        # importlib also calls is_package, get_source and others.
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        shim_module, _, function = self._shim.partition(":")
        # Imported here and not at the top of the file: patch imports torch, and torch has a shim itself.
        from nemo_geomask.hosts.nemo_rl import patch

        shim_module = shim_module if "." in shim_module else f"{_PACKAGE}.{shim_module}"
        patch.apply_all(getattr(importlib.import_module(shim_module), function)(module))


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for modules that can't be installed here.

    Those of :data:`ABSENT` are never called: each attribute is an empty class. Those of :data:`IN_TORCH` are called,
    and have functions of plain torch. Modules that can be imported stay as they are.
    """

    def __init__(self) -> None:
        needed = {name: _ABSENT_WITHOUT.get(name, name) for name in ABSENT}
        self._absent = tuple(name for name, needs in needed.items() if "." in needs or not _is_installed(needs))
        self._in_torch = tuple(name for name in IN_TORCH if not _is_installed(name))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an absent module or for a submodule of one."""
        if needed := _ABSENT_IF_SOURCE_HAS.get(fullname):
            source = Path(next(iter(path or ()), ""), f"{fullname.rpartition('.')[2]}.py")
            if not source.is_file() or needed not in source.read_text(encoding="utf-8"):
                return None
        is_absent = any(fullname == name or fullname.startswith(f"{name}.") for name in self._absent)
        if is_absent or (fullname.partition(".")[0] in self._in_torch and fullname in _modules_in_torch()):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Set the module's attributes, if it is one of plain torch."""
        if module.__name__.partition(".")[0] in self._in_torch:
            vars(module).update(_modules_in_torch()[module.__name__])


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _modules_in_torch() -> Mapping[str, Mapping[str, object]]:
    # Imported when one of them is: it imports torch.
    modules: Mapping[str, Mapping[str, object]] = importlib.import_module(f"{_PACKAGE}.mamba_shim").MODULES
    return modules


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
        empty_class = type(name, (_Nothing,), {"__module__": self.__name__})
        setattr(self, name, empty_class)
        return empty_class


def register() -> None:
    """Install the import hooks in this process; call it before any host is imported."""
    sys.meta_path.insert(0, AbsentModules())
    sys.meta_path.insert(0, AfterImport())
