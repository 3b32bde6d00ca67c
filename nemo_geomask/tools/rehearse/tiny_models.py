"""Tiny random models of a recipe's architecture, with a tokenizer and prompts."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.tools.check import Layout

__all__ = ["MODEL_TYPES", "VOCABULARY", "TinyModel", "tiny_model", "write_model", "write_prompts"]

VOCABULARY = 128

MODEL_TYPES: tuple[tuple[str, str], ...] = (
    # The first pattern that matches decides.
    (r"deepseek-r1-distill-llama", "llama"),
    (r"deepseek-r1-distill-qwen|deepscaler|qwen-?2", "qwen2"),
    (r"deepseek-(v3|r1)|moonlight|kimi-k", "deepseek_v3"),
    (r"deepseek-v2", "deepseek_v2"),
    (r"qwen-?3.*a\d+(\.\d+)?b", "qwen3_moe"),
    (r"qwen-?3(?!\.|-next|-vl|-omni)", "qwen3"),
    (r"mixtral", "mixtral"),
    (r"mistral", "mistral"),
    (r"gpt-oss", "gpt_oss"),
    (r"gemma-?3", "gemma3_text"),
    (r"gemma-?2", "gemma2"),
    (r"llama", "llama"),
)
"""Patterns of model names, and transformers' model type for each."""

_SIZES: Mapping[str, Any] = {
    # Only the keys that a model's configuration has are used.
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,  # attention kernels for CPUs take multiples of 32
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that tokens have probabilities of their own
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "max_window_layers": 2,
    # Experts.
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    # Latent attention.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 0,
}
_SETTINGS_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    # Its published models have it, unlike transformers' defaults; v0.6.0's Megatron-Bridge supports nothing else
    # (qwen3_moe_bridge.py:66). Such experts put out more: with narrower weights, bfloat16 tells the engines apart by
    # about as much as it does with other types.
    "qwen3_moe": {"norm_topk_prob": True, "initializer_range": 0.2},
}
_DROPPED_KEYS = (
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "auto_map",
)


@dataclass(frozen=True)
class TinyModel:
    """Description of a model to create.

    Attributes:
        model_type: transformers' name of the architecture.
        source: where the architecture was read from.
        settings: of its configuration: the sizes, on top of the recipe's own config.json if there is one.
    """

    model_type: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def tiny_model(name: str, layout: Layout) -> TinyModel:
    """Return the tiny model for ``policy.model_name``, from a local folder's config.json or from the name.

    Args:
        name: folder or name.
        layout: parallel sizes that heads, layers and experts must be divisible by.

    Raises:
        ConfigError: neither a folder with a ``config.json`` nor a name of a known architecture.
    """
    config = Path(name) / "config.json"
    if config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
            raise ConfigError(Problem(("policy.model_name",), f"{config} has no model_type; it is no model's folder"))
        usable = {key: value for key, value in settings.items() if key not in _DROPPED_KEYS}
        return TinyModel(settings["model_type"], str(config), {**usable, **_sizes(layout, settings)})
    lowered = name.lower()
    model_type = next((model_type for pattern, model_type in MODEL_TYPES if re.search(pattern, lowered)), None)
    if model_type is None:
        model_types = ", ".join(sorted({model_type for _, model_type in MODEL_TYPES}))
        message = (
            f"{name} is no folder with a config.json, and its name is of no architecture known here "
            f"({model_types}); give a folder with the model's config.json (nothing else is read), as an override: "
            "policy.model_name=FOLDER"
        )
        raise ConfigError(Problem(("policy.model_name",), message))
    return TinyModel(model_type, f"the name {name}", {**_sizes(layout), **_SETTINGS_OF_TYPE.get(model_type, {})})


def _sizes(layout: Layout, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return sizes by key, only those in ``config`` if there is one."""
    heads, groups = max(4, layout.tp), max(2, layout.tp)
    per_layout = {
        "num_hidden_layers": 2 * layout.pp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }
    if config is None:
        return {**_SIZES, **per_layout}
    sizes = {key: value for key, value in {**_SIZES, **per_layout}.items() if key in config}
    if "num_key_value_heads" in config and config["num_key_value_heads"] == config.get("num_attention_heads"):
        sizes["num_key_value_heads"] = heads
    if config.get("q_lora_rank", 0) is None:
        sizes["q_lora_rank"] = None
    return sizes


def write_model(model: TinyModel, folder: Path, *, seed: int = 0) -> int:
    """Write ``model`` and ``tokenizer`` into a folder, and return the number of parameters.

    They have separate folders: beside some models, transformers takes any tokenizer for the original model's.

    Raises:
        ConfigError: the transformers installed here doesn't have the architecture.
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    architectures = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if model.model_type not in architectures:
        message = f"transformers {transformers.__version__} has no model type {model.model_type} ({model.source})"
        raise ConfigError(Problem(("policy.model_name",), message))
    config_class = architectures[model.model_type]
    # Without a config.json, the architecture's defaults say which sizes exist.
    existing_keys = config_class().to_dict() if not model.source.endswith("config.json") else model.settings
    settings = {key: value for key, value in model.settings.items() if key in existing_keys}
    settings.pop("model_type", None)
    if "head_dim" not in existing_keys and "head_dim" not in settings and "qk_nope_head_dim" not in existing_keys:
        settings["hidden_size"] = 32 * settings["num_attention_heads"]
    config = config_class(**settings, tie_word_embeddings=bool(model.settings.get("tie_word_embeddings", False)))
    torch.manual_seed(seed)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    # transformers makes the padding token's row zero, where a norm's slope is 1/sqrt(eps), and takes no gradient there;
    # Megatron and Automodel do, and the token is sampled like any other: gradient norms of 10,000 and more.
    torch.nn.init.normal_(policy.get_input_embeddings().weight.data, std=_SIZES["initializer_range"])
    policy.save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "tokenizer")
    return sum(parameter.numel() for parameter in policy.parameters())


def _tokenizer() -> Any:
    """Return a tokenizer with one token for each word: w2, w3, …"""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


def write_prompts(path: Path, rows: int = 256) -> None:
    """Write distinct prompts of three words each, as NeMo-RL's ``ResponseDataset`` reads them."""
    prompts = (f"w{2 + row % 30} w{2 + row % 29} w{2 + row % 7}" for row in range(rows))
    lines = (json.dumps({"input": prompt, "output": "w2"}) for prompt in prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
