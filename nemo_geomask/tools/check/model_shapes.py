"""Sizes of a recipe's model on which its memory and its time depend."""

from __future__ import annotations

import json
import os
import re
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


_KEYS = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)
_Q3, _Q2, _LLAMA = 151_936, 152_064, 128_256
_QWEN2 = r"qwen-?(2(\.5)?-)?((math|coder)-)?"  # matches DeepSeek's distilled models, too
_QWEN3 = {"num_experts_per_tok": 8}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK = {
    **_LATENT,
    "q_lora_rank": 1536,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
_MOONLIGHT = {**_LATENT, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
_PUBLISHED: tuple[tuple[str, tuple[int | None, ...], Mapping[str, int]], ...] = (
    # Pattern of the model's name, values of _KEYS, and other values of its config.json. The first match is used.
    (rf"deepscaler|{_QWEN2}1\.5b", (1536, _Q3, 28, 12, 2, 128, 8960), {}),
    (rf"{_QWEN2}0\.5b", (896, _Q3, 24, 14, 2, 64, 4864), {}),
    (rf"{_QWEN2}3b", (2048, _Q3, 36, 16, 2, 128, 11_008), {}),
    (rf"{_QWEN2}7b", (3584, _Q2, 28, 28, 4, 128, 18_944), {}),
    (rf"{_QWEN2}14b", (5120, _Q2, 48, 40, 8, 128, 13_824), {}),
    (rf"{_QWEN2}32b", (5120, _Q2, 64, 40, 8, 128, 27_648), {}),
    (rf"{_QWEN2}72b", (8192, _Q2, 80, 64, 8, 128, 29_568), {}),
    (r"qwen-?3-30b-a3b", (2048, _Q3, 48, 32, 4, 128, 6144), {**_QWEN3, "moe_intermediate_size": 768}),
    (r"qwen-?3-235b-a22b", (4096, _Q3, 94, 64, 4, 128, 12_288), {**_QWEN3, "moe_intermediate_size": 1536}),
    (r"qwen-?3-0\.6b", (1024, _Q3, 28, 16, 8, 128, 3072), {}),
    (r"qwen-?3-1\.7b", (2048, _Q3, 28, 16, 8, 128, 6144), {}),
    (r"qwen-?3-4b", (2560, _Q3, 36, 32, 8, 128, 9728), {}),
    (r"qwen-?3-8b", (4096, _Q3, 36, 32, 8, 128, 12_288), {}),
    (r"qwen-?3-14b", (5120, _Q3, 40, 40, 8, 128, 17_408), {}),
    (r"qwen-?3-32b", (5120, _Q3, 64, 64, 8, 128, 25_600), {}),
    (r"llama-?3\.2-1b", (2048, _LLAMA, 16, 32, 8, 64, 8192), {}),
    (r"llama-?3\.2-3b", (3072, _LLAMA, 28, 24, 8, 128, 8192), {}),
    (r"llama-?3.*-8b|distill-llama-8b", (4096, _LLAMA, 32, 32, 8, 128, 14_336), {}),
    (r"llama-?3.*-70b|distill-llama-70b", (8192, _LLAMA, 80, 64, 8, 128, 28_672), {}),
    (r"deepseek-(v3|r1)", (7168, 129_280, 61, 128, 128, None, 18_432), {**_DEEPSEEK, "first_k_dense_replace": 3}),
    (r"kimi-k2", (7168, 163_840, 61, 64, 64, None, 18_432), {**_DEEPSEEK, "first_k_dense_replace": 1}),
    (r"moonlight-16b", (2048, 163_840, 27, 16, 16, None, 11_264), {**_MOONLIGHT, "first_k_dense_replace": 1}),
    (r"gpt-oss-20b", (2880, 201_088, 24, 64, 8, 64, 2880), {"num_experts_per_tok": 4}),
    (r"gpt-oss-120b", (2880, 201_088, 36, 64, 8, 64, 2880), {"num_experts_per_tok": 4}),
    (r"mixtral-8x7b", (4096, 32_000, 32, 32, 8, 128, 14_336), {"num_experts_per_tok": 2}),
)


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
    for pattern, sizes, other_values in _PUBLISHED:
        if re.search(pattern, name.lower()):
            return shape_from_config({**dict(zip(_KEYS, sizes, strict=True)), **other_values})
    return None


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


_MIXTURE_TYPES = (
    r"bailing_moe(_v2)?|dbrx|deepseek_v(2|32?)|glm4_moe(_lite)?|glm_moe_dsa|gpt_oss|granitemoe(shared)?|kimi_k2|"
    r"minimax(_m2)?|mixtral|olmoe|phimoe|qwen2_moe|qwen3(_5|_omni|_vl)?_moe|qwen3_next"
)
"""Values of ``model_type`` whose models have experts even if their configuration does not count them."""
_MIXTURES = (
    r"mixtral-8x(7|22)b|deepseek-(v2(\.5)?|v2-lite|coder-v2(-lite)?|v3(\.[12])?|r1|r1-zero)|moonlight-16b-a3b|kimi-k2(\.\d)?|"
    r"gpt-oss-(20|120)b|minimax-(m1|m2)(\.\d)?(-[48]0k)?|glm-(4\.5(-air)?|4\.[67]|4\.7-flash|5(\.\d)?)|qwen1\.5-moe-a2\.7b|"
    r"qwen2-57b-a14b|qwen3-(vl-|coder-|omni-)?30b-a3b|qwen3-(vl-)?235b-a22b|qwen3-coder-480b-a35b|qwen3-next-80b-a3b|"
    r"qwen3\.5-(35b-a3b|122b-a10b|397b-a17b)|olmoe-1b-7b|llama-4-(scout-17b-16e|maverick-17b-128e)|"
    r"granite-3\.[01]-(1b-a400m|3b-a800m)|granite-4\.0-h?-?(tiny|small)|(ling|ring)-(mini|flash)-2\.0|ling-(lite|plus|1t)|ring-1t|"
    r"mimo-v2-flash|(ai21-)?jamba-(v0\.1|(1\.5-)?(mini|large)(-1\.[5-7])?)|(nvidia-)?nemotron-3(\.5)?-"
    r"((lightning|nano|nano-omni)-30b-a3b|super-120b-a12b)|phi-3\.5-moe|dbrx|ernie-4\.5-21b-a3b|gemma-4-26b-a4b|lfm2-8b-a1b"
)
"""Published mixtures of experts, by the whole name without its owner and :data:`_VARIANT`."""
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
    if counts or re.fullmatch(_MIXTURE_TYPES, str(config.get("model_type"))):
        return max(counts, default=2) > 1
    if local is not None:
        return False
    return True if re.fullmatch(f"({_MIXTURES}){_VARIANT}", name.lower().rpartition("/")[2]) else None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes in a configuration with transformers' keys; None if one is missing.

    Attention has the projections of grouped-query attention or, if there is ``kv_lora_rank``, of multi-head latent
    attention. Each MLP has three matrices; only the experts to which a token is routed count.
    """
    config = config.get("text_config") or config
    if any(key not in config for key in _KEYS[:4]):
        return None
    hidden, vocab, layers, heads = (int(config[key]) for key in _KEYS[:4])

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
    dense_width = moe_width = size("intermediate_size", 4 * hidden)
    moe_layers = 0
    if experts_per_token := size("num_experts_per_tok"):
        expert_width = size("moe_intermediate_size", dense_width)
        shared_width = size("shared_expert_intermediate_size", size("n_shared_experts") * expert_width)
        moe_width = experts_per_token * expert_width + shared_width
        moe_layers = layers - size("first_k_dense_replace")
    mlps = 3 * hidden * (dense_width * (layers - moe_layers) + moe_width * moe_layers)
    kv_heads = heads if latent else size("num_key_value_heads", heads)
    return ModelShape(hidden, vocab, layers, width, layers * projections + mlps, heads, kv_heads)
