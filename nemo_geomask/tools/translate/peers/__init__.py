"""Peers, the systems whose settings can be translated, with one module each."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import Peer
from nemo_geomask.tools.translate.peers import (
    areal,
    fast_llm,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)

__all__ = ["PEERS"]

_MODULES = (verl, trl, slime, areal, skyrl, prime_rl, openrlhf, open_instruct, fast_llm, nemo_rl)
PEERS: dict[str, Peer] = {module.PEER.name: module.PEER for module in _MODULES}
"""Peers by the name that ``--from`` takes."""
