"""Common parts of objectives with a policy ratio: settings that they refuse, and lines of their formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_geomask import functional as F
from nemo_geomask.objectives.variant import Part, SurrogateInputs

if TYPE_CHECKING:
    from torch import Tensor

_NEEDS_RATIO = "the objective needs the ratio that this setting removes"
REFUSED_BY_RATIO = {
    "use_cispo": "the objective is not CISPO; use name: cispo",
    "disable_ppo_ratio": _NEEDS_RATIO,
    "force_on_policy_ratio": _NEEDS_RATIO,
}
"""Settings that an objective with a policy ratio refuses, each with the reason."""

REFUSED_BY_TOKEN_RATIO = {
    **REFUSED_BY_RATIO,
    "sequence_level_importance_ratios": "the objective defines the level of its ratio itself",
    "ratio_clip_c": "the objective has no dual clip",
}
"""Settings that an objective refuses if it also fixes the ratio's level and has no dual clip."""

SEQUENCE_RATIO = Part(
    "s = exp(mean_t(curr − {ratio_anchor}))",
    "Each sequence has one policy ratio: the geometric mean of its tokens' ratios.",
)
TOKEN_RATIO = Part("r_t = exp(curr − {ratio_anchor})", "Each token has its own policy ratio.")


def pool_log_ratio(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    """Request the sequence's statistic of the log-ratio."""
    return {"log_ratio": inputs.log_ratio}


def clipped(log_ratio: Tensor, inputs: SurrogateInputs, advantages: Tensor) -> F.Surrogate:
    """Return PPO's clipped surrogate, with the dual clip, under the recipe's bounds."""
    low, high, dual = inputs.config.ratio_clip_min, inputs.config.ratio_clip_max, inputs.config.ratio_clip_c
    return F.clipped(log_ratio, advantages, clip_min=low, clip_max=high, dual_clip=dual)
