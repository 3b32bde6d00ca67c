"""What the help and the page of the command line say: exit statuses, 80 columns, options, completion."""

import importlib
import subprocess
import sys

import pytest

from nemo_geomask import cli
from nemo_geomask.cli import create_parser, main
from nemo_geomask.cli.arguments import all_commands
from nemo_geomask.cli.help_format import HelpFormatter, with_exit_status

MODULES = {command.name: importlib.import_module(command.module) for command in cli.COMMANDS}
COMMANDS = list(MODULES)


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_is_at_most_80_columns_wide(command, capsys, monkeypatch):
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = help_of(command, capsys).splitlines()
        # A single word, such as a long argument of an example, is not broken.
        assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_has_every_exit_status(command, capsys):
    exit_status = MODULES[command].EXIT_STATUS
    assert list(exit_status) == sorted(exit_status)
    assert {0, 2} <= set(exit_status)
    text = " ".join(help_of(command, capsys).split())
    for status, meaning in exit_status.items():
        assert f" {status} {meaning}" in text


def test_a_status_that_the_table_lacks_is_a_fault_of_the_command(monkeypatch):
    """Every test of a command thus holds it to its table."""
    monkeypatch.setattr(MODULES["recipes"], "run", lambda arguments: 7)
    with pytest.raises(RuntimeError, match="recipes ended with status 7, which its EXIT_STATUS lacks"):
        main(["recipes"])


def test_paragraphs_rows_and_commands_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "A sentence that was\nwrapped already, elsewhere, and is filled.\n\nheading\n  name  its text, which is long\n"
        "        enough for two lines\n  other  text\n\nexamples\n  nemo-geomask check a_long_recipe.yaml --gpu A100\n"
    )
    assert HelpFormatter("x")._fill_text(text, 39, "").splitlines() == [
        "A sentence that was wrapped already,",
        "elsewhere, and is filled.",
        "",
        "heading",
        "  name  its text, which is long enough",
        "        for two lines",
        "  other  text",
        "",
        "examples",
        "  nemo-geomask check \\",
        "      a_long_recipe.yaml --gpu A100",
    ]


def test_the_statuses_stand_before_the_examples():
    assert with_exit_status("About.\n\nexamples\n  x\n", {0: "good", 2: "bad"}) == (
        "About.\n\nexit status\n  0  good\n  2  bad\n\nexamples\n  x\n"
    )
    assert with_exit_status(None, {0: "good"}) == "exit status\n  0  good\n"


def test_a_mistyped_option_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["schema", "--instaled"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --instaled; did you mean '--installed'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_knows_every_command_and_option(shell, capsys):
    pytest.importorskip("shtab", reason="the extra completion is not installed")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    parsers = all_commands(create_parser())
    for name, parser in parsers.items():
        assert name in script
        for action in parser._actions:
            for option in action.option_strings:
                assert option in script or shell == "tcsh"  # it writes them without dashes


@pytest.mark.slow
def test_bash_completes_a_command(capsys):
    pytest.importorskip("shtab", reason="the extra completion is not installed")
    main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = "\nCOMP_WORDS=(nemo-geomask dia); COMP_CWORD=1; _shtab_nemo_geomask; echo ${COMPREPLY[@]}\n"
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["diagnose"], done.stderr


@pytest.mark.slow
def test_pipes_and_no_color_get_plain_text():
    code = "import sys; from nemo_geomask.cli import main; main(['check', '--list-rules'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100)
    assert b"\x1b" not in done.stdout + done.stderr
