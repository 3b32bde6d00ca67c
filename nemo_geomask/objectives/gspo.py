"""GSPO and GSPO-token: one policy ratio for each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_geomask import functional as F
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_RATIO, SEQUENCE_RATIO, clipped, pool_log_ratio
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _gspo_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"log_ratio": inputs.log_ratio, "advantage": inputs.advantages}


def _gspo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return clipped(means["log_ratio"], inputs, means["advantage"])


GSPO = Variant(
    surrogate=_gspo,
    pool=_gspo_pool,
    defaults={"token_level_loss": False, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
    forces={"sequence_level_importance_ratios": True},
    refuses=REFUSED_BY_RATIO,
    source="GSPO, arXiv:2507.18071 eq. 5 and 7; clip bounds from its section 5.1",
    parts=(
        Part(
            "ℓ = max(−s·Ā, −clip(s, {low}, {high})·Ā){dual_clip:Ā}", "GSPO's clip: no gradient from a ratio {outside}."
        ),
        SEQUENCE_RATIO,
    ),
)
"""Group Sequence Policy Optimization."""


def _gspo_token(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return clipped(F.straight_through_ratio(means["log_ratio"], inputs.curr), inputs, inputs.advantages)


GSPO_TOKEN = replace(
    GSPO,
    surrogate=_gspo_token,
    pool=pool_log_ratio,
    source="GSPO-token, arXiv:2507.18071 eq. 13 and 14",
    parts=(
        Part(
            "ℓ_t = max(−s_t·A_t, −clip(s_t, {low}, {high})·A_t){dual_clip:A_t}",
            "GSPO-token's clip: no gradient from a ratio {outside}.",
        ),
        Part(
            "s_t = sg[exp(mean_t(curr − {ratio_anchor}))]·π/sg[π]",
            "The policy ratio has the value of the sequence's ratio and the gradient of the token's log-prob.",
        ),
    ),
)
"""GSPO with per-token advantages; value and gradient equal GSPO's if all tokens have the same advantage."""
