"""A task of another distribution trains in the lab."""

import pytest

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.trainer import Trainer
from tests.helpers.plugins_page import code_block
from tests.tools.lab.tiny_recipe import TINY, merged


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
