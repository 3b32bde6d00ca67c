"""``nemo-geomask translate``: another system's settings as a ``loss_fn:`` block."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_geomask.errors import ConfigError

EXIT_STATUS = {
    0: "every setting is expressed; comments name differences in detail that remain",
    1: "some settings can't be expressed, or are not known; each has a line NOT EXPRESSED",
    2: "the file can't be read, has no setting of a loss, or its settings belong to no known system, or to several",
}

_EPILOG = """\
examples
  nemo-geomask translate ppo_trainer.yaml
  nemo-geomask translate --from slime run.sh mis.yaml --out loss_fn.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Read the loss settings of another RL system (a YAML, JSON or TOML file, a Python call, a command line) and "
        "write the loss_fn block with the same effect. Comments name each bound that had to be converted and each "
        "difference that remains."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="settings; if files set the same key, the last wins"
    )
    parser.add_argument(
        "--from",
        dest="peer",
        metavar="SYSTEM",
        help="system that the settings belong to (default: recognised by their names)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.tools.shared.terminal_text import EscapingStream
    from nemo_geomask.tools.translate import translate_files

    translation = translate_files(arguments.files, arguments.peer)
    if arguments.out is None:
        print(translation.yaml(), end="")
    else:
        try:
            # Control characters are escaped as on standard output: a file is printed, too.
            if arguments.out.is_symlink():
                raise ConfigError(f"--out {arguments.out} is a link; name the file that it leads to")
            with arguments.out.open("w", encoding="utf-8") as file:
                EscapingStream(file).write(translation.yaml())
        except OSError as error:
            raise ConfigError(f"{arguments.out}: can't be written: {error.strerror or error}") from None
    return 1 if translation.not_expressed else 0
