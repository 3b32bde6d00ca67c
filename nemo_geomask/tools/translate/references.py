"""References between settings: OmegaConf's ``${a.b}`` and ``${oc.select:a.b,default}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from nemo_geomask.tools.translate.setting_values import parse_value

_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.]+)\s*\}")
_SELECTION = re.compile(r"\$\{\s*oc\.select\s*:\s*(\.*[\w.]+)\s*(?:,(.*))?\}", re.DOTALL)
_DEPTH = 10
"""Number of passes over the settings, for references to settings that are references."""
_MISSING = "???"
"""OmegaConf's mark of a value that is still to be set."""


def resolve_references(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], full_name: Callable[[str], str | None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace each value that is a reference, as far as the settings and the system's defaults determine it.

    The default of ``oc.select`` is used if no file and no default of the system has the setting that it names. A
    reference to a section, or to a setting that nothing determines, stays as it is.

    Args:
        settings: settings by dotted name.
        defaults: the system's defaults, by full name; None stands for one that is not known.
        full_name: function that returns the full name of a setting, or None if the system has no such setting.

    Returns:
        The settings, and the values that settings of the loss take from defaults, by the names that the references
        use.
    """
    by_full_name = {full_name(key) or key: key for key in settings}
    assumed: dict[str, Any] = {}

    def resolve(key: str, value: Any) -> Any:
        match = _REFERENCE.fullmatch(value) or _SELECTION.fullmatch(value) if isinstance(value, str) else None
        default = match[2] if match and match.re is _SELECTION else None
        if match is None or not _is_balanced(default or ""):  # "${oc.select:a,1}${b}" is text with two references
            return value
        name = _absolute_name(match[1], key)
        target = name if name in settings else by_full_name.get(full_name(name) or name)
        if target is not None and settings[target] != _MISSING:
            return settings[target]
        if any(other.startswith(f"{name}.") for other in settings):
            return value
        fallback = defaults.get(full_name(name) or name) if "." in name else None
        if fallback is None:
            if default is None:
                return value
            fallback = parse_value(default.strip())
        if full_name(key) in defaults:
            assumed[name] = fallback
        return fallback

    for _ in range(_DEPTH):
        resolved = {key: resolve(key, value) for key, value in settings.items()}
        if resolved == settings:
            break
        settings = resolved
    return dict(settings), assumed


def _absolute_name(name: str, key: str) -> str:
    """Return the name without the leading dots that make it relative: one dot for the section of ``key``."""
    relative = name.lstrip(".")
    levels = len(name) - len(relative)
    return ".".join([*key.split(".")[:-levels], relative]) if levels else name


def _is_balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0
