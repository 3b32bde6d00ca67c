"""Pure functions on tensors: no state, no collectives, no configuration objects."""

from __future__ import annotations

from nemo_geomask.functional.autograd import nonfinite, select, with_derivative
from nemo_geomask.functional.kl import KLEstimator, kl_estimate, kl_penalty
from nemo_geomask.functional.masks import Statistic, token_statistic
from nemo_geomask.functional.ratios import (
    LOG_RATIO_LIMIT,
    bound_side,
    log_bound,
    overflow_count,
    ratio_side,
    saturating_exp,
)
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
from nemo_geomask.functional.weights import TruncatedWeight, clamp_weight, filter_weight

__all__ = [
    "LOG_RATIO_LIMIT",
    "KLEstimator",
    "Normalization",
    "Statistic",
    "Surrogate",
    "TruncatedWeight",
    "bound_side",
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
    "nonfinite",
    "overflow_count",
    "ratio_side",
    "saturating_exp",
    "score_function",
    "select",
    "soft_gate",
    "straight_through_ratio",
    "token_coefficients",
    "token_statistic",
    "with_derivative",
]
