"""What NeMo-RL, vLLM and Megatron take from CUDA, on a machine that has none: devices that are the CPU, streams that do
nothing, weights that travel by value.

Each stand-in is a patch of one module, applied in every process right after the module is imported, and names the
lines of the host that need it (NeMo-RL main of August 2026, commit 7ea279abf, unless it says otherwise). No worker,
loop or loss is copied or replaced.
"""

from __future__ import annotations

from nemo_geomask.rehearsal.standins.imports import register

__all__ = ["register"]
