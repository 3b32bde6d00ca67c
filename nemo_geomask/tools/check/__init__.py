"""Checks of a recipe: the objective that it trains, and rules that warn of known mistakes.

Other tools import what they need from here, and nothing from the modules inside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.tools.check.all_rules import RULES, Report, check
    from nemo_geomask.tools.check.cluster_rules import training_gpus
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
    from nemo_geomask.tools.check.model_shapes import ModelShape, shape_of
    from nemo_geomask.tools.check.objective_text import describe
    from nemo_geomask.tools.check.parallel_layout import Layout, layout_keys, layout_of, trained_sections
    from nemo_geomask.tools.check.recipe_facts import RecipeFacts
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
    "layout_keys",
    "layout_of",
    "output_work_of",
    "scoring_passes",
    "settings_to_change",
    "shape_of",
    "trained_sections",
    "training_gpus",
]

MISMATCH_KL = 1e-3
"""Mean KL from the generation to the training engine that is assumed without a measurement, in nats per token."""

UNCHECKED_SECTIONS = ("data", "env", "logger")
"""Sections with paths and credentials. The environment variables that they refer to need not be set here."""

_MODULES = {
    "Finding": "rule",
    "GPU_BYTES": "logit_memory",
    "Hit": "rule",
    "LOGPROB_METHODS": "logit_memory",
    "Layout": "parallel_layout",
    "ModelShape": "model_shapes",
    "OutputWork": "logit_memory",
    "RULES": "all_rules",
    "RecipeFacts": "recipe_facts",
    "Report": "all_rules",
    "Rule": "rule",
    "Severity": "rule",
    "check": "all_rules",
    "current_method": "logit_memory",
    "deferred_peak": "logit_memory",
    "describe": "objective_text",
    "layout_keys": "parallel_layout",
    "layout_of": "parallel_layout",
    "output_work_of": "logit_memory",
    "scoring_passes": "logprob_paths",
    "settings_to_change": "logit_memory",
    "shape_of": "model_shapes",
    "trained_sections": "parallel_layout",
    "training_gpus": "cluster_rules",
}


def __getattr__(name: str) -> Any:
    # Imported when used, because the modules need torch, and a recipe that can't be read should not wait for it.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
