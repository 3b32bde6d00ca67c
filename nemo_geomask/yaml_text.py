"""Values as a recipe writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Texts that YAML 1.1 reads as something else unless they are quoted.
_WORDS_TO_QUOTE = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan")


def as_yaml(value: Any) -> str:
    """Return a scalar as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def inline_yaml(value: Any) -> str:
    """Return any value as one line of a recipe; texts that YAML would read as anything else are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{inline_yaml(key)}: {inline_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(inline_yaml, value)) + "]"
    if isinstance(value, float):
        digits, e, exponent = repr(value).partition("e")
        # YAML 1.1 reads a number with an exponent as text unless it has a dot.
        return digits + (".0" if e and "." not in digits else "") + e + exponent
    if isinstance(value, str) and (value.lower() in _WORDS_TO_QUOTE or not re.fullmatch(r"[A-Za-z_][\w-]*", value)):
        return json.dumps(value, ensure_ascii=False)
    return as_yaml(value)


def advice(fix: Mapping[str, Any]) -> str:
    """Return settings that are a way out as words: ``set key: value and key: value``."""
    return "set " + " and ".join(f"{key.rpartition('.')[2]}: {inline_yaml(value)}" for key, value in fix.items())
