"""Hidden states of both sides by layer, and each operator of the trainer on the engine's own inputs.

An engine's prefill gives the input and output of every layer, attention, MLP and head. The trainer scores the same
sequence twice by NeMo-RL's own call: as it is, which shows how the difference grows from layer to layer; and with the
engine's inputs in place of its own at every operator (replay), which shows where it arises.

Modules are found by the names that vLLM, Hugging Face, Automodel and Megatron use. What is not found is left out. A
rank that has other tokens than the sequence's, or only some of them, compares nothing and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nemo_geomask.errors import EngineError

_LAYERS = ("model.layers", "decoder.layers", "model.language_model.layers", "language_model.model.layers")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention norm": ("input_layernorm",),
    "attention": ("self_attn", "self_attention", "linear_attn", "mixer"),
    "MLP norm": ("post_attention_layernorm", "pre_mlp_layernorm"),
    "MLP": ("mlp", "block_sparse_moe", "feed_forward"),
}
_IDENTITIES = ("Identity", "IdentityOp")
"""Classes of norms that are fused with the operator behind them, which then gets the norm's own input."""
_NORMS = ("model.norm", "decoder.final_layernorm", "model.language_model.norm", "language_model.model.norm")
_HEADS = ("lm_head", "output_layer", "language_model.lm_head")
_ROUTERS = ("gate", "router")
_HIDDEN_STATES = ("hidden_states", "x")
"""Names of the argument with the hidden states, where it is passed by name."""

States = dict[str, Any]
"""By name of an operator, such as ``3 attention``: its input and output, each [tokens, width] float32."""


def _child(module: Any, names: Sequence[str]) -> Any:
    """Return the first module of these dotted names that exists, or None."""
    for name in names:
        child = module
        for part in name.split("."):
            child = getattr(child, part, None)
            if child is None:
                break
        if child is not None:
            return child
    return None


def _operators(model: Any) -> dict[str, Any]:
    """Return the modules whose input and output both sides have, by name, in the order of the forward pass."""
    layers = _child(model, _LAYERS)
    operators: dict[str, Any] = {}
    # Automodel's are a dictionary.
    for place, layer in enumerate(() if layers is None else layers.values() if hasattr(layers, "values") else layers):
        # Megatron's, from 1, counts the layers of earlier pipeline stages too.
        number = getattr(layer, "layer_number", place + 1) - 1
        operators[f"{number} layer"] = layer
        for part, names in _PARTS.items():
            if (module := _child(layer, names)) is not None:
                operators[f"{number} {part}"] = module
        mlp = _child(layer, _PARTS["MLP"])
        if mlp is not None and (router := _child(mlp, _ROUTERS)) is not None:
            operators[f"{number} router"] = router
    if (norm := _child(model, _NORMS)) is not None:
        operators["final norm"] = norm
    return operators


def _tensors(values: Any) -> list[Any]:
    items = values if isinstance(values, list | tuple) else [values]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _hidden_input(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the hidden states of a call and, in vLLM, the residual that belongs to them."""
    floating = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
    name = _hidden_name(kwargs)
    hidden = kwargs[name] if name else floating[0] if floating else None
    residual = kwargs.get("residual", floating[1] if len(floating) > 1 else None)
    return hidden, residual


def _hidden_name(kwargs: Mapping[str, Any]) -> str:
    """Return the name by which the hidden states are passed; empty if they are passed by position."""
    return next((name for name in _HIDDEN_STATES if name in kwargs), "")


def _sum(hidden: Any, residual: Any) -> Any:
    total = hidden.detach().float()
    return total if residual is None else total + residual.detach().float()


# The engine's side

# Of this process: what the hooks have kept, the token ids of the trainer's pass, and the hooks.
_captured: dict[str, list[Any]] = {}
_ids: list[Any] = []
_hooks: list[Any] = []


def capture_engine(actor: Any, sequence: Sequence[int]) -> States:
    """Return the inputs and outputs of the engine's operators as it reads a sequence as a prompt.

    Returns:
        By operator: ``[input, output]``, [tokens, width] float32 on the CPU; empty if no hook was called.
    """
    actor.llm.collective_rpc(_hook_engine)
    try:
        actor.llm.reset_prefix_cache()
        # A request for prompt log-probs reads no prefix cache, so that all tokens pass the layers.
        parameters = actor.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
        actor.llm.generate([{"prompt_token_ids": list(sequence)}], parameters, use_tqdm=False)
    finally:
        states = actor.llm.collective_rpc(_unhook_engine, args=(len(sequence),))[0]
    return dict(states)


def _hook_engine(worker: Any) -> None:
    _captured.clear()
    for name, module in _operators(worker.model_runner.model).items():
        hook = _keep_engine(name, sums_output=name.endswith("layer"))
        _hooks.append(module.register_forward_hook(hook, with_kwargs=True))


def _keep_engine(name: str, *, sums_output: bool) -> Callable[..., None]:
    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        hidden, residual = _hidden_input(args, kwargs)
        outputs = _tensors(output)
        if hidden is None or not outputs or name in _captured:
            return  # a later call is the decode of the token that every request asks for
        # vLLM adds the residual in the next norm; the sum is what other libraries call the layer's output.
        result = _sum(outputs[0], outputs[1] if sums_output and len(outputs) > 1 else None)
        _captured[name] = [_sum(hidden, residual).cpu().clone(), result.cpu().clone()]

    return keep


def _unhook_engine(worker: Any, length: int) -> States:
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    states = {name: [value[:length] for value in pair] for name, pair in _captured.items()}
    _captured.clear()
    return states


# The trainer's side


def watch_trainer(actor: Any, states: States, replay: bool) -> None:
    """Hook the trainer's operators for one pass.

    Args:
        replay: give each operator the engine's input in place of its own.
    """
    _captured.clear()
    _ids.clear()
    model = actor.model[0] if isinstance(actor.model, list | tuple) else actor.model
    while _child(model, _LAYERS) is None and hasattr(model, "module"):
        model = model.module  # Megatron's wrappers
    _hooks.append(model.register_forward_pre_hook(_keep_ids, with_kwargs=True))
    operators = _operators(model)
    for name, module in operators.items():
        if name in states and type(module).__name__ not in _IDENTITIES:
            if replay:
                norm = f"{name} norm"
                is_fused = norm in operators and type(operators[norm]).__name__ in _IDENTITIES
                before = _replace_input(states[norm if is_fused else name][0])
                _hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            _hooks.append(module.register_forward_hook(_keep_trainer(name, len(states[name][0])), with_kwargs=True))
    head = _child(model, _HEADS)
    if replay and head is not None and "final norm" in states:
        before = _replace_input(states["final norm"][1])
        _hooks.append(head.register_forward_pre_hook(before, with_kwargs=True))


def _keep_ids(module: Any, args: Any, kwargs: Any) -> None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None and not _ids:
        _ids.append(ids.detach().reshape(-1).cpu())


def _has_all_tokens(hidden: Any) -> bool:
    """Return True if hidden states have a row for each token of the pass; under sequence parallelism they have not."""
    return bool(_ids) and hidden.numel() == len(_ids[0]) * hidden.shape[-1]


def _rows_first(hidden: Any, length: int) -> bool:
    """Return True for [rows, tokens, width], False for Megatron's [tokens, rows, width]."""
    return bool(hidden.dim() != 3 or hidden.shape[1] >= length)


def _replace_input(state: Any) -> Callable[..., Any]:
    def replace(module: Any, args: Any, kwargs: Any) -> Any:
        hidden, _ = _hidden_input(args, kwargs)
        if hidden is None or not _has_all_tokens(hidden):
            return None
        replaced = hidden.detach().clone()
        value = state.to(device=replaced.device, dtype=replaced.dtype)
        if replaced.dim() == 2:
            replaced[: len(value)] = value
        elif _rows_first(replaced, len(value)):
            replaced[0, : len(value)] = value
        else:
            replaced[: len(value), 0] = value
        if name := _hidden_name(kwargs):
            return args, {**kwargs, name: replaced}
        return tuple(replaced if each is hidden else each for each in args), kwargs

    return replace


def _keep_trainer(name: str, length: int) -> Callable[..., None]:
    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        outputs = _tensors(output)
        if not outputs or name in _captured:
            return
        if name.endswith("router"):
            # Indices of the chosen experts (Hugging Face), or a map of them (Megatron).
            chosen = next((each for each in outputs if not each.is_floating_point()), None)
            if chosen is not None and _has_all_tokens(chosen):
                _captured[name] = [chosen.detach().reshape(-1, chosen.shape[-1])[:length].cpu().clone()]
            return
        result = outputs[0].detach()
        result = result.full_tensor() if hasattr(result, "full_tensor") else result
        if not _has_all_tokens(result):
            return
        if result.dim() == 3:
            result = result[0] if _rows_first(result, length) else result[:, 0]
        if len(result) >= length:
            _captured[name] = [result[:length].to(torch.float32).cpu().clone()]

    return keep


def stop_trainer(actor: Any) -> None:
    """Remove the hooks of :func:`watch_trainer`, and forget what they have kept."""
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    _captured.clear()
    _ids.clear()


def compare_trainer(actor: Any, states: States, experts: int, sequence: Sequence[int]) -> dict[str, float]:
    """Return how the outputs of the trainer's operators differ from the engine's.

    Args:
        experts: number of experts that the engine chooses for a token; 0 for a dense model.

    Returns:
        By operator: the mean over tokens of ‖trainer − engine‖ / ‖engine‖; of a router the share of tokens with other
        experts.

    Raises:
        EngineError: this rank has other tokens, or some of them alone.
    """
    if not _ids or _ids[0][: len(sequence)].tolist() != list(sequence):
        raise EngineError(
            "a rank of the trainer has other tokens than the sequence, as context parallelism leaves it parts of each"
        )
    if not _captured:
        raise EngineError(
            "no operator of a rank of the trainer has all tokens of the sequence, as under sequence parallelism"
        )
    differences: dict[str, float] = {}
    for name, (output, *_) in _captured.items():
        expected = states[name][1]
        if name.endswith("router"):
            chosen = _expert_map(output, expected.shape[-1])
            engine_chosen = (
                _expert_map(expected.topk(experts, dim=-1).indices, expected.shape[-1]) if experts else chosen
            )
            differences[name] = float((chosen != engine_chosen).any(dim=-1).double().mean())
            continue
        if output.shape != expected.shape:
            continue  # a shard, or another layout
        distance = torch.linalg.vector_norm((output - expected).double(), dim=-1)
        size = torch.linalg.vector_norm(expected.double(), dim=-1)
        differences[name] = float((distance / size.clamp_min(1e-30)).mean())
    return differences


def _expert_map(chosen: Any, count: int) -> Any:
    if chosen.dtype == torch.bool:
        return chosen
    experts = torch.zeros(len(chosen), count, dtype=torch.bool)
    return experts.scatter_(1, chosen.long(), True)
