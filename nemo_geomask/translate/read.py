"""Settings as other systems write them: YAML, JSON, TOML, a Python call, a command line."""

from __future__ import annotations

import ast
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, MissingDependencyError

__all__ = ["flat", "nested", "read_settings", "words"]


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """The settings in a file, by dotted name.

    Args:
        path: ``.yaml``, ``.yml``, ``.json`` and ``.toml`` by their formats; ``.py``: the keyword arguments of a call of
            one of ``constructors`` or the items of a dict, as far as they are literals; any other: words of a command
            line, ``--a-name value`` and ``a.name=value``.
        constructors: names of classes.

    Raises: ConfigError: it can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    try:
        match path.suffix:
            case ".yaml" | ".yml" | ".json":
                found = _yaml(text)
            case ".toml":
                found = tomllib.loads(text)
            case ".py":
                found = dict(_calls(ast.parse(text), constructors))
            case _:
                found = dict(words(shlex.split(text.replace("\\\n", " "), comments=True)))
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: must hold settings by name, but it holds a {type(found).__name__}")
    return flat(found)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one of dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{below}": item for below, item in flat(value).items()}
        else:
            found[str(key)] = value
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as mappings in mappings."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        inner = found
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def _yaml(text: str) -> Any:
    try:
        import yaml  # Comes with omegaconf.
    except ImportError:
        raise MissingDependencyError("reading YAML needs pyyaml; pip install 'nemo-geomask[recipes]'") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _calls(tree: ast.AST, constructors: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        items: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            names = ast.unparse(node.func).split(".")
            if not set(names) & {*constructors, "dict"}:
                continue
            if names[-1] not in (*constructors, "dict"):  # a factory method, Config.preset(…)
                yield "preset", names[-1]
            items = [(word.arg, word.value) for word in node.keywords if word.arg is not None]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            items = [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
        for name, value in items:
            try:
                yield name, ast.literal_eval(value)
            except ValueError:
                if not isinstance(value, ast.Dict | ast.Call):
                    raise ValueError(f"{name}={ast.unparse(value)} is no literal; write its value out") from None


def words(line: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Settings among the words of a command line: ``--a-name value``, ``--a-switch`` and ``a.name=value``."""
    for word, following in zip(line, [*line[1:], "--"], strict=False):
        name, equals, value = word.lstrip("+-").partition("=")
        if word.startswith("--") and not equals:
            flag = following.startswith("-") and not following[1:2].isdigit()
            yield name.replace("-", "_"), True if flag else _yaml(following)
        elif equals and name.replace(".", "").replace("_", "").replace("-", "").replace("/", "").isalnum():
            yield name.replace("-", "_"), _yaml(value)
