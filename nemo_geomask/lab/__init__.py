"""The lab: an embedded trainer that runs the losses on a real, small mixture-of-experts model on the CPU.

A run is repeatable: with the same recipe (its ``grpo.seed``, ``lab.num_threads`` and processes among it), on the same
machine and versions of torch and transformers, every number but the timings comes out equal.
"""

from __future__ import annotations

from nemo_geomask.lab.compare import ComparedLoss, parse_compare
from nemo_geomask.lab.outcome import VariantSummary, outcomes
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.run import train
from nemo_geomask.lab.runs import Course, Run, read_curves

__all__ = [
    "ComparedLoss",
    "Course",
    "LabRecipe",
    "Run",
    "VariantSummary",
    "outcomes",
    "parse_compare",
    "read_curves",
    "train",
]
