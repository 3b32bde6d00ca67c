"""Paths from logits to log-probs and their gradient: ours and those of the peers."""

from __future__ import annotations

from nemo_geomask.tools.bench.paths import eager_peers, fused_peers, our_paths
from nemo_geomask.tools.bench.paths.path import Absent, LogprobPath, NotApplicable, Setting

__all__ = ["OURS", "PATHS", "Absent", "LogprobPath", "NotApplicable", "Setting"]

OURS = our_paths.PATHS
PATHS: tuple[LogprobPath, ...] = (*our_paths.PATHS, *eager_peers.PATHS, *fused_peers.PATHS)
