"""Benchmarks of our log-probs, losses, sequence statistics and steps, with every peer that can be imported.

They need torch and, on a GPU, Triton. Peers that can't be imported are listed with the reason.
"""

from __future__ import annotations

from nemo_geomask.tools.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
