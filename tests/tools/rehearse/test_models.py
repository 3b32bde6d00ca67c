from __future__ import annotations

import json

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.check import Layout
from nemo_geomask.tools.rehearse.tiny_models import VOCABULARY, tiny_model, write_model, write_prompts


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen2.5-1.5B", "qwen2"),
        ("agentica-org/DeepScaleR-1.5B-Preview", "qwen2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek_v3"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h"),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", "nemotron_h"),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", "llama"),
        ("google/gemma-4-26B-A4B-it", "gemma4_text"),
        ("zai-org/GLM-4.7-Flash", "glm4_moe_lite"),
        ("zai-org/GLM-4.6", "glm4_moe"),
        ("zai-org/GLM-5.1", "glm_moe_dsa"),
        ("MiniMaxAI/MiniMax-M2.7", "minimax_m2"),
        ("Qwen/Qwen3.5-9B-Base", "qwen3_5_text"),
        ("Qwen/Qwen3.5-35B-A3B-Base", "qwen3_5_moe_text"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4_text"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "deepseek_v3"),
    ],
)
def test_the_architecture_by_the_name(name, kind):
    assert tiny_model(name, Layout()).model_type == kind


def test_an_unknown_name_says_what_to_give():
    with pytest.raises(ConfigError, match=r"policy.model_name: acme/new-1B .* policy.model_name=FOLDER"):
        tiny_model("acme/new-1B", Layout())


@pytest.mark.parametrize(
    "name",
    ["nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", "mistralai/Mistral-Medium-3.5-128B", "Qwen/Qwen2.5-VL-3B-Instruct"],
)
def test_a_name_that_is_like_another_architectures_is_not_taken_for_it(name):
    with pytest.raises(ConfigError, match="matches no architecture known here"):
        tiny_model(name, Layout())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ["mamba", "moe", "attention"]),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", ["mamba", "mlp", "attention"]),
    ],
)
def test_each_kind_of_layer_is_there_in_each_pipeline_stage(name, layers):
    model = tiny_model(name, Layout(pp=2))
    assert model.settings["layers_block_type"] == layers * 2
    assert model.stacks_experts == ("moe" in layers)


def test_deepseek_v3_has_its_scaled_positions_and_moonlight_none():
    """Without them vLLM and Megatron disagreed by a KL of 2.3 nats, and by 0.02 with them."""
    scaled = tiny_model("deepseek-ai/DeepSeek-V3", Layout()).settings
    assert (scaled["rope_parameters"]["rope_type"], scaled["rope_parameters"]["factor"]) == ("yarn", 40.0)
    assert scaled["max_position_embeddings"] == 40 * scaled["rope_parameters"]["original_max_position_embeddings"]
    assert "rope_parameters" not in tiny_model("moonshotai/Moonlight-16B-A3B-Instruct", Layout()).settings


def test_a_published_pattern_of_layers_is_shortened(tmp_path):
    published = {"model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*", "n_groups": 8}
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    settings = tiny_model(str(tmp_path), Layout(tp=4)).settings
    assert (settings["hybrid_override_pattern"], settings["n_groups"]) == ("ME*", 4)


def test_a_placeholder_takes_the_recipes_name(tmp_path):
    recipe = tmp_path / "nemotron-3-super" / "stage1_rlvr.yaml"
    model = tiny_model("/path/to/checkpoint", Layout(), recipe=recipe)
    assert (model.model_type, model.settings["moe_latent_size"]) == ("nemotron_h", 32)
    assert "the recipe's name, as policy.model_name is /path/to/checkpoint" in model.source
    with pytest.raises(ConfigError, match="acme/new-1B"):
        tiny_model("acme/new-1B", Layout(), recipe=recipe)


def test_a_folder_keeps_what_is_no_size(tmp_path):
    given = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_experts": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "norm_topk_prob": False,
        "rope_scaling": {"factor": 4.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    model = tiny_model(str(tmp_path), Layout(tp=4, pp=2))
    assert model.model_type == "qwen3_moe"
    assert model.settings["norm_topk_prob"] is False
    assert "rope_scaling" not in model.settings
    assert "shared_expert_intermediate_size" not in model.settings
    sizes = {key: model.settings[key] for key in ("hidden_size", "num_experts", "num_hidden_layers")}
    assert sizes == {"hidden_size": 64, "num_experts": 8, "num_hidden_layers": 4}
    assert model.settings["num_key_value_heads"] % 4 == 0


def test_published_models_normalise_the_shares_of_their_experts():
    assert tiny_model("Qwen/Qwen3-30B-A3B", Layout()).settings["norm_topk_prob"] is True
    assert "norm_topk_prob" not in tiny_model("Qwen/Qwen3-0.6B", Layout()).settings


def test_a_folder_without_a_model_type(tmp_path):
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no model_type"):
        tiny_model(str(tmp_path), Layout())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.1-8B", "DeepSeek-V3"),
        *(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
            "zai-org/GLM-4.7-Flash",
        ),
        *("google/gemma-4-E4B-it", "google/gemma-4-26B-A4B-it", "Qwen/Qwen3.5-35B-A3B", "MiniMaxAI/MiniMax-M2.7"),
    ],
)
def test_models_are_tiny_and_run(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    parameters = write_model(tiny_model(name, Layout()), tmp_path)
    assert parameters < 1_000_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "w5 w7"}], tokenize=False)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [[5, 7]]
    with torch.no_grad():
        assert model(tokens).logits.shape == (1, 2, VOCABULARY)
    # Megatron reads one there.
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "model")) == VOCABULARY
    # One that is zero has gradients of 1/sqrt(eps), where it is sampled.
    assert model.get_input_embeddings().weight.norm(dim=1).min() > 0.5


@pytest.mark.slow
def test_the_config_has_what_published_models_have(tmp_path):
    """vLLM gives DeepSeek-V3's router a bias by a key that transformers' class does not declare."""
    pytest.importorskip("transformers")
    write_model(tiny_model("DeepSeek-V3", Layout()), tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_model(tiny_model("Qwen/Qwen3-0.6B", Layout()), tmp_path / name, seed=seed)
    first, again, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "abc")
    assert all(first[key].equal(again[key]) for key in first)
    assert not first["model.embed_tokens.weight"].equal(other["model.embed_tokens.weight"])


def test_no_two_prompts_are_equal(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", rows=64)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({line["input"] for line in lines}) == 64
