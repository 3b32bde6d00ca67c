"""The lab: an embedded trainer that runs the losses on a real, small mixture-of-experts model on the CPU.

A run is repeatable: the same recipe (which includes ``grpo.seed``, ``lab.num_threads`` and the number of processes) on
the same machine, with the same versions of torch and transformers, gives the same numbers except for timings.
"""

from __future__ import annotations

from nemo_geomask.tools.lab.compare_specs import ComparedLoss, parse_compare
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.outcome import VariantSummary, summarize_variants
from nemo_geomask.tools.lab.run_queue import train
from nemo_geomask.tools.lab.run_store import Run, RunCurves, read_curves

__all__ = [
    "ComparedLoss",
    "LabRecipe",
    "Run",
    "RunCurves",
    "VariantSummary",
    "parse_compare",
    "read_curves",
    "summarize_variants",
    "train",
]
