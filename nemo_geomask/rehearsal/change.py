"""One setting that a rehearsal changes, and how it is written on NeMo-RL's command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_geomask.config.strict import as_yaml

__all__ = ["Change", "written"]


@dataclass(frozen=True)
class Change:
    """One setting of the rehearsal's own.

    Attributes:
        key: dotted key.
        value: what it is now; None is written as null.
        was: what the recipe says; None where it says nothing.
        why: in a few words; empty for what follows from the tiny model, prompts and folders.
        pinned: whether it is written even where nothing changes, since the recipe refers to another key, which may.
        delete: whether what is there is taken away first, for a mapping that is not to be merged.
    """

    key: str
    value: Any
    was: Any = None
    why: str = ""
    delete: bool = False
    pinned: bool = False

    @property
    def overrides(self) -> tuple[str, ...]:
        """As NeMo-RL takes them on its command line."""
        return (*([f"~{self.key}"] if self.delete else []), f"++{self.key}={written(self.value)}")


def written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, int | float):
        return as_yaml(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
