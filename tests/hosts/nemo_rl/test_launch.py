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
from nemo_rl.algorithms.grpo import MasterConfig, setup
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig

class Here: ...

def main():
    loss = setup(MasterConfig(ClippedPGLossConfig(**json.loads(sys.argv[-1]))))[2]
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "path": sys.path[0], "main": Here.__module__, "file": __file__,
        "is_main": sys.modules["__main__"].Here is Here, "loss": type(loss).__name__,
    }))

if __name__ == "__main__":
    main()
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
        "file": str(script),
        "is_main": True,
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
    script.write_text(SCRIPT.replace("    main()\n", "    raise SystemExit('started')\n"), encoding="utf-8")
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
    host(setup="config, policy_factory=None")
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('started')", encoding="utf-8")
    assert main(["run", str(path)]) == 2
    assert "differs from the versions that nemo_geomask knows" in capsys.readouterr().err


def test_the_scripts_own_exit_is_kept(script):
    script.write_text(SCRIPT.replace("    main()\n", "    raise SystemExit(7)\n"), encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(script)])
    assert caught.value.code == 7


WAYS_ROUND = {
    "through the module": (
        "import nemo_rl.algorithms.grpo as grpo\nfrom nemo_rl.algorithms.grpo import setup\n"
        "if __name__ == '__main__':\n    grpo.setup(1)\n",
        "calls grpo.setup in line 4 through its module",
    ),
    "module of a package": (
        "from nemo_rl.algorithms import grpo\nfrom nemo_rl.algorithms.grpo import setup\n"
        "if __name__ == '__main__':\n    grpo.setup(1)\n",
        "calls grpo.setup in line 4 through its module",
    ),
    "in a function": (
        "def main():\n    from nemo_rl.algorithms.grpo import setup\n    setup(1)\n"
        "if __name__ == '__main__':\n    main()\n",
        "imports setup in line 2, which is not at its top level",
    ),
    "another script": (
        "import runpy\nif __name__ == '__main__':\n    runpy.run_path('run_grpo.py', run_name='__main__')\n",
        "imports none of setup of nemo_rl.algorithms.grpo",
    ),
    "another algorithm": (
        "from nemo_rl.algorithms.sft import setup\nif __name__ == '__main__':\n    setup(1)\n",
        "imports none of setup of nemo_rl.algorithms.grpo",
    ),
    "no main block": (
        "from nemo_rl.algorithms.grpo import setup\nsetup(1)\n",
        'has no `if __name__ == "__main__":` block',
    ),
}


@pytest.mark.parametrize(("text", "problem"), WAYS_ROUND.values(), ids=WAYS_ROUND)
def test_a_script_that_would_go_round_the_wrapper_is_not_started(script, capsys, text, problem):
    script.write_text(text, encoding="utf-8")
    assert main(["run", str(script), "{}"]) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert "`setup = with_geomask(setup)`" in printed.err
    assert printed.out == ""


def test_a_script_that_wraps_setup_itself_may_call_it_anywhere(script, capsys):
    text = SCRIPT.replace("def main():\n", "def main():\n    from nemo_geomask.hosts.nemo_rl import with_geomask\n")
    text = text.replace("setup(MasterConfig", "with_geomask(setup)(MasterConfig").replace(
        "    main()\n", "    pass\nmain()"
    )
    script.write_text(text, encoding="utf-8")
    assert main(["run", str(script), '{"name": "gspo"}']) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == "PolicyLoss"


def test_a_script_that_never_calls_setup_does_not_end_well(script, capsys):
    script.write_text(SCRIPT.replace("    main()\n", "    print('trained')\n"), encoding="utf-8")
    assert main(["run", str(script), "{}"]) == 2
    assert "ended without calling the setup that nemo_geomask wrapped" in capsys.readouterr().err
