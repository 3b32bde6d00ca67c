"""Values of settings: nested and dotted names, text read as YAML, and limits of what a file expands to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Hashable, Mapping
from typing import Any, ClassVar, Literal

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import check_limit, current_limits, limit_error, load_yaml
from nemo_geomask.tools.shared.flat_settings import iterate_settings

UNRESOLVED = "$"
"""Mark in a value that the file does not contain: a shell or configuration variable, or a Python expression."""
NUMBER = re.compile(r"[-+]?(\d++(\.\d*+)?|\.\d++)([eE][-+]?\d++)?")
_SHOWN = 200
_PLAIN_WORD = re.compile(r"[A-Za-z_/][\w./-]*+")
_YAML_WORDS = ("yes", "no", "true", "false", "on", "off", "null")


class ExpansionBudget:
    """Count of what a file expands to, which raises InputLimitError as soon as a limit of input is exceeded.

    Args:
        source: the file, for errors.
    """

    _LIMITS: ClassVar = {
        "characters": ("total_characters", "variables or full names of settings have more than {} characters"),
        "words": ("nodes", "there are more than {} words, each variable replaced"),
        "items": ("nodes", "the values of settings hold more than {} items"),
        "files": ("files", "more than {} files are sourced"),
        "steps": ("total_characters", "there are more than {} steps to follow in the code"),
    }
    """By what is counted: the limit, and the words of its error. Items of YAML are its commas and line breaks."""

    def __init__(self, source: object) -> None:
        self.source = source
        self._counts = Counter[str]()

    def add(self, kind: Literal["characters", "words", "items", "files", "steps"], count: int) -> None:
        """Add to a count."""
        self._counts[kind] += count
        name, excess = self._LIMITS[kind]
        if self._counts[kind] > getattr(current_limits(), name):
            raise limit_error(name, self.source, excess=excess)


def check_code(text: str, source: object) -> str:
    """Return the text of a program or script; raise InputLimitError if it is longer than ``string_characters``."""
    check_limit("string_characters", len(text), source)
    return text


def flat(settings: Mapping[str, Any], source: object = "settings") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names.

    Args:
        settings: the mappings.
        source: name of the file, for errors.

    Raises:
        InputLimitError: the names are too many, too long or too deep.
    """
    by_name: dict[str, Any] = {}
    budget = ExpansionBudget(source)
    for name, value in iterate_settings(settings):
        budget.add("characters", len(name))
        check_limit("nesting", name.count("."), source)
        by_name[name] = value
    return by_name


def is_one_of(value: Any, options: Container[Any]) -> bool:
    """Return True if the value is among the options; one that can't be a key, such as a list, is not."""
    return isinstance(value, Hashable) and value in options


def shortened(value: Any) -> str:
    """Return the value as it is shown in errors: as Python writes it, without the middle of a long one."""
    text = repr(value) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 4 :]}"


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with dotted names as nested mappings.

    Raises:
        ConfigError: a name is that of a value and of a section.
    """
    root: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = root
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {name} is a value elsewhere and can't hold settings; remove one of the two")
        section[last] = value
    return root


def parse_yaml(text: str, source: object) -> Any:
    """Return the YAML document; ``source`` names it in errors.

    Raises:
        ConfigError: the text is not valid YAML, or exceeds a limit of input.
    """
    return convert_numbers(load_yaml(text, source))


def convert_numbers(value: Any) -> Any:
    """Return the value with text such as 3e-4 converted to numbers, as OmegaConf does; YAML 1.1 reads it as text."""
    if isinstance(value, dict):
        return {key: convert_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def parse_value(text: str) -> Any:
    """Return the text read as YAML, or the text itself if it is not valid YAML or exceeds a limit of input."""
    if _PLAIN_WORD.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return str(text)
    try:
        return parse_yaml(str(text), "the value")  # a plain str for the loader in C
    except ConfigError:
        return str(text)
