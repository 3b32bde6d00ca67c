"""GMPO: the geometric mean of a sequence's clipped token ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_geomask import functional as F
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _clip(inputs: SurrogateInputs) -> Tensor:
    low, high = inputs.config.ratio_clip_min, inputs.config.ratio_clip_max
    return F.clip_log_ratio(inputs.log_ratio, inputs.advantages, clip_min=low, clip_max=high)


def _gmpo_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"clipped_log_ratio": _clip(inputs), "advantage": inputs.advantages}


def _gmpo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    loss = F.geometric_mean(means["clipped_log_ratio"], means["advantage"])
    log_ratio, clipped_log_ratio = inputs.log_ratio.detach(), _clip(inputs).detach()
    return F.Surrogate(loss, F.saturating_exp(log_ratio), F.saturating_exp(clipped_log_ratio))


GMPO = Variant(
    surrogate=_gmpo,
    pool=_gmpo_pool,
    defaults={"token_level_loss": False, "ratio_clip_min": 1.0 - math.exp(-0.4), "ratio_clip_max": math.exp(0.4) - 1.0},
    refuses=REFUSED_BY_TOKEN_RATIO,
    source="GMPO, arXiv:2507.20673 eq. 4; bounds (e^-0.4, e^0.4)",
    parts=(
        Part(
            "ℓ = −Ā·exp(mean_t x_t)",
            "GMPO: the geometric mean of the token ratios, each of which is clipped {outside}.",
        ),
        Part(
            "x_t = min(curr − {ratio_anchor}, {log_high}) where Ā > 0, "
            "max(curr − {ratio_anchor}, {log_low}) where Ā < 0",
            "A log-ratio is clipped only in the direction that the update moves it.",
        ),
    ),
)
"""Geometric-Mean Policy Optimization."""
