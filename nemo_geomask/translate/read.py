"""Settings as other systems write them: YAML, JSON, TOML, a Python call, a command line."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require

__all__ = ["UNKNOWN", "flat", "nested", "read_settings", "words"]

UNKNOWN = "$"
"""In a value that is not known here: a variable of a shell or a configuration, an expression of Python."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])([^${}]*))?\}|\$(\w+)")
_NESTED = 3
"""How deep a variable's default may hold another, ``${A:-${B:-1}}``."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """The settings in a file, by dotted name.

    Args:
        path: ``.yaml``, ``.yml``, ``.json`` and ``.toml`` by their formats; ``.py``: the keyword arguments of calls of
            one of ``constructors`` or, where there is none, the items of dicts; any other: see :func:`words`.
        constructors: names of classes.

    Returns: the settings; a value that the file does not tell has :data:`UNKNOWN` in it.
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
    yaml = require("yaml", "reading YAML needs", "recipes")
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _numbers(value: Any) -> Any:
    """With 3e-4, which is text to YAML 1.1, as the number that OmegaConf and command lines take it for."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _calls(tree: ast.AST, constructors: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    nodes = list(ast.walk(tree))
    calls = [(node, ast.unparse(node.func).split(".")) for node in nodes if isinstance(node, ast.Call)]
    made = [(node, names) for node, names in calls if set(names) & {*constructors}]
    if not made:  # else other dicts of the file are somebody else's
        inner = (item for node in nodes for item in _items(node) or ())
        yield from ((name, _literal(value)) for name, value in inner if _items(value) is None)  # a dict comes by itself
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    for node, names in made:
        if names[-1] not in constructors:  # a factory method, Config.preset(…)
            yield "preset", names[-1]
        for word in node.keywords:
            if word.arg is not None:
                yield word.arg, _literal(word.value)
                continue
            spread = ast.unparse(word.value)
            found = _literal(assigned.get(spread, word.value))
            if not isinstance(found, dict):
                raise ValueError(f"**{spread} is no literal; write its settings out")
            yield from found.items()


def _items(node: ast.AST) -> list[tuple[str, ast.expr]] | None:
    """Those of a dict, in either notation; of anything else None."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        return [(word.arg, word.value) for word in node.keywords if word.arg is not None]
    return None


def _literal(value: ast.expr) -> Any:
    items = _items(value)
    if items is not None:
        return {name: _literal(inner) for name, inner in items}
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNKNOWN + ast.unparse(value)


def words(line: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Settings among the words of a command line or a shell script.

    ``--a-name value``, ``--a-name 0.2 0.3`` (a list), ``--a-switch``, ``--no-a-switch`` and ``a.name=value``, with the
    variables that were assigned before, ``$name`` and ``${name:-default}``, in place.
    """
    line, variables = list(line), dict[str, str]()
    for index, word in enumerate(line):
        for _ in range(_NESTED):
            word = _VARIABLE.sub(lambda found: _of_variable(found, variables), word)
        line[index] = word
        if assigned := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            variables[assigned[1]] = assigned[2]
    for index, word in enumerate(line):
        name, equals, value = word.lstrip("+-").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and not equals:
            values = list(itertools.takewhile(_is_value, line[index + 1 :]))
            numbers = list(itertools.takewhile(_NUMBER.fullmatch, values))
            if len(numbers) > 1:
                yield name, [float(number) for number in numbers]
            elif values:
                yield name, _of_word(values[0])
            else:
                yield name.removeprefix("no_"), not name.startswith("no_")
        elif equals and name.replace(".", "").replace("_", "").replace("/", "").isalnum():
            yield name, _of_word(value)


def _of_variable(found: re.Match[str], variables: dict[str, str]) -> str:
    braced, kind, default, plain = found.groups()
    if kind == "=":
        variables.setdefault(braced, default)
    return variables.get(braced or plain, found[0] if default is None else default)


def _is_value(word: str) -> bool:
    """Whether it may be an option's: no option, nor the end of a shell's array or another that stands there."""
    if word == ")" or word.endswith(("[@]}", "[*]}")):
        return False
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


def _of_word(text: str) -> Any:
    """As YAML, or the text where it is none: something else's, then."""
    try:
        return _yaml(text)
    except ValueError:
        return text
