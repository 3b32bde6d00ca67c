"""Origin of each setting of a recipe, its file and line, through inheritance and overrides."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.recipe.input_limits import check_limit


@dataclass(frozen=True)
class Origin:
    """Origin of a setting: a line of a file, or an override on the command line.

    Attributes:
        where: the file's path, or the override as it was typed.
        line: the line, counted from 1; None for an override.
    """

    where: str
    line: int | None = None

    def __str__(self) -> str:
        return f"override '{self.where}'" if self.line is None else f"{self.file}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file, relative to the working directory if it is below; None for an override."""
        if self.line is None:
            return None
        try:
            return str(Path(self.where).relative_to(os.getcwd()))
        except ValueError:
            return self.where


@dataclass(frozen=True)
class _KeyOrigin:
    """Origin of one key, and how its value combines with an inherited one.

    Attributes:
        origin: line or override that set the key.
        is_mapping: True if the key's value is a mapping, which is merged with an inherited one.
        replaces_parent: True if the mapping has ``_override_: true``, so that it replaces an inherited one.
    """

    origin: Origin
    is_mapping: bool
    replaces_parent: bool = False


@dataclass(frozen=True)
class Origins:
    """Origins of settings by dotted key, such as ``loss_fn.masks[0].min``."""

    entries: Mapping[str, _KeyOrigin] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path, text: str) -> Origins:
        """Return the origins of one file's settings.

        Args:
            path: the file.
            text: its content, valid YAML.

        Raises:
            InputLimitError: the full names of the settings are too long, or of too many parts.
        """
        import yaml  # Comes with omegaconf.

        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        entries: dict[str, _KeyOrigin] = {}
        characters = 0
        for key, entry in _file_entries(root, "", str(path)) if root is not None else ():
            characters += len(key)
            check_limit("total_characters", characters, entry.origin)
            # A name with dots counts as sections: their number is squared in what follows.
            check_limit("nesting", (key.count(".") + key.count("[")) // 2, entry.origin)
            entries[key] = entry
        return cls(entries)

    def over(self, parent: Origins) -> Origins:
        """Return the origins of a recipe that inherits from ``parent``.

        Mappings merge; values, lists and top-level mappings with ``_override_: true`` replace what they inherit.
        """
        replaced = {key for key, entry in self.entries.items() if entry.replaces_parent or not entry.is_mapping}
        kept = {key: entry for key, entry in parent.entries.items() if not replaced.intersection(_sections_around(key))}
        return Origins({**kept, **self.entries})

    def override(self, key: str, value: Any, origin: Origin) -> Origins:
        """Return the origins after ``value`` was set or merged at ``key``.

        A deleted key is recorded with the value None, so that its absence has an origin, too.
        """
        return Origins(dict(_override_entries(key, value, origin))).over(self)

    def at(self, key: str) -> Origin | None:
        """Return the origin of ``key``, or else of the innermost section around it that has one."""
        entry = next((self.entries[section] for section in _sections_around(key) if section in self.entries), None)
        return entry.origin if entry else None


def _override_entries(key: str, value: Any, origin: Origin) -> Iterator[tuple[str, _KeyOrigin]]:
    is_mapping = isinstance(value, Mapping)
    yield key, _KeyOrigin(origin, is_mapping)
    if is_mapping:
        for name, inner in value.items():
            yield from _override_entries(f"{key}.{name}", inner, origin)


def _file_entries(node: Any, key: str, path: str) -> Iterator[tuple[str, _KeyOrigin]]:
    """Yield the keys below a node of a YAML file, each with its entry.

    Args:
        node: PyYAML's node.
        key: its dotted key; empty for the root.
        path: the file's path.
    """
    import yaml

    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.tag == "tag:yaml.org,2002:merge":  # <<: *anchor
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _file_entries(merged, key, path)
                continue
            child = f"{key}.{name.value}" if key else str(name.value)
            is_mapping = isinstance(value, yaml.MappingNode)
            replaces_parent = is_mapping and not key and _has_override_mark(value)
            yield child, _KeyOrigin(Origin(path, name.start_mark.line + 1), is_mapping, replaces_parent)
            yield from _file_entries(value, child, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = f"{key}[{index}]"
            yield child, _KeyOrigin(Origin(path, item.start_mark.line + 1), isinstance(item, yaml.MappingNode))
            yield from _file_entries(item, child, path)


def _has_override_mark(node: Any) -> bool:
    return any(name.value == "_override_" and value.value.lower() == "true" for name, value in node.value)


def _sections_around(key: str) -> Iterator[str]:
    """Yield a key and the sections around it: ``a.b[0].c``, ``a.b[0]``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
