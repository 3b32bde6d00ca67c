"""Nested settings as one mapping with dotted keys, and the keys at which two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differing_keys(settings: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys at which two flat mappings of settings differ; a missing key is None."""
    return sorted(key for key in settings.keys() | other.keys() if settings.get(key) != other.get(key))


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
