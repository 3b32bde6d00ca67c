"""Nested settings as one mapping with dotted keys, and the keys at which two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differing_keys(settings: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys at which two flat mappings of settings differ; a missing key is None."""
    return sorted(key for key in settings.keys() | other.keys() if settings.get(key) != other.get(key))


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with dotted keys behind a prefix, without empty sections."""
    return {key: value for key, value in iterate_settings(settings, prefix) if not isinstance(value, Mapping)}


def iterate_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting; that of an empty section is the section."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
