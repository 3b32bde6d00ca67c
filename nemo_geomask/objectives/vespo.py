"""VESPO: REINFORCE under a smooth weight of the sequence's ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO, pool_log_ratio
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


class VespoOptions(StrictModel):
    """``loss_fn.options`` of ``vespo``."""

    k_pos: float = Field(default=2.0, gt=0, description="Exponent k of the weight where the advantage is 0 or more.")
    lambda_pos: float = Field(
        default=3.0, gt=0, description="Decay rate λ where the advantage is 0 or more; the weight peaks at W = k/λ."
    )
    k_neg: float = Field(default=3.0, gt=0, description="Exponent k of the weight where the advantage is negative.")
    lambda_neg: float = Field(default=2.0, gt=0, description="Decay rate λ where the advantage is negative.")


def _vespo(inputs: SurrogateInputs, sums: Mapping[str, Tensor]) -> F.Surrogate:
    options = inputs.options
    return F.gamma_weight(
        sums["log_ratio"],
        inputs.curr,
        inputs.advantages,
        k_pos=options.k_pos,
        lambda_pos=options.lambda_pos,
        k_neg=options.k_neg,
        lambda_neg=options.lambda_neg,
    )


VESPO = Variant(
    surrogate=_vespo,
    pool=pool_log_ratio,
    pooled_by="sum",
    defaults={"ratio_anchor": "gen"},  # the ratio is π_θ/μ, where μ is the policy that sampled the tokens
    refuses=REFUSED_BY_TOKEN_RATIO,
    options=VespoOptions,
    source="VESPO, arXiv:2602.10693; k and λ of its authors' scripts and TRL",
    parts=(
        Part(
            "ℓ_t = −sg(φ)·A_t·curr, φ = e^λ·W^k·e^(−λ·W), "
            "(k, λ) = ({k_pos}, {lambda_pos}) where A_t ≥ 0, ({k_neg}, {lambda_neg}) elsewhere",
            "VESPO: a smooth weight by the sequence's ratio, which is 1 at W = 1 and vanishes far from it.",
        ),
        Part(
            "W = exp(Σ_t (curr − {ratio_anchor}))",
            "Each sequence has one policy ratio: the product of its tokens' ratios.",
        ),
    ),
)
"""Variational sequence-level soft policy optimization: REINFORCE under a gamma-shaped weight."""
