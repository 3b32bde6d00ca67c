"""The package's own objectives, each an entry point of group ``nemo_geomask.losses``.

``config/objectives.py`` has what a recipe's reader has to know of them; here are the functions that compute them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, objectives
from nemo_geomask.losses.variant import SurrogateInputs, Variant

__all__ = [
    "CISPO",
    "CLIPPED_PG",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "GSPO_TOKEN",
    "IPO",
    "REINFORCE",
    "SAPO",
    "VESPO",
]


def _pool_log_ratio(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"log_ratio": inputs.log_ratio}


def _clipped(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> F.Surrogate:
    low, high, dual = config.ratio_clip_min, config.ratio_clip_max, config.ratio_clip_c
    return F.clipped(log_ratio, advantages, clip_min=low, clip_max=high, dual_clip=dual)


def _clipped_pg_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    config = inputs.config
    has_sequence_ratio = config.sequence_level_importance_ratios and not config.disable_ppo_ratio
    return _pool_log_ratio(inputs) if has_sequence_ratio else {}


def _clipped_pg(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    config = inputs.config
    if config.force_on_policy_ratio:
        # prev is the detached curr here, so the ratio is 1, but has a gradient. In NeMo-RL this flag takes precedence
        # over disable_ppo_ratio and over the sequence-level ratio.
        means = {}
    elif config.disable_ppo_ratio:
        return F.score_function(inputs.curr, inputs.advantages)
    if config.use_cispo:
        return _cispo(inputs, means)
    return _clipped(means.get("log_ratio", inputs.log_ratio), inputs.advantages, config)


CLIPPED_PG = Variant.of(objectives.CLIPPED_PG, _clipped_pg, pool=_clipped_pg_pool)
"""The objectives that NeMo-RL's flags select.

If no setting of this package is used, this is NeMo-RL's own loss."""


def _gspo_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"log_ratio": inputs.log_ratio, "advantage": inputs.advantages}


def _gspo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return _clipped(means["log_ratio"], means["advantage"], inputs.config)


GSPO = Variant.of(objectives.GSPO, _gspo, pool=_gspo_pool)
"""Group Sequence Policy Optimization."""


def _gspo_token(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    log_ratio = F.straight_through_ratio(means["log_ratio"], inputs.curr)
    return _clipped(log_ratio, inputs.advantages, inputs.config)


GSPO_TOKEN = Variant.of(objectives.GSPO_TOKEN, _gspo_token, pool=_pool_log_ratio)
"""GSPO with per-token advantages; value and gradient equal GSPO's if all tokens have the same advantage."""


def _gmpo_clip(inputs: SurrogateInputs) -> Tensor:
    low, high = inputs.config.ratio_clip_min, inputs.config.ratio_clip_max
    return F.clip_log_ratio(inputs.log_ratio, inputs.advantages, clip_min=low, clip_max=high)


def _gmpo_pool(inputs: SurrogateInputs) -> Mapping[str, Tensor]:
    return {"clipped_log_ratio": _gmpo_clip(inputs), "advantage": inputs.advantages}


def _gmpo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    loss = F.geometric_mean(means["clipped_log_ratio"], means["advantage"])
    log_ratio, clipped_log_ratio = inputs.log_ratio.detach(), _gmpo_clip(inputs).detach()
    return F.Surrogate(loss, F.saturating_exp(log_ratio), F.saturating_exp(clipped_log_ratio))


GMPO = Variant.of(objectives.GMPO, _gmpo, pool=_gmpo_pool)
"""Geometric-Mean Policy Optimization."""


def _cispo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    low, high = inputs.config.ratio_clip_min, inputs.config.ratio_clip_max
    return F.clipped_weight(inputs.log_ratio, inputs.curr, inputs.advantages, clip_min=low, clip_max=high)


CISPO = Variant.of(objectives.CISPO, _cispo)
"""Clipped IS-weight Policy Optimization; by default no lower bound and an upper bound of 5."""


def _reinforce(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.score_function(inputs.curr, inputs.advantages)


REINFORCE = Variant.of(objectives.REINFORCE, _reinforce)
"""REINFORCE: clipped_pg under ``disable_ppo_ratio``.

With ``force_on_policy_ratio`` the weight against the mismatch is π_θ/μ instead of π_old/μ.
"""


def _sapo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    options = inputs.options
    return F.soft_gate(inputs.log_ratio, inputs.advantages, tau_pos=options.tau_pos, tau_neg=options.tau_neg)


SAPO = Variant.of(objectives.SAPO, _sapo)
"""Soft Adaptive Policy Optimization."""


def _dppo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    # CISPO's surrogate with the bounds 1 - clip_min = 0, which is none, and 1 + clip_max = cap.
    cap: float = inputs.options.cap
    return F.clipped_weight(inputs.log_ratio, inputs.curr, inputs.advantages, clip_min=1.0, clip_max=cap - 1)


DPPO = Variant.of(objectives.DPPO, _dppo)
"""Divergence PPO: a mask in place of the clip removes tokens whose probability the update would move further off."""


def _ipo(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.unclipped(inputs.log_ratio, inputs.advantages, penalty=inputs.options.kl_tau)


IPO = Variant.of(objectives.IPO, _ipo)
"""Importance-weighted policy gradient within a two-sided bound on probabilities."""


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


VESPO = Variant.of(objectives.VESPO, _vespo, pool=_pool_log_ratio, pooled_by="sum")
"""Variational sequence-level soft policy optimization: REINFORCE under a gamma-shaped weight."""


def _dro(inputs: SurrogateInputs, means: Mapping[str, Tensor]) -> F.Surrogate:
    return F.quadratic(inputs.log_ratio, inputs.curr, inputs.advantages, beta=inputs.options.beta)


DRO = Variant.of(objectives.DRO, _dro)
"""Direct Reward Optimization as in verl: a squared log-ratio in place of the clip."""
