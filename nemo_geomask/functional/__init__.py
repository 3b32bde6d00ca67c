"""Formulas of the papers as pure functions on tensors: no state, no collectives, no configuration objects.

The tensors of a call are float32 or float64 and share one layout, such as [B, T] or [N]: see :func:`check_layout`.
"""

# ruff: noqa: F403, F405 -- for type checkers alone; __all__ below names what the modules have
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.functional.budgets import *
    from nemo_geomask.functional.centering import *
    from nemo_geomask.functional.entry import *
    from nemo_geomask.functional.kl import *
    from nemo_geomask.functional.ratios import *
    from nemo_geomask.functional.reductions import *
    from nemo_geomask.functional.surrogates import *

__all__ = [
    "LOG_RATIO_LIMIT",
    "BinaryStatistic",
    "KLEstimator",
    "Normalization",
    "Statistic",
    "Surrogate",
    "Weight",
    "binary_statistic",
    "bound_by_mean",
    "bound_by_share",
    "centered_score",
    "check_choice",
    "check_layout",
    "clamp_weight",
    "clip_log_ratio",
    "clipped",
    "clipped_weight",
    "filter_weight",
    "gamma_weight",
    "geometric_mean",
    "interpolated_logprobs",
    "inverse_count",
    "k3",
    "kl_estimate",
    "kl_penalty",
    "log_bound",
    "position_weights",
    "quadratic",
    "saturating_exp",
    "score_function",
    "soft_gate",
    "straight_through_ratio",
    "tapered",
    "token_coefficients",
    "token_statistic",
    "unclipped",
]

_MODULES = ("budgets", "centering", "entry", "kl", "ratios", "reductions", "surrogates")


def __getattr__(name: str) -> Any:
    # The modules, and torch with them, are imported with the first formula that is used: the modules of the objectives
    # name formulas, and a recipe's settings are read without torch.
    if name in __all__:
        for module in (importlib.import_module(f"{__name__}.{room}") for room in _MODULES):
            globals().update({key: getattr(module, key) for key in module.__all__ if key in __all__})
        return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
