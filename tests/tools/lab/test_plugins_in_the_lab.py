"""A loss and a task of another distribution train in the lab."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.run_store import read_curves
from nemo_geomask.tools.lab.trainer import Trainer
from tests.helpers.plugin_example import install_example, run_python
from tests.helpers.plugins_page import code_block
from tests.tools.lab.tiny_recipe import TINY, merged

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.slow
def test_third_party_loss_trains_in_the_lab(tmp_path_factory, tmp_path):
    third_party = install_example(tmp_path_factory)
    small = [
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "env.min_terms=4",
        "env.max_terms=8",
    ]
    recipe = ROOT / "recipes" / "lab" / "bfloat16.yaml"
    done = run_python(
        third_party,
        *("-m", "nemo_geomask.cli", "lab", str(recipe), *small),
        *(
            "--compare",
            "my_topr:none,my_topr:sequence_mean",
            "--steps",
            "2",
            "--jobs",
            "1",
            "--out",
            str(tmp_path),
        ),
    )
    assert done.returncode == 0, done.stderr
    curves = read_curves([tmp_path])
    assert [(curve.label, curve.steps) for curve in curves] == [
        ("my_topr:none", 2),
        ("my_topr:sequence_mean", 2),
    ]
    # Two optimiser steps a batch: from the second on, the capped ratio acts.
    assert all(curve.series("geomask/clip_fraction_high")[1] > 0 for curve in curves)


@pytest.mark.slow
def test_the_documented_task_is_trained_on_in_the_lab(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(code_block("my_tasks"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"env": {"name": "my_tasks:Echo", "options": {"numbers": 7}, "min_terms": 2, "max_terms": 4}}
    trainer = Trainer(LabRecipe.read(merged(TINY, env), source="test"), build_loss({}))
    metrics, rollout = trainer.step()
    assert trainer.task.vocab_size == 9
    assert 0 <= metrics["reward"] <= 1
    assert int(rollout.data["input_ids"][:, 1:].max()) <= 8
    with pytest.raises(ConfigError, match=r"env\.name: Input should be|env\.name: .*no task named 'ehco'"):
        LabRecipe.read({"env": {"name": "ehco"}}, source="test")
    with pytest.raises(ConfigError, match="options .* are for tasks from plugins"):
        LabRecipe.read({"env": {"options": {"numbers": 7}}}, source="test")
