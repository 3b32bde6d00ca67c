"""Shims of NeMo-RL: names of GPUs, and weights on their way from trainer to sampler."""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute

__all__ = [
    "IDENTITY",
    "data_plane",
    "numa",
    "nvml",
    "packed_tensor",
    "policy_utils",
    "ports",
    "ranges",
    "weights_group",
]

IDENTITY = "NEMO_GEOMASK_REHEARSAL"
"""Environment variable with an identifier that is unique to this rehearsal."""

_MEMORY = 1 << 28
# Ports that NeMo-RL reserves for engines, less those of the last four engines of a machine.
_PORTS = 1200
_PATIENCE = datetime.timedelta(minutes=3)


def nvml(module: Any) -> Iterator[Patch]:
    """base_policy_worker.py:128,155, vllm_backend.py:289, vllm_worker.py:358,600: a card's name and its memory.

    The name is that of the socket over which a trainer and the sampler on the same card meet: both must say the same.
    """

    def uuid(index: int | None = None) -> str:
        ray = sys.modules.get("ray")
        ids = ray.get_gpu_ids() if ray is not None and ray.is_initialized() else []
        card = ids[0] if ids else os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        return f"CPU-{os.environ.get(IDENTITY, '0')}-{int(float(card))}"

    yield attribute(module, "get_device_uuid", lambda original: uuid)
    yield attribute(module, "get_free_memory_bytes", lambda original: lambda index=None: _MEMORY)
    if hasattr(module, "log_gpu_memory_diagnostics"):
        yield attribute(module, "log_gpu_memory_diagnostics", lambda original: lambda *args, **kwargs: None)


def ranges(module: Any) -> Iterator[Patch]:
    """nsys.py:88 (v0.6.0): ranges for a card's profiler. A method inside one is pickled by value, with every module of
    torch that its names could mean; torch 2.13's torch.distributed.config can't be."""
    yield attribute(module, "wrap_with_nvtx_name", lambda original: lambda name: lambda function: function)


def policy_utils(module: Any) -> Iterator[Patch]:
    """policy/utils.py:248,553: CUDA's handles of shared memory. The tensor itself goes over the same socket."""

    def handle(original: Any) -> Any:
        return lambda tensor: (tensor.detach().clone(),)

    def rebuild(original: Any) -> Any:
        return lambda handle, device: handle[0]

    yield attribute(module, "get_handle_from_tensor", handle)
    yield attribute(module, "rebuild_cuda_tensor_from_ipc", rebuild)


def numa(module: Any) -> Iterator[Patch]:
    """dtensor_policy_worker.py:230, vllm_worker.py:283, vllm_backend.py:223: processes bound near their card."""
    for name, answer in (("bind_to_gpu_numa", False), ("resolve_visible_gpu_id", None)):
        if hasattr(module, name):
            yield attribute(module, name, functools.partial(_constant, answer))


def _constant(answer: Any, original: Any) -> Any:
    return lambda *args, **kwargs: answer


def ports(module: Any) -> Iterator[Patch]:
    """virtual_cluster.py:117, vllm_worker.py:219: engines look for free ports from one number on, each run's the same,
    and bind them later. On cards one run has the machine; of two rehearsals on one, begun together, one would fail."""
    name = "DEFAULT_VLLM_PORT_RANGE_LOW"
    if hasattr(module, name):  # v0.6.0 takes any that is free
        offset = int(os.environ.get(IDENTITY, "0"), 16) % _PORTS
        yield attribute(module, name, lambda original: original + offset)


def data_plane(module: Any) -> Iterator[Patch]:
    """data_plane/adapters/transfer_queue.py:139: for TransferQueue's actors Ray is to install it once more, as
    nemo-rl's metadata have it, from the network; here all processes share one environment."""
    yield attribute(module, "_patch_tq_actor_runtime_env", lambda original: lambda: None)


def packed_tensor(module: Any) -> Iterator[Patch]:
    """packed_tensor.py:27: the size of a transfer, a share of the card's memory."""
    yield attribute(module, "get_target_packed_tensor_size", lambda original: lambda: 1 << 24)


def weights_group(module: Any) -> Iterator[Patch]:
    """stateless_process_group.py:23: trainer and sampler on cards of their own share a group of nccl4py's; here
    gloo's."""
    dist: Any = importlib.import_module("torch.distributed")

    class Gloo:
        def __init__(self, master_address: str, port: int, rank: int, world_size: int) -> None:
            self.rank, self.world_size = rank, world_size
            self._store = dist.TCPStore(master_address, port, world_size, is_master=rank == 0)
            self._group: Any = None

        def init_nccl_communicator(self, device: Any, *, peer: str = "nemo") -> None:
            store = dist.PrefixStore("weights", self._store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world_size, _PATIENCE)

        def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self._group.broadcast([tensor], options).wait()

    yield attribute(module, "StatelessProcessGroup", lambda original: Gloo)
