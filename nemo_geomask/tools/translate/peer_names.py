"""NeMo-RL's keys for the settings of other systems, read from the tables and functions that translate them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_geomask.tools.translate.peer_table import Assign, Peer, PeerSettings
from nemo_geomask.tools.translate.peers import PEERS

_KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+")


def nemo_rl_keys(name: str, value: Any) -> tuple[str, ...]:
    """Return NeMo-RL's dotted keys for another system's setting; empty if no system has it, or they disagree.

    Args:
        name: last part of the setting's name, its words in any order.
        value: value of the setting, without which it may have no effect.
    """
    meanings = {keys for peer in PEERS.values() if peer.name != "nemo_rl" and (keys := _keys_in(peer, name, value))}
    return meanings.pop() if len(meanings) == 1 else ()


def _keys_in(peer: Peer, name: str, value: Any) -> tuple[str, ...]:
    """Return the keys of ``loss_fn`` that change with a setting of one system, or the place that its table names."""
    names = {each.rpartition(".")[2] for each in (*peer.defaults, *peer.outside_loss_fn)}
    words = sorted(name.split("_"))
    same = [each for each in names if sorted(each.split("_")) == words and len(words) > 1]
    full = peer.full_name(name) or (peer.full_name(same[0]) if len(same) == 1 else None)
    if full is None or full not in peer.defaults:
        place = _KEY.match(peer.outside_loss_fn.get(full or "", ""))
        return (place.group(),) if place else ()
    # A setting may act only where a switch is on.
    for switch in (None, *(key for key, default in peer.defaults.items() if default is False and key != full)):
        switches = {} if switch is None else {switch: True}
        before, after = _assigned(peer, switches), _assigned(peer, {**switches, full: value})
        changed = [key for key, assigned in after.items() if before.get(key, assigned) != assigned]
        if changed:
            return tuple(f"loss_fn.{key}" for key in changed)
    return ()


def _assigned(peer: Peer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``loss_fn`` that a system's settings become; empty if they are invalid."""
    try:
        items = list(peer.convert(PeerSettings(peer.defaults, settings)))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return {}
    return {item.key: item.value for item in items if isinstance(item, Assign)}
