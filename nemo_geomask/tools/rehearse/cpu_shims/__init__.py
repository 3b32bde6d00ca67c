"""Shims that replace what NeMo-RL, vLLM and Megatron use of CUDA, on a machine without it.

Every device is the CPU, streams do nothing, and weights are sent by value. Each shim patches one module, in every
process, right after the module is imported. It names the lines of the host that need it (NeMo-RL main of August 2026,
commit 7ea279abf, unless it says otherwise). No worker, loop or loss is copied or replaced.
"""

from __future__ import annotations

from nemo_geomask.tools.rehearse.cpu_shims.import_hook import register

__all__ = ["register"]
