"""Variants by name, over the entry-point group ``nemo_geomask.losses``.

Only the selected entry is imported. A name that two distributions claim, an import that fails and an object of the
wrong type are errors that say whose they are.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import entry_points
from typing import Any

from nemo_geomask.config import nearest
from nemo_geomask.errors import PluginError, Problem
from nemo_geomask.losses.variant import Variant

__all__ = ["BUILT_IN", "GROUP", "Entry", "available", "load"]

GROUP = "nemo_geomask.losses"
_SELF = "nemo-geomask"

# The package's own entries also stand here, so that they are found when it is on PYTHONPATH without being installed,
# as in a Ray worker; a test keeps this equal to pyproject.toml.
BUILT_IN = {
    name: f"nemo_geomask.losses.variants:{name.upper()}"
    for name in ("clipped_pg", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "dppo", "ipo", "vespo", "dro")
}
# What papers call losses that NeMo-RL's flags select; "grpo" is spelt much like "gspo", and is not it.
_KNOWN_AS = dict.fromkeys(("grpo", "dapo", "ppo", "reinforce", "rloo"), "clipped_pg")


@dataclass(frozen=True)
class Entry:
    """A name, where it points and the distribution that registered it."""

    name: str
    value: str
    distribution: str


def available() -> dict[str, tuple[Entry, ...]]:
    """Every registered name with all distributions that claim it; nothing is imported.

    Returns: names in alphabetical order; more than one entry under a name is a conflict, raised by :func:`load`.
    """
    entries: dict[str, dict[tuple[str, str], Entry]] = {
        name: {(value, _SELF): Entry(name, value, _SELF)} for name, value in BUILT_IN.items()
    }
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else "unknown distribution"
        # A distribution found twice on sys.path (an editable install beside its checkout) is one claim.
        entries.setdefault(point.name, {})[point.value, owner] = Entry(point.name, point.value, owner)
    return {name: tuple(entries[name].values()) for name in sorted(entries)}


def load(name: str) -> Variant:
    """The variant registered under ``name``, or found at ``module:attribute``.

    Raises: PluginError: for an unknown name (with the nearest known one), a name claimed twice, a failing import, a
    missing attribute or an object that is no :class:`~nemo_geomask.losses.Variant`.
    """
    if ":" in name:
        return _import(Entry(name, name, "given as module:attribute"))
    entries = available()
    if name not in entries:
        guess = _KNOWN_AS.get(name.casefold()) or nearest(name, entries)
        hint = f"did you mean '{guess}'?" if guess else f"registered: {', '.join(entries)}"
        raise _error(
            f"no loss named '{name}' in entry-point group '{GROUP}'; {hint} (or name a variant of your own as "
            "module:attribute)"
        )
    claims = entries[name]
    if len(claims) > 1:
        listed = " and ".join(f"{entry.distribution} ({entry.value})" for entry in claims)
        raise _error(
            f"'{name}' is registered in group '{GROUP}' by {listed}; uninstall one of them, or name the "
            f"one you want as module:attribute, such as '{claims[-1].value}'"
        )
    return _import(claims[0])


def _import(entry: Entry) -> Variant:
    whose = f"'{entry.name}' ({entry.distribution}, {entry.value})"
    module, _, attribute = entry.value.partition(":")
    try:
        found: Any = reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:
        # A foreign message may have lines; ours are one.
        text = " ".join(str(error).split())
        raise _error(f"{whose} could not be imported: {type(error).__name__}: {text}") from error
    if not isinstance(found, Variant):
        raise _error(
            f"{whose} is a {type(found).__module__}.{type(found).__qualname__}; it must be a "
            "nemo_geomask.losses.Variant instance (data plus one function, see docs/plugins.md)"
        )
    return found


def _error(message: str) -> PluginError:
    return PluginError(Problem(("loss_fn.name",), message))
