"""The package's own objectives: what each prescribes and refuses, its options, its formula and its source.

``nemo-geomask check`` and ``docs/reference/loss_reference.md`` take an objective's formula from its ``parts``. The
functions that compute an objective are in ``losses/variants.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.objective import Objective, Part, Parts
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.strict import StrictModel

__all__ = [
    "CISPO",
    "CLIPPED_PG",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "GSPO_TOKEN",
    "IPO",
    "LOSSES",
    "OBJECTIVES",
    "REINFORCE",
    "SAPO",
    "VESPO",
    "load_objective",
]

_NEEDS_RATIO = "the objective needs the ratio that this setting removes"
# Settings that an objective with a policy ratio refuses, each with the reason.
_REFUSED_BY_RATIO = {
    "use_cispo": "the objective is not CISPO; use name: cispo",
    "disable_ppo_ratio": _NEEDS_RATIO,
    "force_on_policy_ratio": _NEEDS_RATIO,
}
# Settings that an objective refuses if it also fixes the ratio's level and has no dual clip.
_REFUSED_BY_TOKEN_RATIO = {
    **_REFUSED_BY_RATIO,
    "sequence_level_importance_ratios": "the objective defines the level of its ratio itself",
    "ratio_clip_c": "the objective has no dual clip",
}

_SEQUENCE_RATIO = Part(
    "s = exp(mean_t(curr − {ratio_anchor}))",
    "Each sequence has one policy ratio: the geometric mean of its tokens' ratios.",
)
_TOKEN_RATIO = Part("r_t = exp(curr − {ratio_anchor})", "Each token has its own policy ratio.")


def _clipped_pg_parts(config: LossConfig) -> Parts:
    if config.force_on_policy_ratio:
        explanation = "The policy ratio is set to 1: plain policy gradient, on-policy."
        return (Part("ℓ_t = −r_t·A_t, r_t = 1", explanation),)
    if config.disable_ppo_ratio:
        return (_SCORE_FUNCTION,)
    if config.use_cispo:
        return _CISPO_PARTS
    r, ratio = ("s", _SEQUENCE_RATIO) if config.sequence_level_importance_ratios else ("r_t", _TOKEN_RATIO)
    formula = f"ℓ_t = max(−{r}·A_t, −clip({r}, {{low}}, {{high}})·A_t){{dual_clip:A_t}}"
    return Part(formula, "PPO's clip: no gradient from a ratio {outside}."), ratio


CLIPPED_PG = Objective(
    source="NeMo-RL ClippedPGLossFn: PPO, GRPO, DAPO, dual clip, RLOO, CISPO, GSPO by its flags",
    parts=_clipped_pg_parts,
)
"""The objectives that NeMo-RL's flags select.

If no setting of this package is used, this is NeMo-RL's own loss."""


GSPO = Objective(
    defaults={"token_level_loss": False, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
    forces={"sequence_level_importance_ratios": True},
    refuses=_REFUSED_BY_RATIO,
    source="GSPO, arXiv:2507.18071 eq. 5 and 7; clip bounds from its section 5.1",
    parts=(
        Part(
            "ℓ = max(−s·Ā, −clip(s, {low}, {high})·Ā){dual_clip:Ā}", "GSPO's clip: no gradient from a ratio {outside}."
        ),
        _SEQUENCE_RATIO,
    ),
)
"""Group Sequence Policy Optimization."""


GSPO_TOKEN = replace(
    GSPO,
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


GMPO = Objective(
    defaults={"token_level_loss": False, "ratio_clip_min": 1.0 - math.exp(-0.4), "ratio_clip_max": math.exp(0.4) - 1.0},
    refuses=_REFUSED_BY_TOKEN_RATIO,
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


_CISPO_PARTS = (
    Part(
        "ℓ_t = −sg(clip(r_t, {low}, {high}))·A_t·curr",
        "CISPO: every token keeps its gradient; the clipped ratio is only a weight.",
    ),
    _TOKEN_RATIO,
)
CISPO = Objective(
    defaults={"ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
    refuses={key: reason for key, reason in _REFUSED_BY_TOKEN_RATIO.items() if key != "use_cispo"},
    source="MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; upper bound 5 on the weight from ScaleRL, arXiv:2510.13786",
    parts=_CISPO_PARTS,
)
"""Clipped IS-weight Policy Optimization; by default no lower bound and an upper bound of 5."""


_SCORE_FUNCTION = Part("ℓ_t = −A_t·curr", "REINFORCE: the advantage times the log-prob, without ratio and clip.")
REINFORCE = Objective(
    refuses={"use_cispo": _REFUSED_BY_RATIO["use_cispo"], "ratio_clip_c": "the objective has no ratio to clip"},
    source="Williams (1992); verl `loss_type: reinforce`",
    parts=(_SCORE_FUNCTION,),
)
"""REINFORCE: clipped_pg under ``disable_ppo_ratio``.

With ``force_on_policy_ratio`` the weight against the mismatch is π_θ/μ instead of π_old/μ.
"""


class SapoOptions(StrictModel):
    """``loss_fn.options`` of ``sapo``."""

    tau_pos: float = Field(default=1.0, gt=0, description="Temperature τ of the gate where the advantage is positive.")
    tau_neg: float = Field(
        default=1.05, gt=0, description="Temperature τ of the gate where the advantage is 0 or less."
    )


_TEMPERATURES = "τ = {tau_pos} where A_t > 0, {tau_neg} elsewhere"
SAPO = Objective(
    defaults={"token_level_loss": False},
    refuses=_REFUSED_BY_TOKEN_RATIO,
    options=SapoOptions,
    source="SAPO, arXiv:2511.20347 eq. 5 and 6",
    parts=(
        Part(f"ℓ_t = −(4/τ)·σ(τ·(r_t − 1))·A_t, {_TEMPERATURES}", "SAPO: a smooth gate in place of the clip."),
        _TOKEN_RATIO,
    ),
)
"""Soft Adaptive Policy Optimization."""


# Default settings of objectives whose ratio is π_θ/μ, where μ is the policy that sampled the tokens.
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


DPPO = Objective(
    masks=_dppo_masks,
    defaults=_RATIO_AGAINST_GEN,
    refuses=_REFUSED_BY_TOKEN_RATIO,
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
        _TOKEN_RATIO,
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


IPO = Objective(
    masks=_ipo_masks,
    defaults=_RATIO_AGAINST_GEN,
    refuses=_REFUSED_BY_TOKEN_RATIO,
    options=IpoOptions,
    source="prime-rl's IPO (559b44772, with the defaults of its documentation)",
    parts=(
        Part(
            "ℓ_t = −r_t·A_t, plus {kl_tau}·(log r_t)² without weights and masks",
            "IPO: the ratio without a clip, and a mask on probabilities whatever the sign of the advantage.",
        ),
        _TOKEN_RATIO,
    ),
)
"""Importance-weighted policy gradient within a two-sided bound on probabilities."""


class VespoOptions(StrictModel):
    """``loss_fn.options`` of ``vespo``."""

    k_pos: float = Field(default=2.0, gt=0, description="Exponent k of the weight where the advantage is 0 or more.")
    lambda_pos: float = Field(
        default=3.0, gt=0, description="Decay rate λ where the advantage is 0 or more; the weight peaks at W = k/λ."
    )
    k_neg: float = Field(default=3.0, gt=0, description="Exponent k of the weight where the advantage is negative.")
    lambda_neg: float = Field(default=2.0, gt=0, description="Decay rate λ where the advantage is negative.")


VESPO = Objective(
    defaults=_RATIO_AGAINST_GEN,
    refuses=_REFUSED_BY_TOKEN_RATIO,
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


class DroOptions(StrictModel):
    """``loss_fn.options`` of ``dro``."""

    beta: float = Field(default=1.0, gt=0, description="Weight β of the squared log-ratio; verl has no default.")


DRO = Objective(
    refuses=_REFUSED_BY_TOKEN_RATIO,
    options=DroOptions,
    source="verl `loss_mode: dro` (1dda039b9)",
    parts=(
        Part(
            "ℓ_t = −(A_t·curr − {beta}/2·(curr − {ratio_anchor})²)",
            "DRO: REINFORCE with a quadratic penalty that pulls the ratio to 1.",
        ),
    ),
)
"""Direct Reward Optimization as in verl: a squared log-ratio in place of the clip."""


OBJECTIVES = {
    "clipped_pg": CLIPPED_PG,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "gmpo": GMPO,
    "cispo": CISPO,
    "reinforce": REINFORCE,
    "sapo": SAPO,
    "dppo": DPPO,
    "ipo": IPO,
    "vespo": VESPO,
    "dro": DRO,
}
"""Each objective by the name that a recipe gives."""

LOSSES: PluginGroup[Objective] = PluginGroup(
    group="nemo_geomask.losses",
    noun="loss",
    key="loss_fn.name",
    requirement="a nemo_geomask.losses.Variant instance (data plus one function, see docs/how_to/plugins.md)",
    # An objective alone computes nothing.
    accepts=lambda variant: isinstance(variant, Objective) and type(variant) is not Objective,
    built_in={name: f"nemo_geomask.losses.variants:{name.upper()}" for name in OBJECTIVES},
    # Papers' names for losses that NeMo-RL's flags select. Without them, "grpo" would suggest the similar name "gspo".
    aliases=dict.fromkeys(("grpo", "dapo", "ppo", "rloo"), "clipped_pg"),
)
"""The entry-point group of the losses, with this package's own, the same as in pyproject.toml."""


def load_objective(name: str) -> Objective:
    """Return the objective of a registered name, or of ``module:attribute``.

    This package's own are returned without the code that computes them, so that reading a recipe needs no torch.

    Raises: PluginError: see :meth:`~nemo_geomask.config.plugins.PluginGroup.load`.
    """
    return OBJECTIVES[name] if LOSSES.is_built_in(name) else LOSSES.load(name)
