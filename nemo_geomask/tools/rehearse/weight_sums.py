"""Sums of the weights in the processes of a run: of what a training worker sends, and of what an engine holds."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.errors import EngineError
from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.rehearse.weight_groups import (
    DECAY,
    ENGINE_DTYPES,
    KEPT,
    LOG_DECAY,
    Precision,
    Sums,
    add_sums,
    dequantised_sums,
    group_of,
    increase,
    layer_of,
    merge_precisions,
    rounded_bits,
    sums_of,
)

_NEVER_SENT = ".prob_scale"
"""Scale of an fp8 KV cache that NeMo-RL sends no value of, beside those of q, k and v."""
_ENGINE_TIMEOUT = 60.0  # seconds
_SCALES = ("_scale_inv", "_scale")
"""Suffixes of the name of a scale, after the name of the quantised weight that is multiplied by it (vLLM's fp8.py)."""

# In a training worker: the sums of the last complete refit, which of its groups have rounded values, and the number of
# refits.
_sent: Sums = {}
_rounded: dict[str, str] = {}
_refits = 0


def _sum_sent(sums: Sums, name: str, tensor: Any) -> None:
    """Add a weight that is sent to the sums of its group, in each dtype that the engine may have."""
    _add(sums, name, tensor, ENGINE_DTYPES)
    if bits := rounded_bits(tensor):
        _rounded[group_of(name)] = bits
    if name.endswith(f".{LOG_DECAY}"):
        # mamba_mixer2.py:225: vLLM's loader applies -exp to the float32 value. Models that keep A_log have no A.
        _add(sums, f"{name.removesuffix(LOG_DECAY)}{DECAY}", -tensor.detach().float().exp(), ENGINE_DTYPES)


def _add(sums: Sums, name: str, tensor: Any, dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        add_sums(sums, group_of(name), dtype, sums_of(tensor, dtype))


def observe_sends(actor: Any = None) -> Iterator[patch.Patch]:
    """Yield patches by which this training worker sums the weights that NeMo-RL sends in each refit."""
    namespaces = patch.nemo_rl_namespaces(actor)
    utils = importlib.import_module("nemo_rl.models.policy.utils")
    yield patch.function(utils, "stream_weights_via_ipc_zmq_impl", sum_streamed, namespaces=namespaces)
    packed = importlib.import_module("nemo_rl.utils.packed_tensor")
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
        _rounded.clear()
        bound.arguments[argument] = observed(bound.arguments[argument], sums)
        result = original(*bound.args, **bound.kwargs)
        _sent.clear()
        _sent.update(sums)
        _refits += 1
        return result

    return send


def read_sent_sums(actor: Any = None) -> dict[str, Any]:
    """Return the number of refits that this training worker has sent, ``sums`` of the last one, and ``precision``."""
    precision = merge_precisions([{"rounded": _rounded}, *map(read_precision, _model_parts(actor) or ())])
    return {"refits": _refits, "sums": dict(_sent), "precision": precision}


def sent_refits() -> int:
    """Return the number of refits that this training worker has sent."""
    return _refits


def forget_sent() -> None:
    """Forget the sums of the last refit."""
    _sent.clear()
    _rounded.clear()


def _model_parts(actor: Any) -> list[torch.nn.Module] | None:
    """Return the modules that a training worker trains; None if its model can't be read."""
    model: Any = getattr(actor, "model", None)
    parts: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    return parts if all(isinstance(part, torch.nn.Module) for part in parts) else None


def read_precision(model: Any) -> Precision:
    """Return what a model has quantised, in its weights or its matrix products, and what its routers compute in."""
    precision = merge_precisions([])
    # Megatron numbers the layers of a pipeline's stage from 0; its layers know their number, from 1.
    layers = {
        name: f"layers.{module.layer_number - 1}"
        for name, module in model.named_modules()
        if hasattr(module, "layer_number") and name.rpartition(".")[0].endswith("layers")
    }
    for name, module in model.named_modules():
        own = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        group = group_of(f"{name if own is None else name.replace(own, layers[own], 1)}.weight")
        is_modelopt = getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
        if is_modelopt or getattr(module, "fp8", False) is True:  # of Transformer Engine, once it has run
            precision["quantised"][layer_of(group)] = "ModelOpt" if is_modelopt else "fp8"
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in ("gate", "router") and isinstance(weight, torch.Tensor) and weight.dim() == 2:
            config = getattr(module, "config", None)  # Megatron's; vLLM's GateLinear has an out_dtype
            dtype = getattr(module, "out_dtype", None) or getattr(config, "moe_router_dtype", None)
            kept = str(dtype or weight.dtype).removeprefix("torch.").replace("fp", "float")
            precision["routers"][group] = kept if dtype else f"{KEPT} {kept}"
        for parameter in module.parameters(recurse=False):
            dtype = str(parameter.dtype).removeprefix("torch.")
            if parameter.dim() > 1 and dtype not in (*ENGINE_DTYPES, "float64"):
                precision["quantised"][group] = dtype
    return precision


def local_sums(actor: Any) -> list[float] | None:
    """Return the sum and the sum of absolute values of this worker's own shard of the trained weights.

    Returns:
        None if the worker's model can't be read.
    """
    modules = _model_parts(actor)
    if modules is None:
        return None
    total = [0.0, 0.0]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                increase(total, sums_of(shard, "float64")[:2])
    return total


def engine_sums(actor: Any) -> Any:
    """Return sums and precision of this generation worker's engine, one pair for each of the engine's processes.

    Returns:
        None if the worker has no engine of its own.
    """
    engine = getattr(actor, "llm", None)
    if engine is None:
        return None
    answer = engine.collective_rpc(_describe)
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


def _describe(worker: Any) -> tuple[Sums, Precision]:
    model = worker.model_runner.model
    precision = read_precision(model)
    bits = {group_of(name): rounded_bits(parameter) for name, parameter in model.named_parameters()}
    return sum_parameters(model), {**precision, "rounded": {group: each for group, each in bits.items() if each}}


def sum_parameters(model: Any) -> Sums:
    """Sum the parameters of the model in one process of a vLLM engine, by the parameter's name."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    scaled = {name + end: name for name in parameters for end in _SCALES if name + end in parameters}
    sums: Sums = {}
    for name, parameter in parameters.items():
        if name in scaled or name.endswith(_NEVER_SENT):
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in ENGINE_DTYPES:
            scale = next((parameters[each] for each, weight in scaled.items() if weight == name), None)
            sums[name] = {dtype: dequantised_sums(parameter, scale)}
            continue
        sums[name] = {dtype: sums_of(parameter, dtype)}
        # vLLM's QKVParallelLinear: with more processes than heads of K and V, each head is in several of them.
        module = modules.get(name.rpartition(".")[0])
        copies = getattr(module, "num_kv_head_replicas", 1)
        if copies > 1 and parameter.dim():
            heads = sums_of(parameter[module.num_heads * module.head_size :], dtype)  # type: ignore[union-attr]
            increase(sums[name][dtype], [value * (1 / copies - 1) for value in heads])
    return sums
