"""Ways from logits to log-probs and their gradient: ours, and those of the peers."""

from __future__ import annotations

from nemo_geomask.bench.paths import eager, fused, ours
from nemo_geomask.bench.paths.base import Absent, Path, Setting, Unfit

__all__ = ["OURS", "PATHS", "Absent", "Path", "Setting", "Unfit"]

OURS = ours.PATHS
PATHS: tuple[Path, ...] = (*ours.PATHS, *eager.PATHS, *fused.PATHS)
