"""What all commands have in common: help, the table of commands, closed pipes, types of options."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nemo_geomask import cli
from nemo_geomask.cli import main, schema
from tests.helpers.closed_pipe import run_unread

ROOT = Path(__file__).parents[2]
MODULES = {command.name: command.module for command in cli.COMMANDS}
COMMANDS = list(MODULES)


def helped(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_recipes_that_a_help_names_exist(command, capsys):
    named = re.findall(r"\brecipes/[\w./-]*\w", helped(capsys, command))
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert bool(named) == (command in ("lab", "check", "recipes"))


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_a_help_are_accepted(command, capsys, monkeypatch):
    text = helped(capsys, command).replace("\\\n", "")
    examples = [line for line in text.splitlines() if line.startswith("  nemo-geomask ")]
    lines = [line.partition(" > ")[0].split() for line in examples]
    seen = []
    module = importlib.import_module(MODULES[command])
    monkeypatch.setattr(module, "run", lambda arguments: seen.append(arguments) or 0)
    for _, *words in lines:
        assert main(words) == 0
    assert len(seen) == len(lines)
    assert bool(lines) == (command not in ("bench", "doctor", "schema"))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_an_option_before_the_command_imports_no_tool_and_no_package(option):
    code = f"""
        import sys
        from nemo_geomask.cli import main
        try:
            main([{option!r}])
        except SystemExit as error:
            assert error.code == 0
        own = ("nemo_geomask.cli", "nemo_geomask.errors", "nemo_geomask.optional",
               "nemo_geomask.plugin_imports", "nemo_geomask.tools.shared", "nemo_geomask.yaml_text")
        ours = {{name for name in sys.modules if name.startswith("nemo_geomask.")}} - {{"nemo_geomask.tools"}}
        print(*sorted(name for name in ours if not name.startswith(own)), file=sys.stderr)
        print(*{{"torch", "pydantic", "omegaconf", "yaml"}} & set(sys.modules), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stderr.split() == []


def test_every_command_and_its_line_are_listed(capsys):
    printed = " ".join(helped(capsys).split())
    for command in cli.COMMANDS:
        assert f"{command.name} {command.help}" in printed


@pytest.mark.parametrize(
    ("word", "hint"), [("scema", "did you mean 'schema'?"), ("test_variant", "did you mean 'test-variant'?")]
)
def test_a_mistyped_command_names_the_nearest(word, hint, capsys):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    assert f"there is no command '{word}'; {hint}" in capsys.readouterr().err


@pytest.mark.slow
class TestBrokenPipe:
    """The reader of the output goes away: no traceback, and the status that a shell gives it."""

    @pytest.mark.parametrize("words", ["schema --help", "--version", "schema"])
    def test_is_no_error(self, words):
        done = run_unread(words.split())
        assert (done.returncode, done.stderr) == (141, "")

    def test_of_a_commands_own_is_one(self):
        code = """
            import sys
            from nemo_geomask import cli
            from nemo_geomask.cli import schema

            def fails(arguments):
                raise BrokenPipeError("a worker died")

            schema.run = fails
            cli.main(["schema"])
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 1
        assert done.stderr.endswith("BrokenPipeError: a worker died\n")

    @pytest.mark.parametrize("stdout", [None, "closed"])
    def test_of_a_process_without_output(self, stdout, monkeypatch):
        if stdout is not None:
            stdout = io.StringIO()
            monkeypatch.setattr(schema, "run", lambda arguments: stdout.close() or 0)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["schema"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_read_by_a_function_that_shows_its_own_name(command):
    """argparse names the function where it raises ValueError; what users read must be a type they know."""
    parser = argparse.ArgumentParser()
    importlib.import_module(MODULES[command]).add_arguments(parser)
    for action in parser._actions:
        if action.type not in (None, str, int, float, Path):
            for text in ("abc", "", "1e"):
                with pytest.raises(argparse.ArgumentTypeError):
                    action.type(text)


def test_without_a_command_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    listed = capsys.readouterr().err
    assert all(command in listed for command in COMMANDS)
