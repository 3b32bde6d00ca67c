"""Mask statistic, weight level and truncation as another distribution would define them."""

from __future__ import annotations

import math

from nemo_geomask import functional as F
from nemo_geomask.config import MaskStatistic, Truncation, WeightLevel


def gap(log_p, log_q):
    return (log_p.exp() - log_q.exp()).square()


def by_root(token, total, count):
    return total / count.clamp(min=1).sqrt()


def soft(log_weight, *, min, max):
    weight = F.saturating_exp(log_weight)
    return F.Weight(weight / (1 + weight / max), log_weight > math.log(max))


GAP = MaskStatistic(gap, description="squared difference")
ROOT_LEVEL = WeightLevel(by_root, description="the sequence's product to the power of 1/√n")
SOFT = Truncation(soft, description="bent")
CORRECTION = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
HERE = __name__
GAPS = {"log_ratio": "total", "level": "token", "statistic": f"{HERE}:GAP", "max": 0.02}
SOFTLY = {
    **CORRECTION,
    "is_correction_level": f"{HERE}:ROOT_LEVEL",
    "truncated_importance_sampling_type": f"{HERE}:SOFT",
    "truncated_importance_sampling_ratio": 1.5,
}
BY_TURN = WeightLevel(lambda token, total, count: total, over="turn")
