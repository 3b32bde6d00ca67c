"""The objectives that come with the package; each is an entry point of group ``nemo_geomask.losses``.

Their formulas stand in :mod:`nemo_geomask.losses.description`, from which ``nemo-geomask check`` and
``docs/loss_reference.md`` take them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import StrictModel
from nemo_geomask.losses import description
from nemo_geomask.losses.variant import SurrogateInputs, Variant

__all__ = ["CISPO", "CLIPPED_PG", "GMPO", "GSPO", "GSPO_TOKEN", "SAPO", "SapoOptions"]

_NO_CISPO = "the objective is not CISPO; use name: cispo"
_NEEDS_RATIO = "the objective is defined on the ratio that this setting removes"
_OWN_RATIO = "the objective defines the level of its ratio itself"
_NO_DUAL_CLIP = "the objective has no dual clip"

# What objectives on a ratio refuse, and those of them that clip or gate token by token.
_OF_RATIOS = {"use_cispo": _NO_CISPO, "disable_ppo_ratio": _NEEDS_RATIO, "force_on_policy_ratio": _NEEDS_RATIO}
_OF_TOKEN_RATIOS = {**_OF_RATIOS, "sequence_level_importance_ratios": _OWN_RATIO, "ratio_clip_c": _NO_DUAL_CLIP}


def _pool_log_ratio(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"log_ratio": inputs.log_ratio}


def _pool_log_ratio_and_advantage(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"log_ratio": inputs.log_ratio, "advantage": inputs.advantages}


def _clipped_pg_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    config = inputs.config
    pooled = config.sequence_level_importance_ratios and not config.disable_ppo_ratio
    return _pool_log_ratio(inputs) if pooled else {}


def _clipped_pg(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    log_ratio = means.get("log_ratio", inputs.log_ratio)
    if config.force_on_policy_ratio:
        # prev is curr here, so the ratio is 1 and only its gradient counts; NeMo-RL lets this flag win over
        # disable_ppo_ratio and over the sequence-level ratio.
        log_ratio = inputs.log_ratio
    elif config.disable_ppo_ratio:
        return F.score_function(inputs.curr, inputs.advantages)
    clip = {"clip_min": config.ratio_clip_min, "clip_max": config.ratio_clip_max}
    if config.use_cispo:
        return F.clipped_weight(log_ratio, inputs.curr, inputs.advantages, **clip)
    return F.clipped(log_ratio, inputs.advantages, dual_clip=config.ratio_clip_c, **clip)


def _gspo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    return F.clipped(
        means["log_ratio"],
        means["advantage"],
        clip_min=config.ratio_clip_min,
        clip_max=config.ratio_clip_max,
        dual_clip=config.ratio_clip_c,
    )


def _gspo_token(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    return F.clipped(
        F.straight_through_ratio(means["log_ratio"], inputs.curr),
        inputs.advantages,
        clip_min=config.ratio_clip_min,
        clip_max=config.ratio_clip_max,
        dual_clip=config.ratio_clip_c,
    )


def _gmpo_clip(inputs: SurrogateInputs) -> Tensor:
    config = inputs.config
    return F.clip_log_ratio(
        inputs.log_ratio, inputs.advantages, clip_min=config.ratio_clip_min, clip_max=config.ratio_clip_max
    )


def _gmpo_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"clipped_log_ratio": _gmpo_clip(inputs), "advantage": inputs.advantages}


def _gmpo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    ratio, clipped = inputs.log_ratio.detach(), _gmpo_clip(inputs).detach()
    return F.Surrogate(
        F.geometric_mean(means["clipped_log_ratio"], means["advantage"]),
        F.saturating_exp(ratio),
        F.saturating_exp(clipped),
    )


def _cispo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    return F.clipped_weight(
        inputs.log_ratio,
        inputs.curr,
        inputs.advantages,
        clip_min=config.ratio_clip_min,
        clip_max=config.ratio_clip_max,
    )


class SapoOptions(StrictModel):
    """``loss_fn.options`` of ``sapo``."""

    tau_pos: float = Field(default=1.0, gt=0, description="Gate temperature where the advantage is positive.")
    tau_neg: float = Field(default=1.05, gt=0, description="Gate temperature elsewhere.")


def _sapo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    options: SapoOptions = inputs.options
    return F.soft_gate(inputs.log_ratio, inputs.advantages, tau_pos=options.tau_pos, tau_neg=options.tau_neg)


CLIPPED_PG = Variant(
    surrogate=_clipped_pg,
    pool=_clipped_pg_pool,
    source="NeMo-RL ClippedPGLossFn: PPO, GRPO, DAPO, dual clip, RLOO, CISPO, GSPO by its flags",
    describe=description.clipped_pg,
)
"""All that NeMo-RL's flags select; with no new setting, NeMo-RL's own loss."""

GSPO = Variant(
    surrogate=_gspo,
    pool=_pool_log_ratio_and_advantage,
    defaults={
        "token_level_loss": False,
        "ratio_clip_min": 3e-4,
        "ratio_clip_max": 4e-4,
    },
    forces={"sequence_level_importance_ratios": True},
    refuses=_OF_RATIOS,
    source="GSPO, arXiv:2507.18071 eq. 5 and 7; clip bounds from its section 5.1",
    describe=description.gspo,
)
"""Group Sequence Policy Optimization."""

GSPO_TOKEN = Variant(
    surrogate=_gspo_token,
    pool=_pool_log_ratio,
    defaults=GSPO.defaults,
    forces=GSPO.forces,
    refuses=GSPO.refuses,
    source="GSPO-token, arXiv:2507.18071 eq. 13 and 14",
    describe=description.gspo_token,
)
"""GSPO with per-token advantages; equal to GSPO, value and gradient, when the advantage is the same at every token."""

GMPO = Variant(
    surrogate=_gmpo,
    pool=_gmpo_pool,
    defaults={
        "token_level_loss": False,
        "ratio_clip_min": 1.0 - math.exp(-0.4),
        "ratio_clip_max": math.exp(0.4) - 1.0,
    },
    refuses=_OF_TOKEN_RATIOS,
    source="GMPO, arXiv:2507.20673 eq. 4; bounds (e^-0.4, e^0.4)",
    describe=description.gmpo,
)
"""Geometric-Mean Policy Optimization."""

CISPO = Variant(
    surrogate=_cispo,
    defaults={"ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
    refuses={key: reason for key, reason in _OF_TOKEN_RATIOS.items() if key != "use_cispo"},
    source="MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; upper bound 5 on the weight from ScaleRL, arXiv:2510.13786",
    describe=description.cispo,
)
"""Clipped IS-weight Policy Optimization; by default no lower bound and an upper bound of 5."""

SAPO = Variant(
    surrogate=_sapo,
    defaults={"token_level_loss": False},
    refuses=_OF_TOKEN_RATIOS,
    options=SapoOptions,
    source="SAPO, arXiv:2511.20347 eq. 5 and 6",
    describe=description.sapo,
)
"""Soft Adaptive Policy Optimization."""
