"""Description of a peer, and the steps into which a peer's settings are converted.

A peer is another RL system whose settings can be translated; each has a module in ``peers``.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, is_one_of, nested, shortened
from nemo_geomask.yaml_text import as_yaml

LOSS_WORDS = re.compile(
    "loss|kl(?![a-z])|clip|entropy|coef|log_?prob|logp|ratio(?!n)|mask|importance|advantage|reject|correct|off_?policy|"
    "penalty|mtp|distill|teacher|surrogate|objective|temperature|normali[sz]|beta|epsilon|threshold|anchor|bonus|"
    "stale|aux",
    re.IGNORECASE,
)
"""Words in the name of a setting that may reach the loss."""
NO_BOUND = 1e30
"""Bound that never acts, for a setting of this package that must have a bound."""


class Assign(NamedTuple):
    """One field of the translated ``loss_fn`` block, with its value."""

    key: str  # name of the field; an assignment to ``masks`` adds one mask to the list
    value: Any  # its value
    note: str = ""  # comment for the output, if the value had to be converted


class Remark(NamedTuple):
    """Sentence for the output: what the translated block does differently from the peer's loss.

    Attributes:
        lost_keys: the peer's settings that the block cannot express, which makes the exit status 1; empty for a
            difference in detail.
    """

    text: str  # the sentence
    lost_keys: tuple[str, ...] = ()


Conversion = Iterator[Assign | Remark]
"""What a peer's ``convert`` yields: the fields of the block and the remarks, in any order."""


class PeerSettings:
    """A peer's settings by full name, with the peer's default for each that the files do not contain.

    Attributes:
        read_keys: names of the settings that ``convert`` has used so far.
        last_read: name and value of the last one.
    """

    def __init__(self, defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._defaults, self._settings = defaults, settings
        self.read_keys: set[str] = set()
        self.last_read: tuple[str, Any] = ("", None)

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        value = self._settings.get(key, self._defaults[key])
        self.last_read = (key, value)
        if UNRESOLVED in str(value):
            raise ConfigError(
                f"{key}: the file does not contain the value of {shortened(value)}; write the value itself"
            )
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._settings

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def number(self, key: str) -> float:
        """Return a setting as a number; it may be written as text.

        Raises:
            ConfigError: it is not a number.
        """
        value = self[key]
        try:
            if isinstance(value, bool):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{key} must be a number, but it is {shortened(value)}") from None

    def numbers(self, key: str) -> tuple[float, float]:
        """Return a setting as two numbers.

        Raises:
            ConfigError: it is not a list of two numbers.
        """
        value = self[key]
        try:
            low, high = map(float, value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key} must be two numbers, but it is {shortened(value)}") from None
        return low, high


@dataclass(frozen=True)
class Peer:
    """Another RL system: the settings of its loss, and how they become a ``loss_fn`` block.

    Attributes:
        defaults: every setting that ``convert`` reads, by its full dotted name, with the system's default.
        outside_loss_fn: for each setting that NeMo-RL has outside ``loss_fn``, its place in NeMo-RL.
        sections: sections of which all settings concern the loss, so that an unknown setting in them is reported.
        programs: patterns of the programs and classes that train with this loss, each with the settings that it changes
            from ``defaults``.
        base_configs: patterns of files named by ``config_options`` whose values are ``defaults``, each with the
            settings in which it differs.
        former_names: for each setting of older versions, the settings in its place, with ``{}`` for its value; or words
            that say where its place is.
        presets: for each preset, its parameters with their defaults, and its settings; ``{parameter}`` in a value is
            replaced.
    """

    name: str  # value of ``--from``
    title: str  # name of its settings in the output
    source: str  # repository and commit from which names and defaults were read
    defaults: Mapping[str, Any]
    convert: Callable[[PeerSettings], Conversion]  # function that converts the peer's settings to ours
    outside_loss_fn: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    mappings: tuple[str, ...] = ()  # names of settings whose values are mappings
    marks: tuple[str, ...] = ()  # patterns (``fnmatch``) of settings that only this system has; they identify it
    programs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    other_programs: tuple[str, ...] = ()  # patterns of the system's programs that train without this loss
    config_options: tuple[str, ...] = ()  # settings that name another file with settings
    base_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    constructors: tuple[str, ...] = ()  # Python classes whose keyword arguments are settings
    presets: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)
    former_names: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)

    def full_name(self, key: str) -> str | None:
        """Return the full name of a setting; None if the system has no such setting.

        Args:
            key: the full name (``trainer.loss.type``), its last parts (``loss.type``), or a path that ends with it
            (``config.trainer.loss.type``).
        """
        key = key.replace("/", ".")
        for full in self._names_by_last_part.get(key.rpartition(".")[2], ()):
            if full == key:
                return key
        for full in self._names_by_last_part.get(key.rpartition(".")[2], ()):
            if f".{full}".endswith(f".{key}"):
                return full
            if "." in full and f".{key}".endswith(f".{full}"):  # a name of one part may also end names of other systems
                return full
        return None

    @functools.cached_property
    def _names_by_last_part(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in (*self.defaults, *self.outside_loss_fn):
            names.setdefault(name.rpartition(".")[2], []).append(name)
        return names

    @functools.cached_property
    def unrelated(self) -> tuple[str, ...]:
        """Names and patterns of settings that do not reach the loss, from ``peers/unrelated_settings.toml``.

        A pattern with ``*`` does not cover a setting whose name speaks of a loss (:data:`LOSS_WORDS`); one with ``**``
        does. A setting that no table and no pattern has is reported as not read.
        """
        return tuple(
            f"{section}.{name}" if section else name
            for section, names in _tables("unrelated_settings")[self.name].items()
            for name in names.split()
        )

    def is_unrelated(self, key: str) -> bool:
        """Return True if the setting is known not to concern the loss."""
        if any(f".{section}." in f".{key}." for section in self.sections):
            return False
        return any(key == name or ("*" in name and _covers(name, key)) for name in self.unrelated)

    def marks_of(self, settings: Iterable[str]) -> list[str]:
        """Return the settings that only this system has."""
        return [key for key in settings if any(fnmatchcase(key, pattern) for pattern in self.marks)]

    def identifies(self, program: str) -> bool:
        """Return True if no other system has a program of this name; patterns that start with * are too general."""
        return any(fnmatchcase(program, pattern) for pattern in self.programs if not pattern.startswith("*"))

    def settings_of_program(self, program: str) -> Mapping[str, Any] | None:
        """Return what a program changes from the defaults; None if it is none of :attr:`programs`."""
        return next((changed for pattern, changed in self.programs.items() if fnmatchcase(program, pattern)), None)

    def regroup_mappings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by dotted name, with the items of each of :attr:`mappings` as one value again."""
        if not self.mappings:
            return dict(settings)
        grouped: dict[str, Any] = {}
        for key, value in settings.items():
            parts = key.split(".")
            parents = (".".join(parts[:count]) for count in range(1, len(parts)))
            mapping = next((parent for parent in parents if self.full_name(parent) in self.mappings), None)
            if mapping is None:
                grouped[key] = value
            else:
                items = grouped.setdefault(mapping, {})
                if not isinstance(items, dict):
                    raise ConfigError(f"{key}: {mapping} is a value elsewhere and can't hold settings")
                items[key.removeprefix(f"{mapping}.")] = value
        return {key: nested(value) if isinstance(value, dict) else value for key, value in grouped.items()}


def settings_of(peer: str) -> dict[str, Any]:
    """Return the arguments of :class:`Peer` that ``peers/peer_settings.toml`` has for a peer."""
    table = _tables("peer_settings")[peer]
    return {
        "defaults": {
            f"{section}.{name}" if section else name: None if value == "null" else value
            for section, settings in table["defaults"].items()
            for name, value in settings.items()
        },
        "outside_loss_fn": {name: place for place, names in table["outside_loss_fn"].items() for name in names.split()},
        "former_names": table.get("former_names", {}),
    }


@functools.cache
def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "peers" / f"{name}.toml").read_text(encoding="utf-8"))


def _covers(pattern: str, key: str) -> bool:
    """Return True if a pattern with ``*`` of :attr:`Peer.unrelated` covers a setting."""
    if not fnmatchcase(key, pattern):
        return False
    literal = pattern.partition("*")[0]
    return "**" in pattern or LOSS_WORDS.search(key.removeprefix(literal)) is None


def convert_value(settings: PeerSettings, key: str, table: Mapping[Any, Sequence[Assign | Remark]]) -> Conversion:
    """Yield the items that ``table`` has for a setting's value; for a value that it lacks, a remark that says so."""
    value = settings[key]
    if is_one_of(value, table):
        yield from table[value]
    else:
        options = ", ".join(as_yaml(option) for option in table)
        yield Remark(f"{key}: {as_yaml(value)} has no counterpart; values with a counterpart: {options}", (key,))


def without_counterpart(settings: PeerSettings, neutral: Mapping[str, tuple[Sequence[Any], str]]) -> Conversion:
    """Yield a remark for each setting that this package lacks, if its value has an effect in the peer.

    Args:
        settings: settings of the peer.
        neutral: for each key, the values without effect, and why any other value is not expressed.
    """
    for key, (values, effect) in neutral.items():
        if settings[key] not in values:
            yield Remark(f"{key}: {as_yaml(settings[key])}: {effect}", (key,))


def weight_settings(
    level: str, truncation: str | None = None, low: float = 0.0, high: float | None = None
) -> Conversion:
    """Yield the settings of the weight against the mismatch.

    Args:
        level: value of ``is_correction_level``.
        truncation: value of ``truncated_importance_sampling_type``; None: no truncation.
        low: lower bound of the weight.
        high: upper bound of the weight; None: no truncation, whatever the other arguments.
    """
    yield Assign("use_importance_sampling_correction", True)
    yield Assign("is_correction_level", level)
    if truncation is not None and high is not None:
        yield Assign("truncated_importance_sampling_type", truncation)
        yield Assign("truncated_importance_sampling_ratio", float(high))
        if low or truncation == "icepop":
            yield Assign("truncated_importance_sampling_ratio_min", float(low))
