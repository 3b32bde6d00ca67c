"""What a table of another system's settings is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import ConfigError
from nemo_geomask.translate.read import UNKNOWN, nested

__all__ = ["NO_BOUND", "Given", "Line", "Peer", "Remark", "chosen", "corrected", "inert"]

NO_BOUND = 1e30
"""In place of none, where a bound is asked for."""


class Line(NamedTuple):
    """One of our settings; ``note`` says what had to be converted. ``masks`` takes one mask a line."""

    key: str
    value: Any
    note: str = ""


class Remark(NamedTuple):
    """A difference that remains; with ``lost``, the settings of theirs that aren't expressed at all."""

    text: str
    lost: tuple[str, ...] = ()


Lines = Iterator[Line | Remark]


class Given:
    """Another system's settings by their full names, its defaults behind them; remembers which were asked for."""

    def __init__(self, defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._defaults, self._settings = defaults, settings
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        value = self._settings.get(key, self._defaults[key])
        if UNKNOWN in str(value):
            raise ConfigError(f"{key}: '{value}' is not known here; write its value out")
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._settings

    def number(self, key: str) -> float:
        """A setting that must be a number, also one written as text."""
        value = self[key]
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key} must be a number, but it is {value!r}") from None

    def numbers(self, key: str) -> tuple[float, float]:
        """A setting that must be two numbers."""
        value = self[key]
        try:
            low, high = map(float, value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key} must be two numbers, but it is {value!r}") from None
        return low, high


@dataclass(frozen=True)
class Peer:
    """Another system: which settings of its loss there are, and what they are here.

    Attributes:
        name: as ``--from`` takes it.
        title: what its settings are called.
        source: repository and commit at which they were read.
        defaults: every setting that ``convert`` reads, by its full dotted name, with the system's own default.
        convert: from settings to ours.
        elsewhere: settings that NeMo-RL has outside ``loss_fn``, and where.
        sections: parents all of whose settings concern the loss, so that an unknown one is not expressed.
        mappings: of its settings those that are mappings.
        constructors: Python classes whose keyword arguments are settings.
        presets: by name, parameters with defaults and the settings that they fill in (``{parameter}``).
    """

    name: str
    title: str
    source: str
    defaults: Mapping[str, Any]
    convert: Callable[[Given], Lines]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    mappings: tuple[str, ...] = ()
    constructors: tuple[str, ...] = ()
    presets: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)

    def named(self, key: str) -> str | None:
        """The full name of a setting that is given by it, by its end, or with something before it."""
        key = key.replace("/", ".")
        for known in (*self.defaults, *self.elsewhere):
            if f".{known}".endswith(f".{key}") or f".{key}".endswith(f".{known}"):
                return known
        return None

    def whole(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings by dotted name, with those that are mappings in one piece."""
        found: dict[str, Any] = {}
        for key, value in settings.items():
            parts = key.split(".")
            above = (".".join(parts[:count]) for count in range(1, len(parts)))
            head = next((head for head in above if self.named(head) in self.mappings), None)
            if head is None:
                found[key] = value
            else:
                found.setdefault(head, {})[key.removeprefix(f"{head}.")] = value
        return {key: nested(value) if isinstance(value, dict) else value for key, value in found.items()}


def chosen(given: Given, key: str, table: Mapping[Any, Sequence[Line | Remark]]) -> Lines:
    """What a table has for a setting's value."""
    value = given[key]
    if value in table:
        yield from table[value]
    else:
        known = ", ".join(as_yaml(option) for option in table)
        yield Remark(f"{key}: {as_yaml(value)} has no counterpart; those that have: {known}", (key,))


def inert(given: Given, neutral: Mapping[str, tuple[Sequence[Any], str]]) -> Lines:
    """Settings without a counterpart, each with the values that do nothing and what any other would do."""
    for key, (values, what) in neutral.items():
        if given[key] not in values:
            yield Remark(f"{key}: {as_yaml(given[key])}: {what}", (key,))


def corrected(level: str, kind: str | None = None, low: float = 0.0, high: float | None = None) -> Lines:
    """The weight against the mismatch, with its truncation."""
    yield Line("use_importance_sampling_correction", True)
    yield Line("is_correction_level", level)
    if kind is not None and high is not None:
        yield Line("truncated_importance_sampling_type", kind)
        yield Line("truncated_importance_sampling_ratio", float(high))
        if low or kind == "icepop":
            yield Line("truncated_importance_sampling_ratio_min", float(low))
