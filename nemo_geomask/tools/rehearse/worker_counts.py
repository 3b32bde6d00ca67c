"""What is counted in NeMo-RL's workers: calls of losses, refits, and checksums of the weights on both sides of a refit.

A refit renames weights (q, k and v become one matrix in vLLM, and so do experts) and casts them to the engine's dtype.
The checksum of a group of weights is therefore its sum and its sum of absolute values in float64: neither fusion nor
order changes them. A group is one layer of the model, or one weight outside of the layers. The decay of a state space
is a group of its own, because vLLM stores A = -exp(A_log) where the trainer has A_log. The weights that are sent
are cast to each dtype that the engine may have, and summed in each. Both sides then agree to float64's rounding, and
even a single outdated bfloat16 shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_geomask.errors import EngineError
from nemo_geomask.hosts.nemo_rl import facts, patch
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.segments import PackedSegments

Sums = dict[str, dict[str, list[float]]]
"""By group and dtype: the sum, the sum of absolute values and the number of elements."""

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_LOG_DECAY, _DECAY = "A_log", "A"
_NEVER_SENT = ".prob_scale"
"""Scale of an fp8 KV cache that NeMo-RL sends no value of, beside those of q, k and v."""
ENGINE_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of an engine; the weights that are sent are cast to each, exactly as the engine would cast them."""
_TOLERANCE = 1e-10
"""Largest difference of two sums that float64's rounding explains, relative to the sum of absolute values."""

_ENGINE_TIMEOUT = 60.0  # seconds
PART = 1 << 24  # values that are converted at once

# In a training worker: the sums of the last complete refit, and the number of refits.
_sent: Sums = {}
_refits = 0


def group_of(name: str) -> str:
    """Return the group of a weight by its name: its layer, or the weight's own name without the model's prefix."""
    match, last = _LAYER.search(name), name.rpartition(".")[2]
    if not match:
        return ".".join(name.split(".")[-2:])
    layer = match[0].strip(".")
    return f"{layer}.{last}" if last in (_LOG_DECAY, _DECAY) else layer


def _sum_sent(sums: Sums, name: str, tensor: Any) -> None:
    """Add a weight that is sent to the sums of its group, in each dtype that the engine may have."""
    _add(sums, name, tensor, ENGINE_DTYPES)
    if name.endswith(f".{_LOG_DECAY}"):
        # mamba_mixer2.py:225: vLLM's loader applies -exp to the float32 value. Models that keep A_log have no A.
        _add(sums, f"{name.removesuffix(_LOG_DECAY)}{_DECAY}", -tensor.detach().float().exp(), ENGINE_DTYPES)


def _add(sums: Sums, name: str, tensor: Any, dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        _increase(sums.setdefault(group_of(name), {}).setdefault(dtype, [0.0, 0.0, 0.0]), sums_of(tensor, dtype))


def sums_of(tensor: Any, dtype: str) -> list[float]:
    """Return sum, sum of absolute values and number of a tensor's values in a dtype, without a whole copy of it."""
    total = [0.0, 0.0, float(tensor.numel())]
    for part in tensor.detach().reshape(-1).split(PART):
        values = part.to(getattr(torch, dtype)).double()
        total[0] += float(values.sum())
        total[1] += float(values.abs().sum())
    return total


def _increase(total: list[float], values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        total[index] += value


def observe_sends(actor: Any = None) -> Iterator[patch.Patch]:
    """Yield patches by which this training worker sums the weights that NeMo-RL sends in each refit."""
    namespaces = patch.nemo_rl_namespaces(actor)
    utils = importlib.import_module("nemo_rl.models.policy.utils")
    if hasattr(utils, "stream_weights_via_ipc_zmq_impl"):
        yield patch.function(utils, "stream_weights_via_ipc_zmq_impl", sum_streamed, namespaces=namespaces)
    packed = importlib.import_module("nemo_rl.utils.packed_tensor")
    if hasattr(packed, "packed_broadcast_producer"):
        yield patch.function(packed, "packed_broadcast_producer", sum_broadcast, namespaces=namespaces)


def sum_streamed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap NeMo-RL's ``stream_weights_via_ipc_zmq_impl`` so that the weights are summed on their way."""

    def observed(weights: Any, sums: Sums) -> Iterator[Any]:
        for name, tensor in weights:
            _sum_sent(sums, name, tensor)
            yield name, tensor

    return _summing(original, "params_generator", observed)


def sum_broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap NeMo-RL's ``packed_broadcast_producer`` so that the weights are summed on their way."""

    def observed(convert: Callable[[Any], Any], sums: Sums) -> Callable[[Any], Any]:
        def call(item: Any) -> Any:
            tensor = convert(item)
            _sum_sent(sums, item[0], tensor)
            return tensor

        return call

    return _summing(original, "post_iter_func", observed)


def _summing(original: Callable[..., Any], argument: str, observed: Callable[[Any, Sums], Any]) -> Callable[..., Any]:
    """Wrap a function that sends weights: ``observed`` replaces one of its arguments, and adds to the sums."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def send(*args: Any, **kwargs: Any) -> Any:
        global _refits
        bound = signature.bind(*args, **kwargs)
        sums: Sums = {}
        bound.arguments[argument] = observed(bound.arguments[argument], sums)
        result = original(*bound.args, **bound.kwargs)
        _sent.clear()
        _sent.update(sums)
        _refits += 1
        return result

    return send


def read_sent_sums(actor: Any = None) -> dict[str, Any]:
    """Return the number of refits that this training worker has sent, and the sums of the last one."""
    return {"refits": _refits, "sums": dict(_sent)}


def local_sums(actor: Any) -> list[float] | None:
    """Return the sum and the sum of absolute values of this worker's own shard of the trained weights.

    Returns:
        None if the worker's model can't be read.
    """
    model: Any = getattr(actor, "model", None)
    modules: Any = model if isinstance(model, list | tuple) else [model]
    if not all(isinstance(module, torch.nn.Module) for module in modules):
        return None
    total = [0.0, 0.0]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                _increase(total, sums_of(shard, "float64")[:2])
    return total


def engine_sums(actor: Any) -> Any:
    """Return the sums of the parameters in this generation worker's engine, one for each of the engine's processes.

    Returns:
        None if the worker has no engine of its own.
    """
    engine = getattr(actor, "llm", None)
    if engine is None:
        return None
    answer = engine.collective_rpc(sum_parameters)
    if not inspect.isawaitable(answer):
        return answer
    # Ray runs this function beside the event loop of an asynchronous engine's worker, in another thread.
    return asyncio.run_coroutine_threadsafe(answer, _event_loop(engine)).result(_ENGINE_TIMEOUT)  # type: ignore[arg-type]


def _event_loop(engine: Any) -> asyncio.AbstractEventLoop:
    """Return the event loop of an asynchronous engine: that of the tasks that read its answers."""
    resources = getattr(engine.engine_core, "resources", None)
    for task in (getattr(engine, "output_handler", None), getattr(resources, "output_queue_task", None)):
        if task is not None:
            loop: asyncio.AbstractEventLoop = task.get_loop()
            return loop
    raise EngineError("the asynchronous engine has no task that reads its answers")


def sum_parameters(worker: Any) -> Sums:
    """Sum the parameters of the model in one process of a vLLM engine, by the parameter's name."""
    model = worker.model_runner.model
    modules = dict(model.named_modules()) if hasattr(model, "named_modules") else {}
    sums: Sums = {}
    for name, parameter in model.named_parameters():
        if name.endswith(_NEVER_SENT):
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        sums[name] = {dtype: sums_of(parameter, dtype)}
        # vLLM's QKVParallelLinear: with more processes than heads of K and V, each head is in several of them.
        module = modules.get(name.rpartition(".")[0])
        copies = getattr(module, "num_kv_head_replicas", 1)
        if copies > 1 and parameter.dim():
            heads = sums_of(parameter[module.num_heads * module.head_size :], dtype)  # type: ignore[union-attr]
            _increase(sums[name][dtype], [value * (1 / copies - 1) for value in heads])
    return sums


def merge_processes(processes: Sequence[Sums]) -> Sums:
    """Return the sums by group of an engine whose processes hold shards or copies of its parameters.

    A parameter with equal sums in all processes that hold it is a copy, which counts once; shards add up. A copy that
    one process has not updated makes them differ, so that the group does.
    """
    merged: Sums = {}
    for name in dict.fromkeys(name for process in processes for name in process):
        parts = [process[name] for process in processes if name in process]
        for part in parts[:1] if all(part == parts[0] for part in parts) else parts:
            for dtype, values in part.items():
                _increase(merged.setdefault(group_of(name), {}).setdefault(dtype, [0.0, 0.0, 0.0]), values)
    return merged


@dataclass(frozen=True)
class Difference:
    """A group of weights that differs between trainer and engine."""

    group: str  # the layer or the weight
    sent: float  # the trainer's sum of absolute values, in the engine's dtype
    in_engine: float  # the engine's sum of absolute values
    size: float  # the larger difference of both sums, relative to the trainer's sum of absolute values


def compare(sent: Mapping[str, Any], engine: Mapping[str, Any]) -> list[Difference]:
    """Return the groups whose sums differ; a weight that one side lacks (a tied embedding) is not compared.

    A layer that is not sent, or that the engine does not have, differs by its whole size.
    """
    differences = []
    for group in (group for group in {**sent, **engine} if group.startswith("layers.")):
        if group.count(".") == 1 and not (sent.get(group) and engine.get(group)):
            sizes = [max((sums[1] for sums in side.get(group, {}).values()), default=0.0) for side in (sent, engine)]
            differences.append(Difference(group, sizes[0], sizes[1], 1.0))
    for group in sent:
        if not engine.get(group):
            continue
        by_dtype = engine[group]
        # A layer whose weights have several dtypes, as routers may: the cast of each weight is not known.
        dtype = next(iter(by_dtype)) if len(by_dtype) == 1 else "float32"
        total, absolute, count = sent[group].get(dtype, sent[group]["float32"])
        in_engine = [sum(sums[index] for sums in by_dtype.values()) for index in range(2)]
        exact = len(by_dtype) == 1 and dtype in sent[group]
        # bfloat16 rounds by up to 2^-9 of a weight, either way.
        tolerance = _TOLERANCE if exact else _TOLERANCE + 6 * 2.0**-9 / math.sqrt(max(count, 1.0))
        size = max(abs(total - in_engine[0]), abs(absolute - in_engine[1])) / max(absolute, 1e-30)
        is_nan = math.isnan(absolute) and math.isnan(in_engine[1])  # as the trainer's own weights are
        if not (size <= tolerance or is_nan):
            differences.append(Difference(group, absolute, in_engine[1], size))
    return differences


_applied: list[patch.Patch] = []  # in this process
# Number of calls in this process, by the loss's repr.
_calls: dict[str, int] = {}
_cost = {"seconds": 0.0, "peak": 0.0}
# Sequences of each packed row that a loss of ours got in this process.
_packed: list[int] = []


def count_calls(actor: Any = None) -> None:
    """Start counting refits, and calls of our losses and NeMo-RL's, in this process; a second call does nothing."""
    if not _applied:
        _applied.extend(_patches(actor))
        patch.apply_all(_applied)


def stop_counting(actor: Any = None) -> None:
    """Undo what :func:`count_calls` has changed in this process."""
    while _applied:
        _applied.pop().undo()
    _sent.clear()


def read_counts(actor: Any = None) -> dict[str, Any]:
    """Return the counts of this process, and where it runs.

    Returns:
        ``calls``: number by the loss's repr; ``packed``: sequences of each packed row; ``cost``: of the loss's forward
        pass, ``seconds``, and ``peak`` bytes on a GPU beyond what was allocated; ``refits``: number of times that it
        sent its weights; ``weights``: see :func:`local_sums`; ``file``: path of nemo_geomask; ``pid``, ``python``,
        ``host``.
    """
    return {
        "calls": dict(_calls),
        "packed": list(_packed),
        "cost": dict(_cost),
        "refits": read_sent_sums()["refits"],
        "weights": local_sums(actor),
        "file": importlib.import_module("nemo_geomask").__file__,
        "pid": os.getpid(),
        "python": sys.executable,
        "host": platform.node(),
    }


def seed(actor: Any, number: int) -> None:
    """Seed this process's generator, from which vLLM samples if its engine runs in the process."""
    torch.manual_seed(number)


def _patches(actor: Any) -> Iterator[patch.Patch]:
    yield patch.attribute(PolicyLoss, "__call__", _count)
    yield patch.attribute(PolicyLoss, "packed", _count)
    nemo_rl_loss = getattr(importlib.import_module(facts.LOSS_MODULE), facts.LOSS_CLASS, None)
    if nemo_rl_loss is not None:
        yield patch.attribute(nemo_rl_loss, "__call__", _count)
    yield from observe_sends(actor)


def _count(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if isinstance(self, PolicyLoss):  # under that name also a subclass, such as the one that keeps log-probs
            name = repr(self).replace(type(self).__name__, PolicyLoss.__name__, 1)
        _calls[name] = _calls.get(name, 0) + 1
        if len(args) > 2 and isinstance(args[2], PackedSegments):
            _packed.append(int(args[2].count))
        with _measured():
            return original(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def _measured() -> Iterator[None]:
    """Add the time and the memory of what runs in the context to the cost of the loss."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize()
        _cost["peak"] = max(_cost["peak"], torch.cuda.max_memory_allocated() - allocated)
    _cost["seconds"] += time.perf_counter() - begin
