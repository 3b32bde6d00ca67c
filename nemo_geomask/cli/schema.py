"""``nemo-geomask schema``: the JSON Schema of a recipe, for editors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nemo_geomask.config.presets import PLUGINS
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses.registry import available, load
from nemo_geomask.recipe.schema import recipe_schema

__all__ = ["add", "render", "run"]

_EPILOG = """\
In an editor with the YAML language server (VS Code, Neovim, …), write at the top of a recipe
  # yaml-language-server: $schema=recipe.schema.json
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "schema",
        help="write the JSON Schema of a recipe, for editors",
        description="Write the JSON Schema of a NeMo-RL recipe: loss_fn is checked strictly, everything else is open.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--installed", action="store_true", help="with the objectives and mask presets of plugins here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    text = render(installed=arguments.installed)
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{arguments.out}: the schema can't be written: {error.strerror or error}") from None
    return 0


def render(*, installed: bool = False) -> str:
    """The schema as JSON text, with the objectives that come with the package.

    Args:
        installed: with those and the mask presets of other distributions here, too. Without, the text is the same
            wherever it is written; plugins' objectives are allowed by any name, and presets as ``module:attribute``.
    """
    names = [name for name, entries in available().items() if installed or entries[0].distribution == "nemo-geomask"]
    presets = {name: PLUGINS.load(name) for name in PLUGINS.available() if installed and not PLUGINS.is_own(name)}
    schema = recipe_schema({name: load(name).options for name in names}, presets)
    return json.dumps(schema, ensure_ascii=False, indent=2) + "\n"
