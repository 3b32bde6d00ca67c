"""PPO's clip and its relatives, as NeMo-RL's flags select them: clipped_pg, CISPO and REINFORCE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.objectives.policy_ratio import (
    REFUSED_BY_RATIO,
    REFUSED_BY_TOKEN_RATIO,
    SEQUENCE_RATIO,
    TOKEN_RATIO,
    clipped,
    pool_log_ratio,
)
from nemo_geomask.objectives.variant import Part, Parts, SurrogateInputs, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _reinforce(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.score_function(inputs.curr, inputs.advantages)


_SCORE_FUNCTION = Part("ℓ_t = −A_t·curr", "REINFORCE: the advantage times the log-prob, without ratio and clip.")
REINFORCE = Variant(
    surrogate=_reinforce,
    refuses={"use_cispo": REFUSED_BY_RATIO["use_cispo"], "ratio_clip_c": "the objective has no ratio to clip"},
    source="Williams (1992); verl `loss_type: reinforce`",
    parts=(_SCORE_FUNCTION,),
)
"""REINFORCE: clipped_pg under ``disable_ppo_ratio``.

With ``force_on_policy_ratio`` the weight against the mismatch is π_θ/μ instead of π_old/μ.
"""


def _cispo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    low, high = inputs.config.ratio_clip_min, inputs.config.ratio_clip_max
    return F.clipped_weight(inputs.log_ratio, inputs.curr, inputs.advantages, clip_min=low, clip_max=high)


_CISPO_PARTS = (
    Part(
        "ℓ_t = −sg(clip(r_t, {low}, {high}))·A_t·curr",
        "CISPO: every token keeps its gradient; the clipped ratio is only a weight.",
    ),
    TOKEN_RATIO,
)
CISPO = Variant(
    surrogate=_cispo,
    defaults={"ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
    refuses={key: reason for key, reason in REFUSED_BY_TOKEN_RATIO.items() if key != "use_cispo"},
    source="MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; upper bound 5 on the weight from ScaleRL, arXiv:2510.13786",
    parts=_CISPO_PARTS,
)
"""Clipped IS-weight Policy Optimization; by default no lower bound and an upper bound of 5."""


def _clipped_pg_parts(config: LossConfig) -> Parts:
    if config.force_on_policy_ratio:
        explanation = "The policy ratio is set to 1: plain policy gradient, on-policy."
        return (Part("ℓ_t = −r_t·A_t, r_t = 1", explanation),)
    if config.disable_ppo_ratio:
        return (_SCORE_FUNCTION,)
    if config.use_cispo:
        return _CISPO_PARTS
    r, ratio = ("s", SEQUENCE_RATIO) if config.sequence_level_importance_ratios else ("r_t", TOKEN_RATIO)
    formula = f"ℓ_t = max(−{r}·A_t, −clip({r}, {{low}}, {{high}})·A_t){{dual_clip:A_t}}"
    return Part(formula, "PPO's clip: no gradient from a ratio {outside}."), ratio


def _clipped_pg_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    config = inputs.config
    has_sequence_ratio = config.sequence_level_importance_ratios and not config.disable_ppo_ratio
    return pool_log_ratio(inputs) if has_sequence_ratio else {}


def _clipped_pg(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    if config.force_on_policy_ratio:
        # prev is the detached curr here, so the ratio is 1, but has a gradient. In NeMo-RL this flag takes precedence
        # over disable_ppo_ratio and over the sequence-level ratio.
        means = {}
    elif config.disable_ppo_ratio:
        return _reinforce(inputs, means)
    if config.use_cispo:
        return _cispo(inputs, means)
    return clipped(means.get("log_ratio", inputs.log_ratio), inputs, inputs.advantages)


CLIPPED_PG = Variant(
    surrogate=_clipped_pg,
    pool=_clipped_pg_pool,
    source="NeMo-RL ClippedPGLossFn: PPO, GRPO, DAPO, dual clip, RLOO, CISPO, GSPO by its flags",
    parts=_clipped_pg_parts,
)
"""The objectives that NeMo-RL's flags select.

If no setting of this package is used, this is NeMo-RL's own loss."""
