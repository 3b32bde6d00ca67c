"""Where each setting of a recipe was written: file and line, through inheritance and overrides."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Origin", "Origins"]


@dataclass(frozen=True)
class Origin:
    """A place in a file, or an override on the command line.

    Attributes:
        where: the file's path, or the override as it was typed.
        line: counted from 1; None for an override.
    """

    where: str
    line: int | None = None

    def __str__(self) -> str:
        return f"override '{self.where}'" if self.line is None else f"{self.file}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file as a user would type it; None for an override."""
        if self.line is None:
            return None
        try:
            return str(Path(self.where).relative_to(os.getcwd()))
        except ValueError:
            return self.where


@dataclass(frozen=True)
class _Place:
    origin: Origin
    mapping: bool
    override: bool = False


@dataclass(frozen=True)
class Origins:
    """Origins by dotted key, such as ``loss_fn.masks[0].min``."""

    entries: Mapping[str, _Place] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path, text: str) -> Origins:
        """Those of one YAML file, whose text is known to be valid."""
        import yaml  # Comes with omegaconf.

        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return cls(dict(_walk(root, "", str(path))) if root is not None else {})

    def over(self, parent: Origins) -> Origins:
        """As recipes inherit: mappings merge, everything else replaces, and so does ``_override_`` at the top."""
        replaced = {key for key, entry in self.entries.items() if entry.override or not entry.mapping}
        kept = {key: entry for key, entry in parent.entries.items() if not any(up in replaced for up in _upwards(key))}
        return Origins({**kept, **self.entries})

    def override(self, key: str, value: Any, origin: Origin) -> Origins:
        """With ``value`` set or merged at ``key``; a deleted key counts as None, so that its absence has an origin."""
        return Origins(dict(_settings(key, value, origin))).over(self)

    def at(self, key: str) -> Origin | None:
        """Origin of ``key``, or of the nearest section around it that is written anywhere."""
        entry = next((self.entries[up] for up in _upwards(key) if up in self.entries), None)
        return entry.origin if entry else None


def _settings(key: str, value: Any, origin: Origin) -> Iterator[tuple[str, _Place]]:
    mapping = isinstance(value, Mapping)
    yield key, _Place(origin, mapping)
    if mapping:
        for name, inner in value.items():
            yield from _settings(f"{key}.{name}", inner, origin)


def _walk(node: Any, key: str, path: str) -> Iterator[tuple[str, _Place]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.tag == "tag:yaml.org,2002:merge":  # <<: *anchor
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _walk(merged, key, path)
                continue
            child = f"{key}.{name.value}" if key else str(name.value)
            mapping = isinstance(value, yaml.MappingNode)
            override = mapping and not key and _is_override(value)
            yield child, _Place(Origin(path, name.start_mark.line + 1), mapping, override)
            yield from _walk(value, child, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = f"{key}[{index}]"
            yield child, _Place(Origin(path, item.start_mark.line + 1), isinstance(item, yaml.MappingNode))
            yield from _walk(item, child, path)


def _is_override(node: Any) -> bool:
    return any(name.value == "_override_" and value.value.lower() == "true" for name, value in node.value)


def _upwards(key: str) -> Iterator[str]:
    """``a.b[0].c``, ``a.b[0]``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
