"""Measurements: our log-probs, losses and sequence statistics beside every peer that is importable.

Needs torch alone, and Triton on a GPU; whatever else is missing is listed with its reason.
"""

from __future__ import annotations

from nemo_geomask.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
