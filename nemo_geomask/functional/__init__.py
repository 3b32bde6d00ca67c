"""Pure functions on tensors: no state, no collectives, no configuration objects."""

from __future__ import annotations

from nemo_geomask.functional.entry import check_choice, check_layout
from nemo_geomask.functional.kl import KLEstimator, kl_estimate, kl_penalty
from nemo_geomask.functional.masks import Statistic, token_statistic
from nemo_geomask.functional.ratios import LOG_RATIO_LIMIT, log_bound, outside, saturated, saturating_exp
from nemo_geomask.functional.reductions import Normalization, inverse_count, token_coefficients
from nemo_geomask.functional.surrogates import (
    Surrogate,
    clip_log_ratio,
    clipped,
    clipped_weight,
    geometric_mean,
    score_function,
    soft_gate,
    straight_through_ratio,
)
from nemo_geomask.functional.weights import Weight, clamp_weight, filter_weight

__all__ = [
    "LOG_RATIO_LIMIT",
    "KLEstimator",
    "Normalization",
    "Statistic",
    "Surrogate",
    "Weight",
    "check_choice",
    "check_layout",
    "clamp_weight",
    "clip_log_ratio",
    "clipped",
    "clipped_weight",
    "filter_weight",
    "geometric_mean",
    "inverse_count",
    "kl_estimate",
    "kl_penalty",
    "log_bound",
    "outside",
    "saturated",
    "saturating_exp",
    "score_function",
    "soft_gate",
    "straight_through_ratio",
    "token_coefficients",
    "token_statistic",
]
