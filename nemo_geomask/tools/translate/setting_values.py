"""Values of settings: nested and dotted names, text read as YAML, and values that a file does not contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_geomask.optional import require

__all__ = ["NUMBER", "UNRESOLVED", "convert_numbers", "flat", "nested", "parse_value", "parse_yaml"]

UNRESOLVED = "$"
"""Mark in a value that the file does not contain: a shell or configuration variable, or a Python expression."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


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


def parse_yaml(text: str) -> Any:
    """Return the YAML document.

    Raises:
        ValueError: the text is not valid YAML.
    """
    yaml = require("yaml", "reading YAML needs", "recipes")
    try:
        return convert_numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def convert_numbers(value: Any) -> Any:
    """Return the value with text such as 3e-4 converted to numbers, as OmegaConf does; YAML 1.1 reads it as text."""
    if isinstance(value, dict):
        return {key: convert_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def parse_value(text: str) -> Any:
    """Return the text read as YAML, or the text itself if it is not valid YAML."""
    try:
        return parse_yaml(text)
    except ValueError:
        return str(text)
