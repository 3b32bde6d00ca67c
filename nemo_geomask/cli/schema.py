"""``nemo-geomask schema``: the JSON Schema of a recipe, for editors."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nemo_geomask.config.presets import PRESET_GROUP
from nemo_geomask.errors import ConfigError
from nemo_geomask.objectives.registry import LOSSES
from nemo_geomask.recipe.json_schema import recipe_schema
from nemo_geomask.tools.shared.json_output import JSON_VERSION

EXIT_STATUS = {
    0: "the schema is written",
    2: "it can't be written, or a plugin can't be loaded",
}

_EPILOG = """\
In an editor with the YAML language server (VS Code, Neovim, …), write at the top of a recipe
  # yaml-language-server: $schema=recipe.schema.json
"""


JSON_FORMATS = {
    "check": "nemo_geomask.tools.check.check_json:CheckOutput",
    "diagnose": "nemo_geomask.tools.diagnose.report.json_formats:DiagnoseOutput",
    "rehearse": "nemo_geomask.tools.rehearse.json_format:RehearsalJson",
    "sweep": "nemo_geomask.tools.diagnose.report.json_formats:SweepJson",
}
"""Module and name of the type of each command's JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Write the JSON Schema of a NeMo-RL recipe, which describes loss_fn strictly and allows anything elsewhere; or "
        "that of the JSON which a command writes."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument(
        "--of",
        dest="command_name",
        choices=tuple(JSON_FORMATS),
        help="write the schema of this command's JSON instead",
    )
    parser.add_argument(
        "--installed", action="store_true", help="include the objectives and mask presets of installed plugins"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.command_name is None:
        text = render(installed=arguments.installed)
    else:
        text = json.dumps(json_schema(arguments.command_name), ensure_ascii=False, indent=2) + "\n"
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{arguments.out}: the schema can't be written: {error.strerror or error}") from None
    return 0


def render(*, installed: bool = False) -> str:
    """Return the schema as JSON text.

    Args:
        installed: include the objectives and mask presets of installed plugins. Without them the text is the same on
            every machine; it allows any name for an objective, and ``module:attribute`` for a preset.
    """
    names = [
        name for name, entries in LOSSES.available().items() if installed or entries[0].distribution == "nemo-geomask"
    ]
    presets = {
        name: PRESET_GROUP.load(name)
        for name in PRESET_GROUP.available()
        if installed and not PRESET_GROUP.is_built_in(name)
    }
    schema = recipe_schema({name: LOSSES.load(name).options for name in names}, presets)
    return json.dumps(schema, ensure_ascii=False, indent=2) + "\n"


def json_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's JSON, in which no object has other keys than those of its type."""
    module, _, name = JSON_FORMATS[command].partition(":")
    schema = TypeAdapter(getattr(importlib.import_module(module), name)).json_schema()
    for definition in (schema, *schema.get("$defs", {}).values()):
        if "properties" in definition:
            definition["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"nemo-geomask {command}, version {JSON_VERSION}",
        **{key: value for key, value in schema.items() if key != "title"},
    }
