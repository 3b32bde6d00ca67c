"""DPPO and IPO: a mask on the difference of probabilities in place of the clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.objectives.policy_ratio import REFUSED_BY_TOKEN_RATIO, TOKEN_RATIO
from nemo_geomask.objectives.variant import Part, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor

# The ratio is π_θ/μ, where μ is the policy that sampled the tokens.
_RATIO_AGAINST_GEN: Mapping[str, Any] = {"ratio_anchor": "gen"}


class DppoOptions(StrictModel):
    """``loss_fn.options`` of ``dppo``."""

    divergence: Literal["tv", "kl"] = Field(
        default="tv",
        description="Distance between the token's two probabilities: `tv`: |π − μ|; `kl`: binary KL(μ ‖ π), in nats.",
    )
    delta: float | None = Field(
        default=None,
        gt=0,
        description="Largest distance of a token that is trained on where A > 0; null: 0.15 for `tv`, 0.05 for `kl`.",
    )
    delta_low: float | None = Field(default=None, gt=0, description="The same where A < 0; null: the value of `delta`.")
    cap: float = Field(default=10.0, gt=1, description="Largest value of the ratio as a weight.")


def _dppo_masks(options: DppoOptions) -> Sequence[Mapping[str, Any]]:
    delta = options.delta or {"tv": 0.15, "kl": 0.05}[options.divergence]
    return ({"preset": f"dppo_{options.divergence}", "delta": delta, "delta_low": options.delta_low},)


def _dppo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    # CISPO's surrogate with the bounds 1 - clip_min = 0, which is none, and 1 + clip_max = cap.
    cap: float = inputs.options.cap
    return F.clipped_weight(inputs.log_ratio, inputs.curr, inputs.advantages, clip_min=1.0, clip_max=cap - 1)


DPPO = Variant(
    surrogate=_dppo,
    masks=_dppo_masks,
    defaults=_RATIO_AGAINST_GEN,
    refuses=REFUSED_BY_TOKEN_RATIO,
    options=DppoOptions,
    source=(
        "DPPO, arXiv:2602.04879; its authors' code (sail-sg/Stable-RL), cap 10; `delta: null` is 0.15 for `tv` and "
        "0.05 for `kl`, as in verl's examples"
    ),
    parts=(
        Part(
            "ℓ_t = −sg(min(r_t, {cap}))·A_t·curr",
            "DPPO: the ratio is a weight with an upper bound; a mask on probabilities is the trust region.",
        ),
        TOKEN_RATIO,
    ),
)
"""Divergence PPO: a mask in place of the clip removes tokens whose probability the update would move further off."""


class IpoOptions(StrictModel):
    """``loss_fn.options`` of ``ipo``."""

    eps: float = Field(default=0.3, gt=0, lt=1, description="Largest |π − μ| of a token that is trained on.")
    kl_tau: float = Field(
        default=0.0, ge=0, description="Weight τ of the penalty (log r)², which tokens that a mask removed have, too."
    )


def _ipo_masks(options: IpoOptions) -> Sequence[Mapping[str, Any]]:
    inside = {"statistic": "prob_diff", "min": -options.eps, "max": options.eps}
    return ({"log_ratio": "total", "level": "token", **inside, "label": "ipo"},)


def _ipo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.unclipped(inputs.log_ratio, inputs.advantages, penalty=inputs.options.kl_tau)


IPO = Variant(
    surrogate=_ipo,
    masks=_ipo_masks,
    defaults=_RATIO_AGAINST_GEN,
    refuses=REFUSED_BY_TOKEN_RATIO,
    options=IpoOptions,
    source="prime-rl's IPO (559b44772, with the defaults of its documentation)",
    parts=(
        Part(
            "ℓ_t = −r_t·A_t, plus {kl_tau}·(log r_t)² without weights and masks",
            "IPO: the ratio without a clip, and a mask on probabilities whatever the sign of the advantage.",
        ),
        TOKEN_RATIO,
    ),
)
"""Importance-weighted policy gradient within a two-sided bound on probabilities."""
