"""A setting that a rehearsal changes, and its form on NeMo-RL's command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_geomask.config.strict import as_yaml

__all__ = ["Change", "as_override"]


@dataclass(frozen=True)
class Change:
    """Change of one setting.

    Attributes:
        key: dotted key.
        value: the new value; None is written as null.
        was: the recipe's value; None if it has none.
        why: reason in a few words; empty if the change follows from the tiny model, the prompts or the folders.
        pinned: write the value even if it stays the same: the recipe interpolates another key, which may change.
        delete: delete the key first, for a mapping that must not be merged.
    """

    key: str
    value: Any
    was: Any = None
    why: str = ""
    delete: bool = False
    pinned: bool = False

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for NeMo-RL's command line."""
        return (*([f"~{self.key}"] if self.delete else []), f"++{self.key}={as_override(self.value)}")


def as_override(value: Any) -> str:
    """Return a value as Hydra's override grammar writes it."""
    if value is None or isinstance(value, int | float):
        return as_yaml(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
