"""Reader of files with settings: YAML, JSON, TOML, Python, a notebook, a shell script or command line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate.python_reader import code_of_notebook, constructions
from nemo_geomask.tools.translate.setting_values import flat, parse_yaml
from nemo_geomask.tools.translate.shell_reader import ProgramRun, program_runs

__all__ = ["read_runs", "read_settings"]


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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    try:
        match path.suffix:
            case ".yaml" | ".yml" | ".json":
                runs = [_of_mapping(path, parse_yaml(text))]
            case ".toml":
                runs = [_of_mapping(path, tomllib.loads(text))]
            case ".py":
                runs = constructions(text, constructors)
            case ".ipynb":
                runs = constructions(code_of_notebook(text), constructors)
            case _:
                runs = program_runs(text, path.parent)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    return [run.with_settings(flat(run.settings)) for run in runs]


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """Return all settings in a file, by dotted name, whatever program they belong to."""
    return {name: value for run in read_runs(path, constructors) for name, value in run.settings.items()}


def _of_mapping(path: Path, settings: Any) -> ProgramRun:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: must hold settings by name, but it holds a {type(settings).__name__}")
    return ProgramRun("", dict(settings))
