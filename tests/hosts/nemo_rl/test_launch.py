"""``nemo-geomask run`` against a NeMo-RL of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nemo_geomask.cli import main
from nemo_geomask.errors import MissingDependencyError
from nemo_geomask.hosts.nemo_rl.installed_version import import_nemo_rl
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
        # NeMo-RL is installed where it trains; the folder in which a command runs is not searched.
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        timeout=500,
    )
    assert json.loads(done.stdout)["loss"] == "PolicyLoss", done.stderr


def test_a_nemo_rl_that_cannot_be_imported_is_named_with_the_python_it_needs(script, tmp_path, monkeypatch, capsys):
    """As pydantic refuses typing.TypedDict before Python 3.12."""
    loss_functions = tmp_path / "nemo_rl" / "algorithms" / "loss" / "loss_functions.py"
    with loss_functions.open("a", encoding="utf-8") as file:
        file.write("\nraise TypeError('use typing_extensions.TypedDict')\n")
    project = '[project]\nname = "nemo-rl"\nrequires-python = ">=3.99"\n'
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["run", str(script), "{}"]) == 2
    error = capsys.readouterr().err
    assert f"can't be imported by {sys.executable}, which is Python " in error
    assert "(required: >=3.99): TypeError: use typing_extensions.TypedDict. Use the environment that" in error


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


SETUP = "from nemo_rl.algorithms.grpo import setup\n"
NO_NAME = "imports none of setup of nemo_rl.algorithms.grpo"
WAYS_ROUND = {
    "through the module": (
        f"import nemo_rl.algorithms.grpo as grpo\n{SETUP}if __name__ == '__main__':\n    grpo.setup(1)\n",
        "calls grpo.setup in line 4 through its module",
    ),
    "through the module of a package": (
        f"from nemo_rl.algorithms import grpo\n{SETUP}grpo.setup(1)\n",
        "calls grpo.setup in line 3 through its module",
    ),
    "by its whole path": (
        "import nemo_rl.algorithms.grpo\nfrom nemo_rl.algorithms.ppo import setup\nnemo_rl.algorithms.grpo.setup(1)\n",
        "calls nemo_rl.algorithms.grpo.setup in line 3 through its module",
    ),
    "by a part of its path": (
        f"from nemo_rl import algorithms\n{SETUP}algorithms.grpo.setup(1)\n",
        "calls algorithms.grpo.setup in line 3 through its module",
    ),
    "in a function": (
        f"def main():\n    {SETUP}    setup(1)\nmain()\n",
        "imports setup in line 2, which is not at its top level",
    ),
    "beside an install of another package": (
        "from rich.traceback import install\nfrom nemo_rl.algorithms import grpo\ngrpo.setup(1)\n",
        "calls grpo.setup in line 3 through its module",
    ),
    "another script": ("import runpy\nrunpy.run_path('run_grpo.py', run_name='__main__')\n", NO_NAME),
    "another algorithm": ("from nemo_rl.algorithms.sft import setup\nsetup(1)\n", NO_NAME),
    "with everything of a module": ("from nemo_rl.algorithms.grpo import *\nsetup(1)\n", NO_NAME),
}


@pytest.mark.parametrize(("text", "problem"), WAYS_ROUND.values(), ids=WAYS_ROUND)
def test_a_script_that_would_go_round_the_wrapper_is_not_started(script, capsys, text, problem):
    script.write_text(text, encoding="utf-8")
    assert main(["run", str(script), "{}"]) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert "`setup = with_geomask(setup)`" in printed.err
    assert printed.out == ""


BY_NAME = "def run():\n    from nemo_rl.algorithms.grpo import setup\n    setup(1)\n"
HELPERS = {
    "by name": (f"import helpers\n{SETUP}", BY_NAME, "setup"),
    "through the module": (
        f"{SETUP}from helpers import run\n",
        "from nemo_rl.algorithms import ppo\nppo.setup(1)\n",
        "ppo.setup",
    ),
    "of a package": (f"{SETUP}from tools import *\n", BY_NAME, "setup"),
}


@pytest.mark.parametrize(("text", "helper", "name"), HELPERS.values(), ids=HELPERS)
def test_a_module_of_the_script_that_names_setup(script, capsys, text, helper, name):
    folder = script.parent
    if "tools" in text:
        folder = folder / "tools"
        folder.mkdir()
        (folder / "__init__.py").write_text("from . import helpers\n", encoding="utf-8")
    (folder / "helpers.py").write_text(helper, encoding="utf-8")
    script.write_text(text, encoding="utf-8")
    assert main(["run", str(script), "{}"]) == 2
    assert f"imports helpers.py, which names NeMo-RL's {name} in line " in capsys.readouterr().err


BUILD = "MasterConfig(ClippedPGLossConfig(name='gspo'))"
PRINT = "print(type(loss).__name__, type(policy).__name__)\n"
IMPORTS = (
    "import functools, sys\n"
    "from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn\n"
    "from nemo_rl.algorithms.grpo import MasterConfig, setup as begin\n"
)
OWN_SCRIPTS = {
    "in a table": (
        f"TRAINERS = {{'grpo': begin}}\npolicy, _, loss, *_ = TRAINERS['grpo']({BUILD})\n" + PRINT,
        "GeomaskPolicy",
    ),
    "in part": (
        f"setup = functools.partial(begin, tokenizer=3)\npolicy, _, loss, *_ = setup({BUILD})\n" + PRINT,
        "GeomaskPolicy",
    ),
    "a policy of its own": (
        "from nemo_rl.models.policy.lm_policy import Policy\nclass OwnPolicy(Policy): ...\n"
        f"policy, _, loss, *_ = begin({BUILD}, policy_factory=OwnPolicy)\nassert isinstance(policy, OwnPolicy)\n"
        + PRINT,
        "GeomaskOwnPolicy",
    ),
    "a setup of its own": (
        "from nemo_geomask.hosts.nemo_rl import with_geomask\nfrom nemo_rl.models.policy.lm_policy import Policy as P\n"
        "@with_geomask\ndef own_setup(config, policy_factory=None):\n"
        "    return (policy_factory or P)(config.policy), ClippedPGLossFn(config.loss_fn)\n"
        f"policy, loss = own_setup({BUILD})\n" + PRINT,
        "GeomaskPolicy",
    ),
    "wrapped in a function": (
        "def main():\n    from nemo_geomask.hosts.nemo_rl import with_geomask\n"
        "    from nemo_rl.algorithms import grpo\n"
        f"    return with_geomask(grpo.setup)({BUILD})\npolicy, _, loss, *_ = main()\n" + PRINT,
        "GeomaskPolicy",
    ),
    "installed": (
        f"import nemo_geomask\nnemo_geomask.install()\npolicy, _, loss, *_ = begin({BUILD})\n" + PRINT,
        "GeomaskPolicy",
    ),
    "a loop of its own": (
        "from nemo_geomask.hosts import nemo_rl as geomask\nfrom nemo_rl.models.policy.lm_policy import Policy\n"
        f"config = {BUILD}\nloss = geomask.build_nemo_rl_loss(config)\n"
        "policy = geomask.prepare_policy(Policy(config.policy), loss)\n" + PRINT,
        "GeomaskPolicy",
    ),
}


@pytest.mark.parametrize(("text", "policy"), OWN_SCRIPTS.values(), ids=OWN_SCRIPTS)
def test_a_script_of_ones_own_trains_the_loss_of_its_recipe(script, capsys, text, policy):
    script.write_text(IMPORTS + text, encoding="utf-8")
    assert main(["run", str(script)]) == 0
    assert capsys.readouterr().out == f"PolicyLoss {policy}\n"


def test_a_module_of_the_script_that_wraps_setup_itself(script, capsys):
    text = (
        "from nemo_geomask.hosts.nemo_rl import with_geomask\n"
        + IMPORTS
        + f"def run(): return with_geomask(begin)({BUILD})\n"
    )
    (script.parent / "training.py").write_text(text, encoding="utf-8")
    script.write_text("from training import run\npolicy, _, loss, *_ = run()\n" + PRINT, encoding="utf-8")
    assert main(["run", str(script)]) == 0
    assert capsys.readouterr().out == "PolicyLoss GeomaskPolicy\n"


@pytest.mark.parametrize("future", ["", '"""Docs."""\nfrom __future__ import annotations\n'], ids=["values", "strings"])
def test_annotations_are_what_the_script_makes_them(script, capsys, future):
    text = future + IMPORTS + "def f(x: int): ...\n" + f"begin({BUILD})\nprint(f.__annotations__, __doc__)\n"
    script.write_text(text, encoding="utf-8")
    assert main(["run", str(script)]) == 0
    expected = "{'x': 'int'} Docs.\n" if future else "{'x': <class 'int'>} None\n"
    assert capsys.readouterr().out == expected


def test_a_script_that_never_calls_setup_does_not_end_well(script, capsys):
    for end in ("", "; sys.exit()", "; sys.exit(0)"):
        script.write_text(SCRIPT.replace("    main()\n", f"    print('trained'){end}\n"), encoding="utf-8")
        assert main(["run", str(script), "{}"]) == 2
        assert "ended without calling the setup that nemo_geomask wrapped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "argument", "code"),
    [
        ("main(); sys.exit(0)", '{"name": "gspo"}', 0),
        ("sys.exit(main())", '{"name": "gspo"}', None),
        ("sys.exit(0)", "--help", 0),
        ("raise SystemExit(7)", "{}", 7),
    ],
)
def test_a_scripts_own_exit_is_kept(script, end, argument, code):
    script.write_text(SCRIPT.replace("    main()\n", f"    {end}\n"), encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(script), argument])
    assert caught.value.code == code


def test_a_requirement_of_nemo_rl_that_is_missing_is_named(host, tmp_path):
    host()
    (tmp_path / "nemo_rl" / "needy.py").write_text("import no_such_package", encoding="utf-8")
    with pytest.raises(
        MissingDependencyError, match=r"NeMo-RL \(.*\) needs no_such_package, which .*nemo-geomask doctor"
    ):
        import_nemo_rl("nemo_rl.needy")
