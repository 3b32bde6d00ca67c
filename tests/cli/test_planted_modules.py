"""No code beside a recipe or a log runs, unless the recipe names it as a plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_geomask import cli
from nemo_geomask.cli import main
from nemo_geomask.plugin_imports import import_plugin_module, plugin_imports

ROOT = Path(__file__).parents[2]
NAMES = ("orjson", "omegaconf", "yaml", "pyarrow", "hydra", "numpy", "scipy", "torch", "pydantic", "rich", "nemo_rl")
RECIPE = "grpo: {num_prompts_per_step: 4}\nloss_fn: {name: clipped_pg}\n"
COMMANDS = {
    "lab": ["recipe.yaml", "lab.no_such=1"],
    "run": ["script.py"],
    "doctor": [],
    "check": ["recipe.yaml", "grpo.num_prompts_per_step=8"],
    "diagnose": ["logs"],
    "sweep": ["logs"],
    "translate": ["verl.yaml"],
    "test-variant": ["no_such_loss"],
    "rehearse": ["recipe.yaml", "--dry-run"],
    "bench": ["--no-such-option"],
    "schema": [],
    "recipes": [],
    "completion": ["bash"],
    "probe": ["recipe.yaml"],
}


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__name__)\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {actor: {clip_ratio: 0.2}}\n")
    (tmp_path / "script.py").write_text("from nemo_rl.algorithms.grpo import setup\n")
    row = {"content": ["a"], "rewards": [1.0], "input_lengths": [1], "token_ids": [[1]], "token_loss_mask": [[1]]}
    row |= {
        "sample_loss_mask": [1.0],
        "advantages": [[1.0]],
        "generation_logprobs": [[-1.0]],
        "prev_logprobs": [[-1.0]],
    }
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train_data_step1.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


EVERY_COMMAND = """
import contextlib, json, sys
from nemo_geomask.cli import main

for words in json.loads(sys.argv[1]):
    print(words, file=sys.stderr)
    with contextlib.suppress(SystemExit):
        main(words)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["code", "module"])
def test_no_module_beside_the_input_is_imported(folder, how):
    assert set(COMMANDS) == {command.name for command in cli.COMMANDS}
    commands = [[name, *words] for name, words in COMMANDS.items()]
    words = ["-c", EVERY_COMMAND, json.dumps(commands)] if how == "code" else ["-m", "nemo_geomask.cli", "schema"]
    # The interpreter, too, would look for nemo_rl beside a recipe.
    environment = {key: value for key, value in os.environ.items() if key != "NEMO_RL_ROOT"}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert not (folder / "executed").exists(), (folder / "executed").read_text()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


class TestSearchPath:
    """``sys.path`` during a command and after it."""

    @pytest.fixture
    def seen(self, monkeypatch, tmp_path):
        from nemo_geomask.cli import schema

        monkeypatch.chdir(tmp_path)
        paths = []
        monkeypatch.setattr(schema, "run", lambda arguments: paths.append(list(sys.path)) or 0)
        return paths

    @pytest.mark.parametrize("first", ["", "current"])
    def test_has_no_current_folder(self, first, seen, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "path", [first and str(tmp_path), *sys.path])
        before = list(sys.path)
        assert main(["schema"]) == 0
        assert seen == [before[1:]]
        assert sys.path == before

    def test_has_a_checkout_of_this_package_last(self, seen, monkeypatch):
        monkeypatch.chdir(Path(cli.__file__).parents[2])
        monkeypatch.setattr(sys, "path", ["", "/other"])
        main(["schema"])
        assert seen == [["/other", os.getcwd()]]

    def test_stays_as_it_is_if_the_current_folder_is_not_first(self, seen, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "path", ["/other", str(tmp_path)])
        main(["schema"])
        assert seen == [["/other", str(tmp_path)]]


class TestPluginImports:
    """A plugin's module, imported from the current folder only where that is asked for."""

    @pytest.fixture
    def plugin(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        before = set(sys.modules)
        (tmp_path / "own_losses.py").write_text("MINE = 1")
        yield
        for name in set(sys.modules) - before:
            del sys.modules[name]

    def test_a_library_call_searches_no_folder(self, plugin):
        with pytest.raises(ModuleNotFoundError):
            import_plugin_module("own_losses")
        with plugin_imports([os.getcwd()]):
            assert import_plugin_module("own_losses").MINE == 1

    def test_a_file_named_like_an_installed_package_is_not_taken(self, plugin, tmp_path):
        (tmp_path / "networkx.py").write_text("open('imported', 'w')")
        with plugin_imports([os.getcwd()]):
            import_plugin_module("networkx")
        assert not (tmp_path / "imported").exists()


def test_code_that_ends_the_process_is_an_error(monkeypatch, capsys):
    from nemo_geomask.cli import schema

    monkeypatch.setattr(schema, "run", lambda arguments: sys.exit(0))
    assert main(["schema"]) == 2
    assert "ended the command: SystemExit(0)" in capsys.readouterr().err
    monkeypatch.setattr(schema, "run", lambda arguments: sys.exit(143))  # a handler of SIGTERM
    with pytest.raises(SystemExit):
        main(["schema"])
    monkeypatch.setattr(schema, "run", lambda arguments: sys.exit(256))  # a shell would see 0
    assert main(["schema"]) == 2
