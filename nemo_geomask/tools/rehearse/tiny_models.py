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

VOCABULARY = 128

MODEL_TYPES: tuple[tuple[str, str], ...] = (
    # The first pattern that matches decides.
    (r"deepseek-r1-distill-llama", "llama"),
    (r"deepseek-r1-distill-qwen|deepscaler|qwen-?2(?!.*(vl|omni|audio))", "qwen2"),
    # NeMo-RL's recipes for DeepSeek-V3 name its guide in place of a model.
    (r"deepseek-(v3(?!\.)|r1)|moonlight|kimi-k|guides/deepseek\.md", "deepseek_v3"),
    (r"deepseek-v2", "deepseek_v2"),
    (r"qwen-?3\.5.*a\d+b", "qwen3_5_moe_text"),
    (r"qwen-?3\.5", "qwen3_5_text"),
    (r"qwen-?3-next", "qwen3_next"),
    (r"qwen-?3(?!\.|-next|.*(vl|omni)).*a\d+(\.\d+)?b", "qwen3_moe"),
    (r"qwen-?3(?!\.|-next|.*(vl|omni))", "qwen3"),
    (r"llama-?3\.1-nemotron", "llama"),
    (r"llama-?3_3-nemotron|vision", ""),  # found by architecture search; the code is in the model's own repository
    (r"nemotron-(h|nano|3|super)(?!.*(omni|vl))|nano-?v[23]", "nemotron_h"),
    (r"mixtral", "mixtral"),
    (r"mistral-(7b|nemo)|mathstral", "mistral"),
    (r"minimax-m2", "minimax_m2"),
    (r"glm-?5", "glm_moe_dsa"),
    (r"glm-?4\.[57]-?flash", "glm4_moe_lite"),
    (r"glm-?4\.[5-9](?!v)", "glm4_moe"),
    (r"gpt-oss", "gpt_oss"),
    (r"gemma-?4", "gemma4_text"),
    (r"gemma-?3", "gemma3_text"),
    (r"gemma-?2", "gemma2"),
    (r"llama-?4", "llama4_text"),
    (r"llama", "llama"),
)
"""Patterns of model names, and transformers' model type for each; empty if transformers has none.

For a model with images or sound it is the type of its language model; only that part is rehearsed.
"""

_SIZES: Mapping[str, Any] = {
    # Only the keys that a model's configuration has are used.
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,  # attention kernels for CPUs take multiples of 32
    "max_position_embeddings": 4096,  # longer than sequences that are padded for wide tensor and context parallelism
    "initializer_range": 0.3,  # wide, so that tokens differ in probability
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "max_window_layers": 2,
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    # Gemma 4.
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    # State spaces and linear attention.
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "chunk_size": 16,
    "time_step_limit": [0.0, 1e9],  # the default upper limit is infinity, which JSON does not have
    "linear_key_head_dim": 64,  # vLLM's kernel for CPUs takes 64 and 128
    "linear_value_head_dim": 64,
    # The indexer of sparse attention.
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 32,
    # Latent attention.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32),
    "num_nextn_predict_layers": 0,
}
_SETTINGS_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    # Published models normalise the top-k probabilities, unlike transformers' defaults; v0.6.0's Megatron-Bridge
    # supports nothing else (qwen3_moe_bridge.py:66). Such experts have larger outputs. With narrower weights, bfloat16
    # makes trainer and sampler differ by about as much as with other types.
    "qwen3_moe": {"norm_topk_prob": True, "initializer_range": 0.2},
    # Without norms of queries and keys, wide weights make bfloat16's difference between the engines larger: noise 0.06
    # at 0.3 and 0.035 at 0.2, on grpo_math_1B.yaml.
    "qwen2": {"initializer_range": 0.2},
    "nemotron_h": {"n_group": 1, "initializer_range": 0.2},
    "glm4_moe_lite": {"n_group": 1},
}
_PUBLISHED_KEYS: Mapping[str, Mapping[str, Any]] = {
    # By model type: keys that vLLM reads from a published config.json and that transformers' class does not declare.
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "qwen3_5_text": {"mamba_ssm_dtype": "float32"},
    "qwen3_5_moe_text": {"mamba_ssm_dtype": "float32"},
    "minimax_m2": {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": 32},
}
_LAYER_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # By model type: the key that lists the kind of each layer, and the kinds in a tiny pipeline stage, one layer each.
    "nemotron_h": ("layers_block_type", ("mamba", "moe", "attention")),
    "qwen3_next": ("layer_types", ("linear_attention", "full_attention")),
    "qwen3_5_text": ("layer_types", ("linear_attention", "full_attention")),
    "qwen3_5_moe_text": ("layer_types", ("linear_attention", "full_attention")),
    "gemma4_text": ("layer_types", ("sliding_attention", "full_attention")),
}
_PATTERN = "hybrid_override_pattern"
"""Key of a published ``nemotron_h`` config.json that has a letter for each layer."""
_YARN = {
    # Rotary scaling of DeepSeek-V3. Megatron applies it to latent attention even if a config.json has none.
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    # Pattern of model names, and settings in which these models differ from others of their type.
    (r"nemotron-(nano-\d+b|h)", {"layers_block_type": ("mamba", "mlp", "attention")}),
    (r"nemotron-3-super", {"moe_latent_size": 32}),
    (r"deepseek-(v3|r1)|guides/deepseek", {"rope_parameters": _YARN, "max_position_embeddings": 163840}),
    (r"gemma-?4-e\d", {"hidden_size_per_layer_input": 32}),
    (r"gemma-?4.*a\d+b", {"enable_moe_block": True, "top_k_experts": 2}),
)
_DROPPED_KEYS = (
    *("rope_scaling", "rope_parameters", "layer_types", "quantization_config", "dtype", "torch_dtype"),
    "auto_map",
)


@dataclass(frozen=True)
class TinyModel:
    """Description of a model to create."""

    model_type: str  # transformers' name of the architecture
    source: str  # where the architecture was read from
    # keys of its configuration: tiny sizes, merged into the recipe's own config.json if there is one
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_recurrent: bool = False  # True if a layer keeps a state from token to token, as Mamba's and linear attention do

    @property
    def stacks_experts(self) -> bool:
        """True if transformers has all experts of a layer in one weight, which vLLM loads by the expert."""
        layers = self.settings.get("layers_block_type", ()), self.settings.get(_PATTERN, "")
        has_experts = self.model_type == "nemotron_h" and ("moe" in layers[0] or "E" in layers[1])
        return has_experts or self.model_type == "glm4_moe_lite"


def tiny_model(name: str, layout: Layout, *, recipe: Path | None = None) -> TinyModel:
    """Return the tiny model for ``policy.model_name``, from a local folder's config.json or from the name.

    Args:
        recipe: path of the recipe, whose name and folders stand for the model's if that is a placeholder such as
            ``/path/to/checkpoint``.

    Raises:
        ConfigError: neither a folder with a ``config.json`` nor a name of a known architecture.
    """
    config = Path(name) / "config.json"
    if config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
            raise ConfigError(Problem(("policy.model_name",), f"{config} has no model_type, so it describes no model"))
        usable = {key: value for key, value in settings.items() if key not in _DROPPED_KEYS}
        shrunk = {**usable, **_sizes(layout, settings), **_layers_of(settings, layout)}
        return TinyModel(settings["model_type"], str(config), shrunk, _has_state_sizes(settings))
    source = f"the name {name}"
    if recipe is not None and re.match(r"(/?path/to/|$)", name):
        source = f"the recipe's name, as policy.model_name is {name or 'empty'}"
        name = "/".join((*recipe.resolve().parts[-3:-1], recipe.stem))
    lowered = name.lower()
    model_type = next((model_type for pattern, model_type in MODEL_TYPES if re.search(pattern, lowered)), None)
    if not model_type:
        model_types = ", ".join(sorted({model_type for _, model_type in MODEL_TYPES if model_type}))
        message = (
            f"{name} is no folder with a config.json, and its name matches no architecture known here "
            f"({model_types}); override it with a folder that has the model's config.json (nothing else is read): "
            "policy.model_name=FOLDER"
        )
        raise ConfigError(Problem(("policy.model_name",), message))
    variant = next((settings for pattern, settings in _VARIANTS if re.search(pattern, lowered)), {})
    settings = {**_sizes(layout), **_SETTINGS_OF_TYPE.get(model_type, {}), **variant}
    if model_type in _LAYER_KINDS:
        key, layers = _LAYER_KINDS[model_type]
        settings[key] = list(settings.get(key, layers)) * layout.pp
    _, kinds = _LAYER_KINDS.get(model_type, ("", ()))
    return TinyModel(model_type, source, settings, not {"mamba", "linear_attention"}.isdisjoint(kinds))


def _has_state_sizes(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json has sizes of Mamba's or linear attention's states, for its text model too."""
    text_config = config.get("text_config")
    keys = [*config, *(text_config if isinstance(text_config, Mapping) else ())]
    return any(key.startswith(("mamba_", "ssm_", "linear_")) for key in keys)


def _layers_of(config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the list of layers for each pipeline stage: one of each kind in a config.json, in order of appearance."""
    if isinstance(pattern := config.get(_PATTERN), str):
        return {_PATTERN: "".join(dict.fromkeys(pattern)) * layout.pp}
    key, _ = _LAYER_KINDS.get(str(config.get("model_type")), ("", ()))
    return {key: list(dict.fromkeys(config[key])) * layout.pp} if isinstance(config.get(key), list) else {}


def _sizes(layout: Layout, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return tiny sizes by key, limited to the keys of ``config`` if there is one."""
    heads, groups = max(4, layout.tp), max(2, layout.tp)
    layout_sizes = {
        "num_hidden_layers": 2 * layout.pp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "mamba_num_heads": heads,
        "n_groups": groups,
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
    }
    if config is None:
        return {**_SIZES, **layout_sizes}
    sizes = {key: value for key, value in {**_SIZES, **layout_sizes}.items() if key in config}
    if "num_key_value_heads" in config and config["num_key_value_heads"] == config.get("num_attention_heads"):
        sizes["num_key_value_heads"] = heads
    if config.get("q_lora_rank", 0) is None:
        sizes["q_lora_rank"] = None
    return sizes


def write_model(model: TinyModel, folder: Path, *, seed: int = 0) -> int:
    """Write ``model`` and ``tokenizer`` into a folder, and return the number of parameters.

    The tokenizer has its own folder: in the folder of some models, transformers would load the original model's class.
    A copy is in the model's folder, where Megatron-Bridge looks for the vocabulary's size when it imports the model.

    Raises:
        ConfigError: the transformers installed here doesn't have the architecture.
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    architectures = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if model.model_type not in architectures:
        message = f"transformers {transformers.__version__} has no model type {model.model_type} ({model.source})"
        raise ConfigError(Problem(("policy.model_name",), message))
    config_class = architectures[model.model_type]
    # Without a config.json, the default configuration of the architecture shows which sizes exist.
    existing_keys = config_class().to_dict() if not model.source.endswith("config.json") else model.settings
    settings = {key: value for key, value in model.settings.items() if key in existing_keys}
    settings.pop("model_type", None)
    if not model.source.endswith("config.json"):
        settings |= _PUBLISHED_KEYS.get(model.model_type, {})
    if "head_dim" not in existing_keys and "head_dim" not in settings and "qk_nope_head_dim" not in existing_keys:
        settings["hidden_size"] = 32 * settings["num_attention_heads"]
    if "kv_lora_rank" in existing_keys:  # latent attention has keys of each head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    config = config_class(**settings, tie_word_embeddings=bool(model.settings.get("tie_word_embeddings", False)))
    torch.manual_seed(seed)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    # transformers sets the padding token's embedding to zero and gives it no gradient. Megatron and Automodel train it,
    # and the token is sampled like any other. The slope of a norm at zero, 1/sqrt(eps), would make gradient norms of
    # 10,000 and more.
    torch.nn.init.normal_(policy.get_input_embeddings().weight.data, std=_SIZES["initializer_range"])
    policy.save_pretrained(folder / "model")
    if model.model_type == "nemotron_h":
        _rename_embedding(folder / "model" / "model.safetensors")
    for name in ("tokenizer", "model"):
        _tokenizer().save_pretrained(folder / name)
    return sum(parameter.numel() for parameter in policy.parameters())


def _rename_embedding(path: Path) -> None:
    """Rename the embedding from transformers 5.8's name to that of published models, which vLLM and the bridge read."""
    safetensors = importlib.import_module("safetensors.torch")
    tensors = safetensors.load_file(path)
    if (weight := tensors.pop("backbone.embedding.weight", None)) is not None:
        tensors["backbone.embeddings.weight"] = weight
    safetensors.save_file(tensors, path, metadata={"format": "pt"})


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


PROMPT_FORMAT = {"dataset_name": "ResponseDataset", "input_key": "input", "output_key": "output"}
"""NeMo-RL's settings of a data set whose file has an object with ``input`` and ``output`` in each line."""


def write_prompts(path: Path, rows: int = 256) -> None:
    """Write distinct prompts of three words each, in :data:`PROMPT_FORMAT`."""
    prompts = (f"w{2 + row % 30} w{2 + row % 29} w{2 + row % 7}" for row in range(rows))
    lines = (json.dumps({"input": prompt, "output": "w2"}) for prompt in prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
