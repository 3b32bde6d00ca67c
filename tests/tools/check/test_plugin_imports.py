"""A plugin that a recipe names as ``module:attribute`` is imported by ``check``, and its mistakes are the recipe's."""

from __future__ import annotations

import os
import sys

import pytest

from nemo_geomask.cli import main

pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (recipes extra)")

RECIPE = "grpo: {num_prompts_per_step: 4}\nloss_fn: {name: clipped_pg}\n"


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)

    def write(text):
        (tmp_path / "own_losses.py").write_text(f"open('imported', 'w')\n{text}")
        (tmp_path / "recipe.yaml").write_text(
            "grpo: {num_prompts_per_step: 4}\nloss_fn: {name: own_losses:MINE}\npolicy: {max_grad_norm: 0}\n"
        )

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_is_found_in_the_current_folder_after_everything_else(plugin, capsys):
    plugin("import sys\npath = list(sys.path)\nfrom nemo_geomask.objectives.gspo import GSPO as MINE\n")
    path = list(sys.path)
    main(["check", "recipe.yaml"])
    assert "own_losses" not in capsys.readouterr().err
    assert sys.modules["own_losses"].path == [*path, os.getcwd()]
    assert sys.path == path


@pytest.mark.parametrize("exit_call", ["raise SystemExit", "raise SystemExit(0)", "import sys; sys.exit(0)"])
def test_that_exits_is_an_error(exit_call, plugin, capsys):
    plugin(exit_call)
    assert main(["check", "recipe.yaml"]) == 2
    assert "'own_losses:MINE'" in (out := capsys.readouterr().out)
    assert "could not be imported: SystemExit" in out


def test_that_raises_a_base_exception_is_an_error(plugin, capsys):
    plugin("class Odd(BaseException): pass\nraise Odd('no')")
    assert main(["check", "recipe.yaml"]) == 2
    assert "could not be imported: Odd: no" in capsys.readouterr().out


def test_that_is_interrupted_ends_the_command(plugin):
    plugin("raise KeyboardInterrupt")
    assert main(["check", "recipe.yaml"]) == 130


def test_is_not_imported_if_the_user_says_so(plugin, capsys, tmp_path):
    plugin("raise SystemExit(0)")
    assert main(["check", "recipe.yaml", "--no-import"]) == 2
    out = capsys.readouterr().out
    assert not (tmp_path / "imported").exists()
    assert "policy.max_grad_norm" in out  # the rest is judged
    assert "not checked: loss_fn.name: 'own_losses:MINE' was not imported, as --no-import asks" in out
    assert "GM001" not in out


def test_objects_of_this_package_need_no_import_of_others(plugin, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)  # it requires more sections than this recipe has
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["check", "recipe.yaml", "--no-import"]) == 0
    assert "no-import" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(256)\nraise E",
        "class C:\n    @property\n    def __class__(self):\n        raise SystemExit(256)\nX = C()",
        "raise SystemExit(256)",
    ],
)
def test_a_plugin_can_not_end_a_command_in_silence(tmp_path, monkeypatch, capsys, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hostile_plugin", raising=False)
    (tmp_path / "hostile_plugin.py").write_text(code)
    (tmp_path / "recipe.yaml").write_text("grpo: {}\nloss_fn: {name: 'hostile_plugin:X'}\n")
    assert main(["check", "recipe.yaml"]) in (1, 2)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "could not be imported" in text or "code outside this package, such as a plugin's, ended" in text
