"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO, TOKEN_RATIO
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


class SapoOptions(StrictModel):
    """``loss_fn.options`` of ``sapo``."""

    tau_pos: float = Field(default=1.0, gt=0, description="Temperature τ of the gate where the advantage is positive.")
    tau_neg: float = Field(
        default=1.05, gt=0, description="Temperature τ of the gate where the advantage is 0 or less."
    )


def _sapo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    options = inputs.options
    return F.soft_gate(inputs.log_ratio, inputs.advantages, tau_pos=options.tau_pos, tau_neg=options.tau_neg)


_TEMPERATURES = "τ = {tau_pos} where A_t > 0, {tau_neg} elsewhere"
SAPO = Variant(
    surrogate=_sapo,
    defaults={"token_level_loss": False},
    refuses=REFUSED_BY_TOKEN_RATIO,
    options=SapoOptions,
    source="SAPO, arXiv:2511.20347 eq. 5 and 6",
    parts=(
        Part(f"ℓ_t = −(4/τ)·σ(τ·(r_t − 1))·A_t, {_TEMPERATURES}", "SAPO: a smooth gate in place of the clip."),
        TOKEN_RATIO,
    ),
)
"""Soft Adaptive Policy Optimization."""
