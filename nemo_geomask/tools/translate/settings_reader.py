"""Reader of settings as other systems write them: YAML, JSON, TOML, a Python call, a command line."""

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

__all__ = ["UNRESOLVED", "flat", "nested", "parse_words", "read_settings"]

UNRESOLVED = "$"
"""Mark in a value that the file does not contain: a shell or configuration variable, or a Python expression."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])([^${}]*))?\}|\$(\w+)")
_SUBSTITUTION_DEPTH = 3
"""Number of nested defaults that are resolved, as in ``${A:-${B:-1}}``."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings in a file, by dotted name.

    Args:
        path: the file. ``.yaml``, ``.yml``, ``.json`` and ``.toml`` are read in their formats. In a ``.py`` file the
            settings are the keyword arguments of calls of ``constructors`` or, without such a call, the items of dicts.
            Any other file is read as a shell script, see :func:`parse_words`.
        constructors: names of classes.

    Returns:
        The settings; a value that the file does not contain has :data:`UNRESOLVED` in it.

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
                settings = _parse_yaml(text)
            case ".toml":
                settings = tomllib.loads(text)
            case ".py":
                settings = dict(_settings_in_code(ast.parse(text), constructors))
            case _:
                settings = dict(parse_words(shlex.split(text.replace("\\\n", " "), comments=True)))
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: must hold settings by name, but it holds a {type(settings).__name__}")
    return flat(settings)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names."""
    by_name: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            by_name |= {f"{key}.{name}": inner for name, inner in flat(value).items()}
        else:
            by_name[str(key)] = value
    return by_name


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with dotted names as nested mappings."""
    root: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = root
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return root


def _parse_yaml(text: str) -> Any:
    yaml = require("yaml", "reading YAML needs", "recipes")
    try:
        return _convert_numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _convert_numbers(value: Any) -> Any:
    """Return the value with text such as 3e-4 converted to numbers, as OmegaConf does; YAML 1.1 reads it as text."""
    if isinstance(value, dict):
        return {key: _convert_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _settings_in_code(tree: ast.AST, constructors: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    nodes = list(ast.walk(tree))
    calls = [(node, ast.unparse(node.func).split(".")) for node in nodes if isinstance(node, ast.Call)]
    constructions = [(node, names) for node, names in calls if set(names) & {*constructors}]
    if not constructions:  # if there is such a call, dicts in the file hold something else
        entries = (entry for node in nodes for entry in _dict_entries(node) or ())
        # A dict that is the value of an entry is skipped here: ast.walk visits it, too.
        yield from ((name, _literal(value)) for name, value in entries if _dict_entries(value) is None)
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    for node, names in constructions:
        if names[-1] not in constructors:  # a factory method, such as Config.decoupled_seq_is(…)
            yield "preset", names[-1]
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield keyword.arg, _literal(keyword.value)
                continue
            spread = ast.unparse(keyword.value)
            mapping = _literal(assigned.get(spread, keyword.value))
            if not isinstance(mapping, dict):
                raise ValueError(f"**{spread} is not a literal dict; write its settings in place of it")
            yield from mapping.items()


def _dict_entries(node: ast.AST) -> list[tuple[str, ast.expr]] | None:
    """Return the entries of a dict display or a ``dict(…)`` call; None for anything else."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        return [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
    return None


def _literal(value: ast.expr) -> Any:
    entries = _dict_entries(value)
    if entries is not None:
        return {name: _literal(inner) for name, inner in entries}
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNRESOLVED + ast.unparse(value)


def parse_words(line: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings among the words of a command line or a shell script.

    These forms are read: ``--a-name value``, ``--a-name 0.2 0.3`` (a list), ``--a-switch``, ``--no-a-switch`` and
    ``a.name=value``. ``$name`` and ``${name:-default}`` are replaced if an earlier word assigns the variable.
    """
    line, variables = list(line), dict[str, str]()
    for index, word in enumerate(line):
        for _ in range(_SUBSTITUTION_DEPTH):
            word = _VARIABLE.sub(lambda match: _substitute(match, variables), word)
        line[index] = word
        if assignment := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            variables[assignment[1]] = assignment[2]
    for index, word in enumerate(line):
        name, equals, value = word.lstrip("+-").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and not equals:
            values = list(itertools.takewhile(_is_value, line[index + 1 :]))
            numbers = list(itertools.takewhile(_NUMBER.fullmatch, values))
            if len(numbers) > 1:
                yield name, [float(number) for number in numbers]
            elif values:
                yield name, _parse_word(values[0])
            else:
                yield name.removeprefix("no_"), not name.startswith("no_")
        elif equals and name.replace(".", "").replace("_", "").replace("/", "").isalnum():
            yield name, _parse_word(value)


def _substitute(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return the value of a shell variable, or the reference itself if no word assigns the variable."""
    braced, operator, default, plain = match.groups()
    if operator == "=":
        variables.setdefault(braced, default)
    return variables.get(braced or plain, match[0] if default is None else default)


def _is_value(word: str) -> bool:
    """Return True unless the word is an option, or the end or an expansion of a shell array."""
    if word == ")" or word.endswith(("[@]}", "[*]}")):
        return False
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


def _parse_word(text: str) -> Any:
    """Return the text read as YAML, or the text itself if it is not valid YAML."""
    try:
        return _parse_yaml(text)
    except ValueError:
        return text
