"""Checks of a recipe: the objective that it trains, and rules that warn of known mistakes.

Other tools import what they need from here, and nothing from the modules inside.
"""

from nemo_geomask.tools.check.logit_memory import (
    GPU_BYTES,
    LOGPROB_METHODS,
    OutputWork,
    current_method,
    deferred_peak,
    output_work_of,
    settings_to_change,
)
from nemo_geomask.tools.check.logprob_paths import scoring_passes
from nemo_geomask.tools.check.model_shapes import ModelShape, has_experts, shape_of
from nemo_geomask.tools.check.objective_text import describe
from nemo_geomask.tools.check.parallel_layout import (
    Layout,
    layout_keys,
    layout_of,
    trained_sections,
    training_gpus,
)
from nemo_geomask.tools.check.recipe_check import RULES, UNCHECKED_SECTIONS, Report, check
from nemo_geomask.tools.check.recipe_facts import MISMATCH_KL, RecipeFacts
from nemo_geomask.tools.check.rule import Finding, Hit, Rule, Severity

__all__ = [
    "GPU_BYTES",
    "LOGPROB_METHODS",
    "MISMATCH_KL",
    "RULES",
    "UNCHECKED_SECTIONS",
    "Finding",
    "Hit",
    "Layout",
    "ModelShape",
    "OutputWork",
    "RecipeFacts",
    "Report",
    "Rule",
    "Severity",
    "check",
    "current_method",
    "deferred_peak",
    "describe",
    "has_experts",
    "layout_keys",
    "layout_of",
    "output_work_of",
    "scoring_passes",
    "settings_to_change",
    "shape_of",
    "trained_sections",
    "training_gpus",
]
