"""Settings that are known to make a sampler's and a trainer's log-probs differ, from ``mismatch_switches.toml``."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VERSIONS = ("v0.6.0", "v0.7.0", "main")
"""Versions of NeMo-RL that the table knows, oldest first."""

_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class MismatchSwitch:
    """A setting and the value under which both engines are known to agree best.

    Attributes:
        cost: what another value needs: a request alone, another start of the engine or of the trainer, or another
            number of processes.
        also: values, by dotted key, without which NeMo-RL refuses the conservative value or runs another layout.
        keeps: keys that recipes interpolate from this one, and that keep their value when it changes.
    """

    id: str  # short unique name
    key: str  # dotted key of the recipe
    value: Any  # the conservative value
    title: str  # what the setting decides
    side: Literal["engine", "trainer", "both"]  # whose log-probs it changes
    cost: Literal["request", "engine", "trainer", "layout"]
    group: str  # name of the switches that are tried together first
    slower: str  # price of the conservative value, as reported; empty if none is known
    source: str  # where the effect is reported
    since: str = VERSIONS[0]  # first version of NeMo-RL that reads the key
    needs: Literal["", "megatron", "dtensor"] = ""  # ``megatron`` or ``dtensor`` if only that trainer reads the key
    gpu: bool = False  # True if the value changes nothing on a CPU
    field: str = ""  # name of the request's option, for switches that cost a request
    seen_as: str = ""  # part of the names of those resolved settings that show the value; the key's last part if empty
    is_default: bool = False  # True if a recipe without the key has the conservative value
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    as_good: tuple[Any, ...] = ()  # further values under which the engines agree as well

    def is_conservative(self, value: Any) -> bool:
        """Return True if a recipe's value, None without one, is the conservative value or as good."""
        return value in (self.value, *self.as_good) or (value is None and self.is_default)

    def kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's values of :attr:`keeps`, by dotted key; the argument is that of :meth:`settings`."""
        return {key: values[key] for key in self.keeps if values.get(key) is not None}

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the conservative value, and those of :attr:`also` that a recipe lacks, by dotted key.

        Args:
            values: the recipe's values by dotted key; a key is absent if the recipe has none.
        """
        companions = {key: value for key, value in self.also.items() if values.get(key) not in (None, value)}
        return {self.key: self.value, **companions}

    def is_seen_in(self, names: Iterable[str]) -> bool:
        """Return True if one of the names of resolved settings is that of this switch.

        Args:
            names: dotted names.
        """
        part = self.seen_as or self.key.rpartition(".")[2]
        return any(part in name for name in names)


def settings_left_open(get: Callable[[str], Any], trainer: str) -> list[tuple[MismatchSwitch, Any]]:
    """Return the switches whose keys have another value than the conservative one, each with that value.

    Args:
        get: returns the value of a dotted key; None if it is not set.
        trainer: ``megatron`` or ``dtensor``.
    """
    values = [(switch, get(switch.key)) for switch in mismatch_switches() if switch.needs in ("", trainer)]
    return [(switch, value) for switch, value in values if value is not None and not switch.is_conservative(value)]


@functools.cache
def mismatch_switches() -> tuple[MismatchSwitch, ...]:
    """Return all switches, in the order of the file."""
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    for row in table["switch"]:
        # TOML has no null.
        row["also"] = {key: None if value == "null" else value for key, value in row.get("also", {}).items()}
        row.update({name: tuple(row.get(name, ())) for name in ("keeps", "as_good")})
    return tuple(MismatchSwitch(**row) for row in table["switch"])
