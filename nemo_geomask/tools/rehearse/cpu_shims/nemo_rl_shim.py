"""Shims of NeMo-RL: identities of GPUs, and the transfer of weights from trainer to sampler."""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute

IDENTITY = "NEMO_GEOMASK_REHEARSAL"
"""Environment variable with an identifier that is unique to this rehearsal."""

_FREE_MEMORY = 1 << 28
# Size of the range of ports that NeMo-RL reserves for engines, without those of the last four engines of a machine.
_PORT_RANGE = 1200
_STACKED = re.compile(r"(.*\.mixer\.experts)\.(up_proj|down_proj)$")
_TIMEOUT = datetime.timedelta(minutes=3)


def nvml(module: Any) -> Iterator[Patch]:
    """Answer with an identity and a memory for each GPU that Ray claims to have.

    base_policy_worker.py:128,155, vllm_backend.py:289 and vllm_worker.py:358,600 ask for them. The identity is part of
    the name of the socket between a trainer and the sampler on the same GPU, so both must give the same.
    """

    def uuid(index: int | None = None) -> str:
        ray = sys.modules.get("ray")
        ids = ray.get_gpu_ids() if ray is not None and ray.is_initialized() else []
        card = ids[0] if ids else os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        return f"CPU-{os.environ.get(IDENTITY, '0')}-{int(float(card))}"

    yield attribute(module, "get_device_uuid", lambda original: uuid)
    yield attribute(module, "get_free_memory_bytes", lambda original: lambda index=None: _FREE_MEMORY)
    if hasattr(module, "log_gpu_memory_diagnostics"):
        yield attribute(module, "log_gpu_memory_diagnostics", lambda original: lambda *args, **kwargs: None)


def ranges(module: Any) -> Iterator[Patch]:
    """Leave methods without ranges for the profiler of a GPU (nsys.py:88 of v0.6.0).

    A method with such a range is pickled by value, with all modules of torch that it may refer to, and torch 2.13's
    torch.distributed.config can't be pickled.
    """
    yield attribute(module, "wrap_with_nvtx_name", lambda original: lambda name: lambda function: function)


def policy_utils(module: Any) -> Iterator[Patch]:
    """Send the tensor itself over the socket, in place of CUDA's handle of shared memory (policy/utils.py:248,553)."""

    def handle(original: Any) -> Any:
        return lambda tensor: (tensor.detach().clone(),)

    def rebuild(original: Any) -> Any:
        return lambda handle, device: handle[0]

    yield attribute(module, "get_handle_from_tensor", handle)
    yield attribute(module, "rebuild_cuda_tensor_from_ipc", rebuild)


def numa(module: Any) -> Iterator[Patch]:
    """Bind no process to the cores near its GPU.

    dtensor_policy_worker.py:230, vllm_worker.py:283 and vllm_backend.py:223 do.
    """
    for name, answer in (("bind_to_gpu_numa", False), ("resolve_visible_gpu_id", None)):
        if hasattr(module, name):
            yield attribute(module, name, functools.partial(_constant, answer))


def _constant(answer: Any, original: Any) -> Any:
    return lambda *args, **kwargs: answer


def ports(module: Any) -> Iterator[Patch]:
    """Give each rehearsal its own range of ports for engines.

    NeMo-RL (virtual_cluster.py:117, vllm_worker.py:219) looks for free ports from a fixed number on, and binds them
    later. Of two rehearsals that start together on one machine, one would fail.
    """
    name = "DEFAULT_VLLM_PORT_RANGE_LOW"
    if hasattr(module, name):  # v0.6.0 takes any free port
        offset = int(os.environ.get(IDENTITY, "0"), 16) % _PORT_RANGE
        yield attribute(module, name, lambda original: original + offset)


def data_plane(module: Any) -> Iterator[Patch]:
    """Install nothing for TransferQueue's actors: here all processes share one environment.

    data_plane/adapters/transfer_queue.py:139 has Ray install TransferQueue for them from the network.
    """
    yield attribute(module, "_patch_tq_actor_runtime_env", lambda original: lambda: None)


def packed_tensor(module: Any) -> Iterator[Patch]:
    """Fix the size of a transfer of weights, which packed_tensor.py:27 derives from the GPU's memory."""
    yield attribute(module, "get_target_packed_tensor_size", lambda original: lambda: 1 << 24)


def stacked_experts(module: Any) -> Iterator[Patch]:
    """Send Nemotron's experts by their published names, one weight per expert (dtensor_policy_worker_v2.py:160).

    The code that is published with the models, which NeMo-RL loads, has a module for each expert. The class that
    transformers has since, of which the tiny model is made, stacks all experts of a layer, and vLLM skips those names.
    """

    def adapt(original: Any) -> Any:
        def named(model_part: Any, fqn: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            match = _STACKED.match(fqn)
            if match is None or getattr(model_part, "state_dict_adapter", None):
                return original(model_part, fqn, tensor, *args, **kwargs)
            return [(f"{match[1]}.{number}.{match[2]}.weight", weight) for number, weight in enumerate(tensor)]

        return named

    yield attribute(module, "_maybe_adapt_tensor_to_hf", adapt)


def weights_group(module: Any) -> Iterator[Patch]:
    """Use gloo between a trainer and a sampler on different GPUs; stateless_process_group.py:23 uses nccl4py."""
    dist: Any = importlib.import_module("torch.distributed")

    class Gloo:
        def __init__(self, master_address: str, port: int, rank: int, world_size: int) -> None:
            self.rank, self.world_size = rank, world_size
            self._store = dist.TCPStore(master_address, port, world_size, is_master=rank == 0)
            self._group: Any = None

        def init_nccl_communicator(self, device: Any, *, peer: str = "nemo") -> None:
            store = dist.PrefixStore("weights", self._store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world_size, _TIMEOUT)

        def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self._group.broadcast([tensor], options).wait()

    yield attribute(module, "StatelessProcessGroup", lambda original: Gloo)
