"""Shims of torch: the CPU wherever a host names CUDA."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute

_FACTORIES = (
    *("tensor", "empty", "zeros", "ones", "full", "arange", "randn", "rand", "randint", "as_tensor", "eye"),
    *("zeros_like", "empty_like", "ones_like", "full_like", "linspace", "empty_strided", "randperm"),
)
_METHODS = ("new_zeros", "new_empty", "new_ones", "new_full", "new_tensor")


def torch(module: Any) -> Iterator[Patch]:
    """Yield all patches of torch, which NeMo-RL's workers, Megatron and vLLM need.

    dtensor_policy_worker.py, base_policy_worker.py and others; each group of patches names its lines.
    """
    yield from _devices(module)
    yield from _gpu(module)
    yield from _groups(module)


def _devices(torch: Any) -> Iterator[Patch]:
    """Yield patches that create tensors and modules on the CPU, and leave them there.

    dtensor_policy_worker.py:618,704,999,1069, parallelize.py:855,867: factories with device="cuda"; :172 and
    model_utils.py: pin_memory=True; :652,1961,1985,2047: .to("cuda"); :675,739,759,1090,1966, model_utils.py:1690:
    .cuda(); :737,819,1169: torch.autocast(device_type="cuda").
    """

    def cpu(device: Any) -> Any:
        if isinstance(device, str):
            return "cpu" if device.split(":")[0] == "cuda" else device
        if isinstance(device, torch.device):
            return torch.device("cpu") if device.type == "cuda" else device
        # An int is the index of a GPU, from torch.cuda.current_device().
        return torch.device("cpu") if isinstance(device, int) and not isinstance(device, bool) else device

    def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("device") is not None:
            kwargs["device"] = cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return kwargs

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **on_cpu(kwargs))

        return make

    def to(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def move(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *map(cpu, args), **on_cpu(kwargs))

        return move

    def stay(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: self

    def context(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, device: original(self, cpu(device))

    # `with torch.device("meta")` recognises factories by identity, from a list that it makes once: here, before they
    # are replaced. Otherwise transformers' from_pretrained leaves the frequencies of rotary embeddings uninitialised.
    contexts = importlib.import_module("torch.utils._device")
    contexts._device_constructors()
    yield attribute(contexts.DeviceContext, "__init__", context)
    for name in _FACTORIES:
        yield attribute(torch, name, factory)
    for name in _METHODS:
        yield attribute(torch.Tensor, name, factory)
    for owner in (torch.Tensor, torch.nn.Module):
        yield attribute(owner, "to", to)
        yield attribute(owner, "cuda", stay)
    yield attribute(torch.Tensor, "pin_memory", stay)
    yield attribute(torch.Tensor, "record_stream", lambda original: lambda self, stream: None)

    def autocast(original: Any) -> Any:
        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            original.__init__(self, cpu(device_type), *args, **kwargs)

        # A class and not a function, because hosts derive from torch.autocast.
        return type("autocast", (original,), {"__init__": init})

    yield attribute(torch, "autocast", autocast)
    yield attribute(torch.amp, "autocast", lambda original: torch.autocast)


class _Stream:
    """A CUDA stream or event whose work is done as soon as it is queued."""

    cuda_stream = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def device(self) -> Any:
        return importlib.import_module("torch").device("cpu")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def wait(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = synchronize = wait_stream = wait_event = wait


def _gpu(torch: Any) -> Iterator[Patch]:
    """Yield patches of torch.cuda: one GPU without memory.

    base_policy_worker.py:114,131,157,173; vllm_backend.py:223,638; policy/utils.py:157-163,382,520; nsys.py:118.
    Megatron's checkpointing.py:506,3199, initialize.py:724 and clip_grads.py.
    """
    cuda, stream, current = torch.cuda, _Stream(), [0]

    def choose(device: Any) -> None:
        current[0] = device if isinstance(device, int) else 0

    def answering(answer: Any) -> Callable[[Any], Callable[..., Any]]:
        # A new function for each name: torch._dynamo refuses one object under two names with different rules.
        return lambda original: lambda *args, **kwargs: answer

    nothing = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state", "set_stream", "ipc_collect")
    for name in nothing:
        yield attribute(cuda, name, answering(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        yield attribute(cuda, name, answering(0))
    for name in ("current_stream", "default_stream"):
        yield attribute(cuda, name, answering(stream))
    yield attribute(cuda, "get_device_name", answering("CPU"))
    yield attribute(cuda, "get_device_capability", answering((9, 0)))
    yield attribute(cuda, "stream", lambda original: lambda *args: contextlib.nullcontext())
    yield attribute(cuda, "current_device", lambda original: lambda: current[0])
    yield attribute(cuda, "set_device", lambda original: choose)
    yield attribute(cuda, "get_rng_state", lambda original: lambda *args: torch.get_rng_state())
    for name in ("Stream", "Event"):
        yield attribute(cuda, name, lambda original: type(original.__name__, (_Stream,), {}))
    for name in ("FloatTensor", "DoubleTensor", "IntTensor", "LongTensor", "ByteTensor"):
        yield attribute(cuda, name, functools.partial(lambda name, original: getattr(torch, name), name))
    for module, name in (("nvtx", "range_push"), ("nvtx", "range_pop"), ("profiler", "start"), ("profiler", "stop")):
        yield attribute(getattr(cuda, module), name, answering(None))


def _groups(torch: Any) -> Iterator[Patch]:
    """Yield patches of torch.distributed: gloo in place of nccl, and a mesh of CPUs.

    dtensor_policy_worker.py:262: init_process_group(backend="nccl"); :409: init_device_mesh("cuda", ...).
    """
    dist: types.ModuleType = torch.distributed
    mesh = importlib.import_module("torch.distributed.device_mesh")

    def gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "nccl" in str(kwargs.get("backend") or ""):
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            return original(*("gloo" if isinstance(arg, str) and arg == "nccl" else arg for arg in args), **kwargs)

        return make

    def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
            return original(group, async_op)

        return wait

    def on_cpus(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(device_type: str, *args: Any, **kwargs: Any) -> Any:
            return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        return make

    for name in ("init_process_group", "new_group"):
        yield attribute(dist.distributed_c10d, name, gloo)
        yield attribute(
            dist, name, functools.partial(lambda name, original: getattr(dist.distributed_c10d, name), name)
        )
    yield attribute(dist, "new_subgroups_by_enumeration", gloo)
    yield attribute(dist, "barrier", barrier)
    yield attribute(mesh, "init_device_mesh", on_cpus)
    yield attribute(dist, "init_device_mesh", lambda original: mesh.init_device_mesh)
