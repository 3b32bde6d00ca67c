"""Reader of ``unrelated_settings.toml``: the settings of each peer that do not reach its loss."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files

__all__ = ["unrelated_settings"]


def unrelated_settings(peer: str) -> tuple[str, ...]:
    """Return the names and patterns of a peer's settings that do not reach its loss."""
    return tuple(
        f"{section}.{name}" if section else name for section, names in _tables()[peer].items() for name in names.split()
    )


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    text = files("nemo_geomask.tools.translate.peers").joinpath("unrelated_settings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
