"""Entry-point groups: objects that other distributions provide, selected by name in a recipe.

Only the selected entry is imported. A name that two distributions claim, an import that fails and an object of the
wrong type are errors that name the distribution.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import PluginError, Problem
from nemo_geomask.plugin_imports import NOT_IMPORTED, import_plugin_module, may_import

_DISTRIBUTION = "nemo-geomask"
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered name: the ``module:attribute`` it points to, and the distribution that registered it."""

    name: str
    value: str
    distribution: str


@functools.lru_cache
def registered_entries(group: str, path: tuple[str, ...]) -> tuple[Entry, ...]:
    """Return the group's entries; cached by ``sys.path`` too, as reading the metadata there takes milliseconds."""
    return tuple(
        Entry(point.name, point.value, "unknown distribution" if point.dist is None else point.dist.name)
        for point in entry_points(group=group)
    )


@dataclass(frozen=True, eq=False)  # hashable by identity, as pydantic needs of an annotation
class PluginGroup(Generic[T]):
    """One entry-point group, whose objects are of type T.

    ``Annotated[str, group]`` is the type of a setting that names one of them, or any ``module:attribute``.

    Attributes:
        group: the entry-point group's name.
        noun: what messages call one of the group's objects, such as ``loss``.
        key: the setting that selects an object.
        requirement: what an object must be, for messages.
        accepts: returns True for an object that meets the requirement.
        built_in: the package's own entries as ``module:attribute`` by name. They are listed here as well as in the
            distribution's metadata, so that they are found when the package is on PYTHONPATH without being installed,
            as in a Ray worker.
        aliases: other names that people use, in lower case, each with the entry to suggest for it.
    """

    group: str
    noun: str
    key: str
    requirement: str
    accepts: Callable[[Any], bool]
    built_in: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def available(self) -> dict[str, tuple[Entry, ...]]:
        """Return every registered name with all distributions that claim it; nothing is imported.

        Returns: names in alphabetical order; more than one entry under a name is a conflict, raised by :meth:`load`.
        """
        entries: dict[str, dict[tuple[str, str], Entry]] = {
            name: {(value, _DISTRIBUTION): Entry(name, value, _DISTRIBUTION)} for name, value in self.built_in.items()
        }
        for entry in registered_entries(self.group, tuple(sys.path)):
            if entry.distribution == _DISTRIBUTION and entry.name in self.built_in:
                continue  # the table above is the checkout's; the metadata of an editable install may be older
            # A distribution that is found twice on sys.path (an editable install beside its checkout) is one claim.
            entries.setdefault(entry.name, {})[entry.value, entry.distribution] = entry
        return {name: tuple(entries[name].values()) for name in sorted(entries)}

    def names(self) -> list[str]:
        """Return all registered names, this package's first."""
        return list(dict.fromkeys((*self.built_in, *self.available())))

    def is_built_in(self, name: str) -> bool:
        """Return True if the name is this package's own and no other distribution claims it."""
        return name in self.built_in and len(self.available()[name]) == 1

    def load_plugin(self, name: str | None) -> T | None:
        """Return another distribution's object; None if ``name`` is None or one of this package's own.

        Raises: PluginError: see :meth:`load`.
        """
        return None if name is None or self.is_built_in(name) else self.load(name)

    def load(self, name: str) -> T:
        """Return the object registered under ``name``, or found at ``module:attribute``.

        Raises: PluginError: for an unknown name (with the nearest registered one), a name claimed twice, a failing
        import, a missing attribute or an object that doesn't meet the requirement.
        """
        if ":" in name:
            return self._import(Entry(name, name, "given as module:attribute"))
        entries = self.available()
        if name not in entries:
            guess = self.aliases.get(name.casefold()) or nearest(name, entries)
            hint = f"did you mean '{guess}'?" if guess else f"registered: {', '.join(entries)}"
            raise self._error(
                f"no {self.noun} named '{name}' in entry-point group '{self.group}'; {hint} (or name a "
                f"{self.noun} of your own as module:attribute)"
            )
        claims = entries[name]
        if len(claims) > 1:
            listed = " and ".join(f"{entry.distribution} ({entry.value})" for entry in claims)
            raise self._error(
                f"'{name}' is registered in group '{self.group}' by {listed}; uninstall one of them, or name the "
                f"one you want as module:attribute, such as '{claims[-1].value}'"
            )
        return self._import(claims[0])

    def _import(self, entry: Entry) -> T:
        entry_label = f"'{entry.name}' ({entry.distribution}, {entry.value})"
        module, _, attribute = entry.value.partition(":")
        if not may_import(module):
            raise self._error(f"'{entry.name}' {NOT_IMPORTED}")
        try:
            plugin: T = operator.attrgetter(attribute)(import_plugin_module(module))
            is_accepted = self.accepts(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well: a plugin must not end a command, and with status 0
            text = " ".join(str(error).split())
            raise self._error(f"{entry_label} could not be imported: {type(error).__name__}: {text}") from error
        if not is_accepted:
            cls = plugin if isinstance(plugin, type) else type(plugin)
            raise self._error(f"{entry_label} is a {cls.__module__}.{cls.__qualname__}; it must be {self.requirement}")
        return plugin

    def _error(self, message: str) -> PluginError:
        return PluginError(Problem((self.key,), message))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate a text as the name of one of the objects."""
        return core_schema.no_info_after_validator_function(self._validate_name, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Allow this package's names, and any text with a colon."""
        return {"if": {"type": "string", "pattern": ":"}, "else": {"enum": list(self.built_in)}}

    def _validate_name(self, name: str) -> str:
        try:
            self.load_plugin(name)
        except PluginError as error:
            names = self.names()
            text = "; ".join(problem.message for problem in error.problems)
            if ":" not in name and name not in names:
                text = f"Input should be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
            guess = nearest(name, names)
            raise PydanticCustomError(
                "named", "{text}", {"text": text, "hint": f"did you mean '{guess}'?" if guess else ""}
            ) from error
        return name
