"""TOPR: REINFORCE on samples to be made more likely, a truncated ratio on those to be made less likely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_geomask import functional as F
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO, pool_log_ratio
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _topr(inputs: SurrogateInputs, sums: Mapping[str, Tensor]) -> F.Surrogate:
    return F.tapered(sums["log_ratio"], inputs.curr, inputs.advantages)


TOPR = Variant(
    surrogate=_topr,
    pool=pool_log_ratio,
    pooled_by="sum",
    defaults={"ratio_anchor": "gen"},  # the ratio is π_θ/μ, where μ is the policy that sampled the tokens
    refuses=REFUSED_BY_TOKEN_RATIO,
    source="TOPR, arXiv:2503.14286, with the sign of the advantage for that of the reward",
    parts=(
        Part(
            "ℓ_t = −w·A_t·curr, w = 1 where A_t > 0, sg(min(W, 1)) elsewhere",
            "TOPR: REINFORCE, where a sample with A < 0 counts less, the less likely it has become.",
        ),
        Part(
            "W = exp(Σ_t (curr − {ratio_anchor}))",
            "Each sequence has one policy ratio: the product of its tokens' ratios.",
        ),
    ),
)
"""Tapered off-policy REINFORCE."""
