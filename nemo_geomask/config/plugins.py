"""What other distributions bring, by name, over entry-point groups.

Only the selected entry is imported. A name that two distributions claim, an import that fails and an object of the
wrong type are errors that say whose they are.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemo_geomask.config.strict import nearest
from nemo_geomask.errors import PluginError, Problem

__all__ = ["Entry", "PluginGroup"]

_SELF = "nemo-geomask"
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A name, where it points and the distribution that registered it."""

    name: str
    value: str
    distribution: str


@functools.lru_cache
def _registered(group: str, find: Callable[..., Iterable[EntryPoint]], path: tuple[str, ...]) -> tuple[Entry, ...]:
    """Those on the path; reading distributions' metadata takes milliseconds."""
    return tuple(
        Entry(point.name, point.value, "unknown distribution" if point.dist is None else point.dist.name)
        for point in find(group=group)
    )


@dataclass(frozen=True, eq=False)  # hashed as an object, as an annotation is
class PluginGroup(Generic[T]):
    """One entry-point group, of objects T. As an annotation, of a text that names one of them or a
    ``module:attribute``.

    Attributes:
        group: its name.
        what: what a name stands for, such as ``loss``.
        key: the setting that names it.
        must_be: what its objects must be, in words.
        fits: whether an object is.
        built_in: the package's own entries, so that they are found when it is on PYTHONPATH without being installed, as
            in a Ray worker.
        known_as: names that people use for an entry.
    """

    group: str
    what: str
    key: str
    must_be: str
    fits: Callable[[Any], bool]
    built_in: Mapping[str, str] = field(default_factory=dict)
    known_as: Mapping[str, str] = field(default_factory=dict)

    def available(self) -> dict[str, tuple[Entry, ...]]:
        """Every registered name with all distributions that claim it; nothing is imported.

        Returns: names in alphabetical order; more than one entry under a name is a conflict, raised by :meth:`load`.
        """
        entries: dict[str, dict[tuple[str, str], Entry]] = {
            name: {(value, _SELF): Entry(name, value, _SELF)} for name, value in self.built_in.items()
        }
        for entry in _registered(self.group, entry_points, tuple(sys.path)):
            # A distribution found twice on sys.path (an editable install beside its checkout) is one claim.
            entries.setdefault(entry.name, {})[entry.value, entry.distribution] = entry
        return {name: tuple(entries[name].values()) for name in sorted(entries)}

    def names(self) -> list[str]:
        """All of them, this package's first."""
        return list(dict.fromkeys((*self.built_in, *self.available())))

    def is_own(self, name: str) -> bool:
        """Whether the name is this package's and nobody else claims it."""
        return name in self.built_in and len(self.available()[name]) == 1

    def find(self, name: str | None) -> T | None:
        """The other distribution's object; None for one of this package's own."""
        return None if name is None or self.is_own(name) else self.load(name)

    def load(self, name: str) -> T:
        """The object registered under ``name``, or found at ``module:attribute``.

        Raises: PluginError: for an unknown name (with the nearest known one), a name claimed twice, a failing import, a
        missing attribute or an object that doesn't fit.
        """
        if ":" in name:
            return self._import(Entry(name, name, "given as module:attribute"))
        entries = self.available()
        if name not in entries:
            guess = self.known_as.get(name.casefold()) or nearest(name, entries)
            hint = f"did you mean '{guess}'?" if guess else f"registered: {', '.join(entries)}"
            raise self._error(
                f"no {self.what} named '{name}' in entry-point group '{self.group}'; {hint} (or name a "
                f"{self.what} of your own as module:attribute)"
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
        whose = f"'{entry.name}' ({entry.distribution}, {entry.value})"
        module, _, attribute = entry.value.partition(":")
        try:
            found: T = operator.attrgetter(attribute)(importlib.import_module(module))
        except Exception as error:
            # A foreign message may have lines; ours are one.
            text = " ".join(str(error).split())
            raise self._error(f"{whose} could not be imported: {type(error).__name__}: {text}") from error
        if not self.fits(found):
            kind = found if isinstance(found, type) else type(found)
            raise self._error(f"{whose} is a {kind.__module__}.{kind.__qualname__}; it must be {self.must_be}")
        return found

    def _error(self, message: str) -> PluginError:
        return PluginError(Problem((self.key,), message))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A text that is one of the names."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """This package's names, and whatever may be a module's attribute."""
        return {"if": {"type": "string", "pattern": ":"}, "else": {"enum": list(self.built_in)}}

    def _known(self, name: str) -> str:
        try:
            self.find(name)
        except PluginError as error:
            known = self.names()
            text = "; ".join(problem.message for problem in error.problems)
            if ":" not in name and name not in known:
                text = f"Input should be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
            guess = nearest(name, known)
            raise PydanticCustomError(
                "named", "{text}", {"text": text, "hint": f"did you mean '{guess}'?" if guess else ""}
            ) from error
        return name
