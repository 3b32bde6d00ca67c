"""Reader of files with settings: YAML, JSON, TOML, Python, a notebook, a shell script or command line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import current_limits, limit_error, parse_text, read_text
from nemo_geomask.tools.translate.python_reader import constructions
from nemo_geomask.tools.translate.setting_values import check_code, flat, parse_yaml
from nemo_geomask.tools.translate.shell_reader import ProgramRun, program_runs


def code_of_notebook(text: str, source: object) -> str:
    """Return the Python code of a notebook, without its magics and shell commands; ``source`` names it in errors.

    Raises:
        ConfigError: the text is not a notebook, or exceeds a limit of input.
    """
    notebook = parse_text(json.loads, text, source, format_name="JSON")
    try:
        cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells).splitlines()
    except (KeyError, TypeError):
        raise ConfigError(f"{source}: is not a notebook: it has no list of cells with their source") from None
    return "\n".join("pass" if line.startswith(("%", "!")) else line for line in lines)


def read_runs(path: Path, constructors: tuple[str, ...]) -> list[ProgramRun]:
    """Return the settings in a file, one entry for each program or class that the file gives settings to.

    Args:
        path: the file. ``.yaml``, ``.yml``, ``.json`` and ``.toml`` are read in their formats, as settings of a program
            without a name. In a ``.py`` file or a notebook the settings are the keyword arguments of calls of
            ``constructors`` or, without such a call, the items of dicts. Any other file is read as a shell script.
        constructors: names of configuration classes.

    Returns:
        Settings by dotted name; a value that the file does not contain has
        :data:`~nemo_geomask.tools.translate.setting_values.UNRESOLVED` in it.

    Raises:
        ConfigError: the file can't be read, or contains no settings by name.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: can't be read: it is not text in UTF-8 ({error})") from None
    try:
        match path.suffix:
            case ".yaml" | ".yml" | ".json":
                runs = [_of_mapping(path, parse_yaml(text, path))]
            case ".toml":
                runs = [_of_mapping(path, _parse_toml(text, path))]
            case ".py":
                runs = constructions(check_code(text, path), constructors, path)
            case ".ipynb":
                runs = constructions(check_code(code_of_notebook(text, path), path), constructors, path)
            case _:
                runs = program_runs(text, path.parent, path)
        return [replace(run, settings=flat(run.settings, path)) for run in runs]
    except ConfigError:
        raise
    except (RecursionError, MemoryError):  # Python's parser raises the second for code that is nested too deeply
        raise limit_error("nesting", path) from None
    except (ValueError, SyntaxError) as error:
        if "integer string conversion" in str(error):
            raise ConfigError(f"{path}: an integer has more than 4,300 digits, which Python does not read") from None
        raise ConfigError(f"{path}: can't be read: {' '.join(str(error).split())}") from None


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """Return all settings in a file, by dotted name, whatever program they belong to."""
    return {name: value for run in read_runs(path, constructors) for name, value in run.settings.items()}


def _parse_toml(text: str, path: Path) -> Any:
    """Return a TOML document. Keys of very many parts, whose time is quadratic in tomllib, are refused before."""
    key = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
    if re.search(rf"(?<![\w-]){key}(?:\s*+\.\s*+{key}){{{current_limits().nesting}}}", text):
        raise limit_error("nesting", path)
    return parse_text(tomllib.loads, text, path, format_name="TOML")


def _of_mapping(path: Path, settings: Any) -> ProgramRun:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: must hold settings by name, but it holds a {type(settings).__name__}")
    return ProgramRun("", dict(settings))
