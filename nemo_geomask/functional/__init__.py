"""Formulas of the papers as pure functions on tensors: no state, no collectives, no configuration objects.

The tensors of a call are float32 or float64 and share one layout, such as [B, T] or [N]: see :func:`check_layout`.
"""

from __future__ import annotations

from nemo_geomask.functional.budgets import bound_by_mean, bound_by_share, position_weights
from nemo_geomask.functional.entry import check_choice, check_layout
from nemo_geomask.functional.kl import KLEstimator, kl_estimate, kl_penalty
from nemo_geomask.functional.ratios import (
    LOG_RATIO_LIMIT,
    BinaryStatistic,
    Statistic,
    Weight,
    binary_statistic,
    clamp_weight,
    filter_weight,
    k3,
    log_bound,
    out_of_bounds,
    outside,
    saturating_exp,
    token_statistic,
)
from nemo_geomask.functional.reductions import Normalization, inverse_count, token_coefficients
from nemo_geomask.functional.surrogates import (
    Surrogate,
    clip_log_ratio,
    clipped,
    clipped_weight,
    gamma_weight,
    geometric_mean,
    quadratic,
    score_function,
    soft_gate,
    straight_through_ratio,
    unclipped,
)

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
    "check_choice",
    "check_layout",
    "clamp_weight",
    "clip_log_ratio",
    "clipped",
    "clipped_weight",
    "filter_weight",
    "gamma_weight",
    "geometric_mean",
    "inverse_count",
    "k3",
    "kl_estimate",
    "kl_penalty",
    "log_bound",
    "out_of_bounds",
    "outside",
    "position_weights",
    "quadratic",
    "saturating_exp",
    "score_function",
    "soft_gate",
    "straight_through_ratio",
    "token_coefficients",
    "token_statistic",
    "unclipped",
]
