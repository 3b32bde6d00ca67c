"""``nemo-geomask run`` against a NeMo-RL of a few lines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nemo_geomask.cli import main
from tests.helpers.nemo_rl import fake_tree

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import nemo_rl.algorithms.grpo as grpo
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig

class Here: ...

seen = {
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "main": Here.__module__,
    "loss": type(grpo.setup(ClippedPGLossConfig(**json.loads(sys.argv[-1])))).__name__,
}
print(json.dumps(seen))
"""


@pytest.fixture
def script(host, tmp_path, monkeypatch):
    host()
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    return path


@pytest.mark.parametrize(("settings", "loss"), [({"name": "gspo"}, "PolicyLoss"), ({}, "ClippedPGLossFn")])
def test_the_script_runs_as_python_would_run_it(script, capsys, settings, loss):
    arguments = ["--config", "recipe.yaml", "--help", "grpo.seed=1", "++loss_fn.name=x", json.dumps(settings)]
    assert main(["run", str(script), *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "argv": [str(script), *arguments],
        "name": "__main__",
        "main": "__main__",
        "path": str(script.parent),
        "loss": loss,
    }


def test_in_a_process_of_its_own(tmp_path):
    fake_tree.write(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nemo_geomask.cli", "run", str(path), '{"name": "gspo"}'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=500,
    )
    assert json.loads(done.stdout)["loss"] == "PolicyLoss", done.stderr


def test_a_mistake_in_the_recipe_ends_in_one_line(script, capsys):
    assert main(["run", str(script), '{"name": "gsp"}']) == 2
    assert "nemo-geomask: error: loss_fn.name: no loss named 'gsp'" in capsys.readouterr().err


def test_a_mistake_in_the_recipe_ends_before_the_script(script, tmp_path, capsys):
    pytest.importorskip("omegaconf", reason="reading a recipe needs omegaconf")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loss_fn: {name: gspo, ratio_clip_minn: 0.1}\n", encoding="utf-8")
    script.write_text("raise SystemExit('started')", encoding="utf-8")
    assert main(["run", str(script), "--config", str(recipe)]) == 2
    assert "loss_fn.ratio_clip_minn: unknown key; did you mean 'ratio_clip_min'?" in capsys.readouterr().err
    # What the script might make of its arguments is its own affair.
    for arguments in (["--config", "nowhere.yaml"], ["--config"], ["--config", str(recipe), "--seed", "1"]):
        with pytest.raises(SystemExit, match="started"):
            main(["run", str(script), *arguments])


def test_no_such_script(host, capsys):
    host()
    assert main(["run", "examples/run_grpoo.py"]) == 2
    assert "examples/run_grpoo.py: there is no such script" in capsys.readouterr().err


def test_another_nemo_rl_ends_before_the_script(host, tmp_path, capsys):
    host(call="make(config)")
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('started')", encoding="utf-8")
    assert main(["run", str(path)]) == 2
    assert "differs from the versions that nemo_geomask knows" in capsys.readouterr().err


def test_the_scripts_own_exit_is_kept(script):
    script.write_text("raise SystemExit(7)", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(script)])
    assert caught.value.code == 7
