"""The lab: an embedded trainer that runs the losses on a real, small mixture-of-experts model on the CPU.

A run is repeatable: the same recipe (which includes ``grpo.seed``, ``lab.num_threads`` and the number of processes) on
the same machine, with the same versions of torch and transformers, gives the same numbers except for timings.
"""

from __future__ import annotations

from nemo_geomask.tools.lab.run_store import read_curves

__all__ = ["read_curves"]
