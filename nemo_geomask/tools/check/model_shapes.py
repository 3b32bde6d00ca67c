"""Sizes of a recipe's model on which its memory and its time depend."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.facts import EXPERT_COUNTS
from nemo_geomask.recipe.input_limits import parse_text, read_text


class ModelShape(NamedTuple):
    """Sizes of a decoder."""

    hidden: int  # H, size of the hidden states that the output layer takes
    vocab: int  # V, rows of the output weight
    layers: int  # L, number of layers
    attention: float  # number of heads times the mean of a head's sizes for scores and for values
    active: int  # number of parameters that a token uses, without embeddings and output layer
    heads: int = 0  # number of attention heads; 0 if unknown
    kv_heads: int = 0  # number of key-value heads; that of the heads under multi-head latent attention
    mlp: int = 0  # columns of an expert's MLP, or of the MLP of a model without experts


_TABLE = tomllib.loads(Path(__file__).with_name("model_shapes.toml").read_text(encoding="utf-8"))
_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


def shape_of(name: str) -> ModelShape | None:
    """Return the sizes of a recipe's ``policy.model_name``.

    Args:
        name: a folder that contains a ``config.json``, or the name of a published model.

    Returns:
        None if the model is not known, or its configuration lacks a size.
    Raises:
        ConfigError: the ``config.json`` is not one of a model.
    """
    config = _local_config(Path(name))
    if config is not None:
        try:
            return shape_from_config(config)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}/config.json: not the configuration of a model: {error}") from None
    published = next((model for model in _TABLE["models"] if re.search(model["name"], name.lower())), None)
    return shape_from_config(published) if published else None


def positions_of(name: str) -> int | None:
    """Return how many positions a model has; None if it is not known, or scales them."""
    config = _local_config(Path(name))
    if config is not None:
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        return positions if isinstance(positions, int) and not config.get("rope_scaling") else None
    last = name.lower().rpartition("/")[2]
    return next((int(count) for count, pattern in _TABLE["positions"].items() if re.fullmatch(pattern, last)), None)


def _local_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the ``config.json`` of a model's folder; None if there is no such folder or file."""
    path = folder / "config.json"
    try:
        text = read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no folder, a name that is too long, bytes that are no text
        if os.path.isdir(folder):
            raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
        return None
    values: Mapping[str, Any] = parse_text(json.loads, text, path, format_name="JSON")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: not the configuration of a model, which is a mapping")
    return values


_VARIANT = (
    r"(-(base|instruct|chat|thinking|reasoning|it|hf|fp8|bf16|fp4|nvfp4|int4|awq|preview|exp|terminus|v?\d[\d.]*))*"
)


def has_experts(name: str, overrides: Any = None) -> bool | None:
    """Return True if a recipe's ``policy.model_name`` is a mixture of experts, False if it is none, None if unknown.

    Args:
        name: a folder that contains a ``config.json``, or the name of a published model.
        overrides: ``policy.hf_config_overrides``, which replace what the configuration says.
    """
    local = _local_config(Path(name))
    config = {**(local or {}), **(overrides if isinstance(overrides, Mapping) else {})}
    config.update(config["text_config"] if isinstance(config.get("text_config"), Mapping) else {})
    counts = [config[key] for key in EXPERT_COUNTS if isinstance(config.get(key), int)]
    if counts or re.fullmatch("|".join(_TABLE["mixture_types"]), str(config.get("model_type"))):
        return max(counts, default=2) > 1
    if local is not None:
        return False
    mixtures = "|".join(_TABLE["mixtures"])
    return True if re.fullmatch(f"({mixtures}){_VARIANT}", name.lower().rpartition("/")[2]) else None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes in a configuration with transformers' keys; None if one is missing.

    Attention has the projections of grouped-query attention or, if there is ``kv_lora_rank``, of multi-head latent
    attention. Each MLP has three matrices; only the experts to which a token is routed count.
    """
    config = config.get("text_config") or config
    if any(key not in config for key in _REQUIRED):
        return None
    hidden, vocab, layers, heads = (int(config[key]) for key in _REQUIRED)

    def size(key: str, default: int = 0) -> int:
        return int(config.get(key) or default)

    if latent := size("kv_lora_rank"):
        nope, rope, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        query, query_rank = heads * (nope + rope), size("q_lora_rank")
        projections = query_rank * (hidden + query) if query_rank else hidden * query
        projections += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        width = heads * (nope + rope + value) / 2
    else:
        head = size("head_dim", hidden // heads)
        projections = 2 * hidden * head * (heads + size("num_key_value_heads", heads))
        width = heads * head
    dense_width = moe_width = expert_width = size("intermediate_size", 4 * hidden)
    moe_layers = 0
    if experts_per_token := size("num_experts_per_tok"):
        expert_width = size("moe_intermediate_size", dense_width)
        shared_width = size("shared_expert_intermediate_size", size("n_shared_experts") * expert_width)
        moe_width = experts_per_token * expert_width + shared_width
        moe_layers = layers - size("first_k_dense_replace")
    mlps = 3 * hidden * (dense_width * (layers - moe_layers) + moe_width * moe_layers)
    kv_heads = heads if latent else size("num_key_value_heads", heads)
    return ModelShape(hidden, vocab, layers, width, layers * projections + mlps, heads, kv_heads, expert_width)
