"""``nemo-geomask translate``: another system's settings as a ``loss_fn:`` block, and that as verl's settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError

__all__ = ["add_arguments", "run"]

_EPILOG = """\
exit status
  0  everything is expressed (differences that remain are in the comments)
  1  something isn't: see the lines NOT EXPRESSED
  2  the file can't be read, or its settings are of no system that is known

examples
  nemo-geomask translate ppo_trainer.yaml
  nemo-geomask translate --from slime run.sh mis.yaml --out loss_fn.yaml
  nemo-geomask translate --to verl recipe.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Read settings of another RL system (a YAML, JSON or TOML file, a Python call, a command line) and "
        "write the loss_fn block that does the same, with a comment for each bound that had to be converted and for "
        "whatever remains different."
    )
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="settings; a later file's win")
    parser.add_argument(
        "--from", dest="peer", metavar="SYSTEM", help="whose settings (default: found out by the names)"
    )
    parser.add_argument(
        "--to", choices=["verl"], help="the other way: FILE is a recipe, whose loss_fn is written as theirs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.recipe import read_recipe
    from nemo_geomask.tools.translate import to_verl, translate_files

    translation: Any
    if arguments.to is None:
        translation = translate_files(arguments.files, arguments.peer)
    else:
        if len(arguments.files) > 1 or arguments.peer is not None:
            raise ConfigError("--to takes one recipe, and no --from")
        block = read_recipe(arguments.files[0], leave=("data", "env", "logger")).data.get("loss_fn")
        if not isinstance(block, dict):
            raise ConfigError(f"{arguments.files[0]}: has no loss_fn block to translate")
        translation = to_verl(block)
    if arguments.out is None:
        print(translation.yaml(), end="")
    else:
        try:
            arguments.out.write_text(translation.yaml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{arguments.out}: can't be written: {error.strerror or error}") from None
    return 1 if translation.not_expressed else 0
