"""Settings that an engine and a trainer really run with, read from their objects and not from the recipe.

A recipe's key that nobody reads leaves no trace here, so that a switch with such a key is recognised as not effective.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEPTH = 5
_PRIMITIVES = (bool, int, float, str, type(None))


def flatten(value: Any, prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """Yield dotted names and texts of the plain values in nested objects, mappings and lists.

    Args:
        depth: levels of attributes that are entered; what lies deeper, and callables, are left out.
    """
    if isinstance(value, enum.Enum):
        yield prefix, value.name
    elif isinstance(value, _PRIMITIVES) or (type(value).__module__ == "torch" and not hasattr(value, "numel")):
        yield prefix, str(value)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        if all(isinstance(item, _PRIMITIVES) for item in value):
            yield prefix, str(sorted(map(str, value)) if isinstance(value, set | frozenset) else list(value))
    elif depth and (isinstance(value, Mapping) or dataclasses.is_dataclass(value) or hasattr(value, "__dict__")):
        attributes = value if isinstance(value, Mapping) else vars(value)
        for name, inner in attributes.items():
            if not str(name).startswith("_") and not callable(inner):
                yield from flatten(inner, f"{prefix}.{name}", depth - 1)


def engine_settings(actor: Any) -> dict[str, str]:
    """Return what an engine of NeMo-RL's generation worker runs with.

    Returns:
        By dotted name: vLLM's resolved configuration, and of the first process of the engine the dtypes of weights and
        KV cache, the classes of its attention layers, and the sampler's mode.
    """
    model_settings: dict[str, str] = actor.llm.collective_rpc(_model_settings)[0]
    return dict(flatten(actor.llm.llm_engine.vllm_config, "engine")) | model_settings


def _model_settings(worker: Any) -> dict[str, str]:
    runner = worker.model_runner
    model = runner.model
    settings = {
        "engine.weights": _counts(str(parameter.dtype) for parameter in model.parameters()),
        "engine.modules": _counts(type(module).__name__ for module in model.modules()),
        "engine.sampler.logprobs_mode": str(getattr(runner.sampler, "logprobs_mode", None)),
        "engine.kv_cache": _counts(str(cache.dtype) for cache in runner.kv_caches if hasattr(cache, "dtype")),
    }
    sums = (float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
    settings["engine.checksum"] = f"{sum(sums):.9g}"
    backends = (getattr(module, "attn_backend", None) for module in model.modules())
    settings["engine.attention"] = _counts(backend.__name__ for backend in backends if isinstance(backend, type))
    return settings


# Of this process: shapes and dtypes of the forward passes since `watch_forward`.
_forward: Counter[str] = Counter()
_watched: list[Any] = []


def watch_forward(actor: Any) -> None:
    """Start counting the shapes of the trainer's forward passes, and forget earlier ones."""
    _forward.clear()
    if not _watched:
        for model in trainer_models(actor):
            _watched.append(model.register_forward_hook(_count_forward, with_kwargs=True))


def _count_forward(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    tokens = kwargs.get("input_ids", args[0] if args else None)
    logits = getattr(output, "logits", output)
    shape = "×".join(map(str, tokens.shape)) if isinstance(tokens, torch.Tensor) else "?"
    dtype = str(logits.dtype) if isinstance(logits, torch.Tensor) else "?"
    is_training = any(part.training for part in module.modules())
    # Megatron returns logits in float32 whatever its weights are, and FSDP keeps weights in float32.
    weights = next((str(parameter.dtype) for parameter in module.parameters()), "?")
    text = f"tokens {shape} logits {dtype} weights {weights} training {is_training}"
    # Settings that NeMo-RL keeps out of the model's configuration, such as a fused head, are options of the call.
    options = (f"{name} {value}" for name, value in sorted(kwargs.items()) if isinstance(value, bool))
    _forward[" ".join((text, *options))] += 1


def trainer_settings(actor: Any) -> dict[str, str]:
    """Return what NeMo-RL's training worker runs with.

    Returns:
        By dotted name: the model's own configuration, dtypes and shards of its weights, active dropout, and the forward
        passes since :func:`watch_forward`, with the options of their calls.
    """
    settings: dict[str, str] = {
        "trainer.forward": _counts(_forward.elements()),
        "trainer.sampling": str(getattr(actor, "sampling_params", None)),
    }
    if hasattr(actor, "cp_size"):  # of NeMo-RL's own trainer, whose model does not know it
        settings["trainer.context_parallel_size"] = str(actor.cp_size)
    for model in trainer_models(actor):
        settings |= dict(flatten(getattr(model, "config", None), "trainer.model"))
        parameters = list(model.parameters())
        settings["trainer.weights"] = _counts(str(parameter.dtype) for parameter in parameters)
        settings["trainer.shards"] = _counts(_shard_of(parameter) for parameter in parameters)
        settings["trainer.modules"] = _counts(type(module).__name__ for module in model.modules())
        dropouts = (module for module in model.modules() if isinstance(module, torch.nn.Dropout))
        settings["trainer.dropout"] = _counts(f"{module.p} training {module.training}" for module in dropouts)
    distributed = torch.distributed
    settings["trainer.processes"] = str(distributed.get_world_size() if distributed.is_initialized() else 1)
    return settings


def trainer_models(actor: Any) -> list[Any]:
    """Return the modules that NeMo-RL's training worker trains: one, or one for each part of a pipeline."""
    model = getattr(actor, "model", None)
    models = model if isinstance(model, list | tuple) else [model]
    return [module for module in models if isinstance(module, torch.nn.Module)]


def _shard_of(parameter: Any) -> str:
    return str(getattr(parameter, "placements", "whole")) if hasattr(parameter, "to_local") else "whole"


def _counts(names: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))
