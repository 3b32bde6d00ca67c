"""Table of recipes, made from a checkout of four."""

from __future__ import annotations

import json

import pytest

from nemo_geomask.recipe import ROOT_VARIABLE
from tests.evidence.hosts import recipe_table
from tests.evidence.hosts.recipe_table import drawn, main, plan_recipes, recipe_tables

pytest.importorskip("hydra", reason="overrides are Hydra's")
BASE = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16, max_num_steps: 1000, seed: 42}
loss_fn: {reference_policy_kl_penalty: 0.0}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 1024
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: true, _v2: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}
  megatron_cfg: {enabled: false}
  generation:
    backend: vllm
    vllm_cfg: {precision: bfloat16}
data: {train: {dataset_name: OpenMathInstruct-2}}
logger: {log_dir: logs}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


@pytest.fixture
def tables(tmp_path):
    """The Markdown of results that are not in a file yet."""

    def write(recipes):
        path = tmp_path / "results.json"
        path.write_text(json.dumps({"label": "main", "recipes": recipes}), encoding="utf-8")
        return recipe_tables(path)

    return write


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, "")  # main sets it; this puts it back
    recipes = {
        "configs/planned.yaml": BASE,
        "configs/sglang.yaml": BASE.replace("backend: vllm", "backend: sglang"),
        "configs/checked.yaml": BASE.replace("policy:\n", "policy:\n  max_grad_norm: 0\n"),
        "nemo_gym/gym.yaml": BASE + "extra: ${oc.env:NO_SUCH_VARIABLE}\n",
        "configs/sft.yaml": BASE.replace("grpo:", "sft:").replace("loss_fn:", "other:"),
        "configs/server.yaml": "port: 1\n",
    }
    for name, text in recipes.items():
        path = tmp_path / "RL" / "examples" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "RL"


def test_each_recipe_is_planned_or_has_a_reason(checkout, tables):
    table = dict(plan_recipes(checkout))
    assert set(table) == {
        *("configs/planned.yaml", "configs/sglang.yaml", "configs/checked.yaml"),
        *("nemo_gym/gym.yaml", "configs/sft.yaml"),
    }
    planned = {"model_type": "qwen3_moe", "trainer": "DTensor v1", "script": "examples/run_grpo.py"}
    assert table["configs/planned.yaml"] == {"algorithm": "grpo", "planned": planned}
    assert table["configs/sglang.yaml"]["planned"] == {**planned, "in_place_of": "sglang"}
    assert "sampled by vLLM in place of sglang" in tables(table)
    assert table["configs/checked.yaml"]["refused"]["by"].startswith("check GM339 ")
    assert "NO_SUCH_VARIABLE" in table["nemo_gym/gym.yaml"]["refused"]["reason"]
    assert "no policy loss" in table["configs/sft.yaml"]["refused"]["reason"]


def test_a_recipe_is_planned_under_the_variables_with_which_nemo_rl_starts_it(checkout, tables, monkeypatch):
    """GM307 stands for a refusal of NeMo-RL that a variable switches off."""
    monkeypatch.delenv("NRL_IGNORE_TP_ACCURACY_CHECK", raising=False)
    text = BASE.replace("_v2: false", "_v2: false, tensor_parallel_size: 4").replace(
        "  train_micro_batch_size: 1", "  train_micro_batch_size: 1\n  logprob_batch_size: 4"
    )
    (checkout / "examples" / "configs" / "wide.yaml").write_text(text, encoding="utf-8")
    assert dict(plan_recipes(checkout))["configs/wide.yaml"]["refused"]["by"].startswith("check GM307 ")
    script = checkout / "tests" / "test_suites" / "llm" / "wide.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/bash\nexport NRL_IGNORE_TP_ACCURACY_CHECK=1\nexport OTHER=2\n", encoding="utf-8")
    table = dict(plan_recipes(checkout))
    assert table["configs/wide.yaml"]["planned"]["environment"] == {"NRL_IGNORE_TP_ACCURACY_CHECK": "1"}
    assert "NRL_IGNORE_TP_ACCURACY_CHECK=1 as in NeMo-RL" in tables(table)


def test_a_recipe_that_is_planned_later_leaves_the_lot_of_the_others():
    recipes = {f"{number}.yaml": {"planned": {}} for number in range(40)}
    before = drawn({name: entry if name != "7.yaml" else {"refused": {}} for name, entry in recipes.items()})
    assert len(set(drawn(recipes)) - set(before)) <= 1


def test_the_lot_falls_on_planned_recipes_and_is_the_same_each_time():
    recipes = {f"{number}.yaml": {"planned": {}} for number in range(40)} | {"refused.yaml": {"refused": {}}}
    chosen = drawn(recipes)
    assert len(set(chosen)) == recipe_table.DRAWN
    assert "refused.yaml" not in chosen
    assert drawn(dict(reversed(recipes.items()))) == chosen != drawn(recipes, seed=1)


def test_results_stay_and_the_page_says_how_they_ended(checkout, tmp_path, monkeypatch, capsys):
    run = {"outcome": "failed", "error": "step: loss of step 1 is nan", "seconds": 9, "date": "2026-11-24", "steps": {}}
    monkeypatch.setattr(recipe_table, "rehearse_recipe", lambda path, timeout, environment: run)
    where = ["--results", str(tmp_path / "results")]
    assert main([str(checkout), "--run", *where]) == 1
    assert main([str(checkout), *where]) == 0
    text = recipe_tables(tmp_path / "results" / "main.json")
    assert "of 4 GRPO and PPO recipes, 2 are planned and 2 refused" in text
    assert "| configs/planned.yaml | yes | failed in 9 s: step: loss of step 1 is nan | 2026-11-24 |" in text
    assert "1 of supervised fine-tuning" in text
    with pytest.raises(SystemExit):
        main([str(checkout), "--only", "nothing.yaml", *where])
    assert "has no recipe nothing.yaml" in capsys.readouterr().err
