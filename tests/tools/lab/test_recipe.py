from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe import load_recipe
from nemo_geomask.tools.lab.compare_specs import parse_compare
from nemo_geomask.tools.lab.lab_recipe import LabConfig, LabRecipe

pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (demo extra)")

RECIPES = sorted((Path(__file__).parents[3] / "recipes" / "lab").glob("*.yaml"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"grpo": {"max_num_step": 3}}, "r.yaml: grpo.max_num_step: unknown key; did you mean 'max_num_steps'?"),
        ({"polcy": {}}, "r.yaml: polcy: unknown key; did you mean 'policy'?"),
        ({"policy": {"lr": -1.0}}, "r.yaml: policy.lr: Input should be greater than 0 (found -1.0)"),
        (
            {"policy": {"train_global_batch_size": 48, "train_micro_batch_size": 24}, "lab": {"dp": 4}},
            "r.yaml: grpo.num_prompts_per_step x grpo.num_generations_per_prompt (256) must be a multiple of "
            "policy.train_global_batch_size (48)",
        ),
        (
            {"lab": {"dp": 2}},
            "policy.train_global_batch_size (64) must be a multiple of policy.train_micro_batch_size x lab.dp (64 x 2)",
        ),
        (
            {"policy": {"train_global_batch_size": 64, "docs_per_step": 100}},
            "r.yaml: policy: train_global_batch_size (64) and docs_per_step (100) both set",
        ),
        ({"policy": {"train_global_batch_size": None}}, "train_global_batch_size and docs_per_step are both null"),
        (
            {"policy": {"docs_per_step": 0}},
            "r.yaml: policy.docs_per_step: Input should be greater than 0, or null (found 0)",
        ),
        ({"policy": {"docs_per_step": 300}}, "policy.docs_per_step (300) exceeds grpo.num_prompts_per_step x"),
        ({"lab": {"tp": 3}}, "r.yaml: lab.tp: Input should be 1, 2 or 4 (found 3)"),
        ({"lab": {"device": "gpu"}}, "r.yaml: lab.device: Input should be 'cpu' or 'cuda'"),
        (
            {"lab": {"device": "cuda", "cp": 2}},
            "lab.device: cuda needs a single process, but lab.tp, lab.cp and lab.dp (1, 2, 1) start several",
        ),
        (
            {"policy": {"generation": {"backend": "vllm"}, "model": {"hidden_size": 128}}, "lab": {"device": "cuda"}},
            "lab.device: cuda is not supported with policy.generation.backend: vllm; set the backend to copy",
        ),
        ({"policy": {"model": {"num_attention_heads": 3}}}, "num_attention_heads"),
        (
            {"policy": {"generation": {"quantization": {"weights": "int4", "block_size": 24}}}},
            "model.hidden_size (64) must be a multiple of generation.quantization.block_size (24)",
        ),
        (
            {"policy": {"generation": {"vllm_kwargs": {"kv_cache_dtype": "fp8"}}}},
            "vllm_kwargs (kv_cache_dtype) are vLLM's, and backend is copy",
        ),
        ({"policy": {"generation": {"top_p": 0.9}}, "lab": {"tp": 2}}, "need all logits of a token, and lab.tp"),
        (
            {"grpo": {"async_grpo": {"in_flight_weight_updates": True}}},
            "in_flight_weight_updates has no effect without enabled",
        ),
        (
            {
                "policy": {
                    "router_replay": {"enabled": True},
                    "generation": {"backend": "vllm"},
                    "model": {"hidden_size": 128},
                }
            },
            "policy.router_replay.enabled needs policy.generation.backend: copy",
        ),
        ({"env": {"min_terms": 9, "max_terms": 3}}, "min_terms"),
        (
            {"grpo": {"seed": 12345678901234567890}},
            "r.yaml: grpo.seed: Input should be less than 4294967296 (found 12345678901234567890)",
        ),
    ],
)
def test_a_mistake_in_a_recipe_is_named_with_its_key(data, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LabRecipe.read(data, source="r.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    from nemo_geomask import build_loss

    recipe = LabRecipe.read(load_recipe(path), source=path.name)
    variants = parse_compare(recipe.lab.compare, recipe.loss_fn, recipe.lab)
    assert variants
    for loss_fn in variants.values():
        build_loss(loss_fn)


BASE = {"name": "clipped_pg", "ratio_clip_min": 0.1, "masks": [{"preset": "veto", "max": 9.0}]}


def test_a_spec_changes_a_copy_of_the_recipes_loss():
    lab = LabConfig(presets={"geometric": {"min": 0.9, "max": 1.3}})
    plain, off, mean, own = parse_compare(
        "gspo, gspo:none ,gspo:sequence_mean+geometric+opsm,some.module:LOSS:token", BASE, lab
    ).values()
    assert plain == {**BASE, "name": "gspo"}
    assert off == {**BASE, "name": "gspo", "use_importance_sampling_correction": False}
    assert mean["is_correction_level"] == "sequence_mean"
    assert mean["use_importance_sampling_correction"] is True
    assert [mask["preset"] for mask in mean["masks"]] == ["veto", "geometric", "opsm"]
    assert mean["masks"][1] == {"preset": "geometric", "min": 0.9, "max": 1.3}
    assert (own["name"], own["is_correction_level"]) == ("some.module:LOSS", "token")
    assert BASE["masks"] == [{"preset": "veto", "max": 9.0}]


def test_none_takes_the_truncation_away():
    base = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    (loss_fn,) = parse_compare("clipped_pg:none", base, LabConfig()).values()
    assert loss_fn == {"name": "clipped_pg", "use_importance_sampling_correction": False}


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("gspo:sequence_men", "unknown correction level 'sequence_men'; did you mean 'sequence_mean'"),
        ("gspo,,", "an empty SPEC"),
        (":sequence", "names no loss"),
        ("gspo,gspo", "listed twice"),
    ],
)
def test_a_mistake_in_a_spec_is_named(text, needle):
    with pytest.raises(ConfigError, match=needle):
        parse_compare(text, {}, LabConfig())


def test_presets_are_merged_over_the_built_in_ones_and_their_names_checked():
    assert LabConfig(presets={"geometric": {"min": 0.9}}).preset_bounds["geometric"] == {"min": 0.9, "max": 1.02}
    assert LabConfig(presets={"geometric": {"min": None}}).preset_bounds["geometric"] == {"max": 1.02}
    with pytest.raises(ConfigError, match="unknown mask preset 'geometrc'; did you mean 'geometric'"):
        LabRecipe.read({"lab": {"presets": {"geometrc": {"min": 0.9}}}}, source="x.yaml")
