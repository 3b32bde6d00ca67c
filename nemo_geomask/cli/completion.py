"""``nemo-geomask completion``: a script that lets a shell complete commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from nemo_geomask.optional import require

EXIT_STATUS = {0: "the script is printed", 2: "shtab is not installed, or the shell is not one of these"}

_EPILOG = """\
examples
  nemo-geomask completion bash > ~/.local/share/bash-completion/completions/nemo-geomask
  nemo-geomask completion zsh > ~/.zsh/completions/_nemo-geomask
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = "Print the completion script of a shell. It is written once and works without this package."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    shtab = require("shtab", "completion needs", "completion")
    parser: argparse.ArgumentParser = arguments.parser_of_all()
    _complete_files(shtab, parser)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _complete_files(shtab: Any, parser: argparse.ArgumentParser) -> None:
    """Let arguments whose placeholder names a folder or a file complete one, in the commands of a parser too."""
    for action in parser._actions:
        placeholder = action.metavar if isinstance(action.metavar, str) else ""
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(shtab, command)
        elif placeholder == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif placeholder == "FILE" or placeholder.endswith((".yaml", ".py")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
