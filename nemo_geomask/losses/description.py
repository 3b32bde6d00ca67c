"""Surrogates in plain words and as formulas: the one place, for ``nemo-geomask check`` and the reference alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig

__all__ = ["Part", "cispo", "clipped_pg", "gmpo", "gspo", "gspo_token", "number", "sapo"]


@dataclass(frozen=True)
class Part:
    """One part of an objective.

    Attributes:
        formula: a line of the formula.
        words: the same as a sentence.
    """

    formula: str
    words: str


def number(value: float) -> str:
    """Short, as one would write it."""
    return f"{value:.6g}"


def _clip(config: LossConfig, ratio: str) -> str:
    return f"clip({ratio}, {number(1 - config.ratio_clip_min)}, {number(1 + config.ratio_clip_max)})"


def _bounds(config: LossConfig) -> str:
    high, low = 1 + config.ratio_clip_max, 1 - config.ratio_clip_min
    return f"above {number(high)} where A > 0" + (f", or below {number(low)} where A < 0" if low > 0 else "")


def _clipped(config: LossConfig, ratio: str, advantage: str) -> str:
    loss = f"max(−{ratio}·{advantage}, −{_clip(config, ratio)}·{advantage})"
    if config.ratio_clip_c is not None:
        loss += f", at most {number(config.ratio_clip_c)}·|{advantage}| where {advantage} < 0"
    return loss


_SEQUENCE_RATIO = Part(
    "s = exp(mean_t(curr − prev))", "The policy ratio is one a sequence: the geometric mean of its tokens'."
)
_TOKEN_RATIO = Part("r_t = exp(curr − prev)", "The policy ratio is each token's own.")


def clipped_pg(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``clipped_pg``, by NeMo-RL's flags."""
    if config.force_on_policy_ratio:
        yield Part("ℓ_t = −r_t·A_t, r_t = 1", "The policy ratio is taken to be 1: plain policy gradient, on-policy.")
    elif config.disable_ppo_ratio:
        yield Part("ℓ_t = −A_t·curr", "REINFORCE: the advantage times the log-prob, no ratio and no clip.")
    elif config.use_cispo:
        yield from cispo(config, options)
    else:
        ratio = "s" if config.sequence_level_importance_ratios else "r_t"
        yield Part(
            f"ℓ_t = {_clipped(config, ratio, 'A_t')}", f"PPO's clip: no gradient from a ratio {_bounds(config)}."
        )
        yield _SEQUENCE_RATIO if ratio == "s" else _TOKEN_RATIO


def gspo(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``gspo``."""
    yield Part(f"ℓ = {_clipped(config, 's', 'Ā')}", f"GSPO's clip: no gradient from a ratio {_bounds(config)}.")
    yield _SEQUENCE_RATIO


def gspo_token(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``gspo_token``."""
    yield Part(
        f"ℓ_t = {_clipped(config, 's_t', 'A_t')}", f"GSPO-token's clip: no gradient from a ratio {_bounds(config)}."
    )
    yield Part(
        "s_t = sg[exp(mean_t(curr − prev))]·π/sg[π]",
        "The policy ratio has the sequence's value and each token's own gradient.",
    )


def gmpo(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``gmpo``."""
    low = math.log1p(-config.ratio_clip_min) if config.ratio_clip_min < 1 else -math.inf
    high = math.log1p(config.ratio_clip_max)
    yield Part(
        "ℓ = −Ā·exp(mean_t x_t)",
        f"GMPO: the geometric mean of token ratios, each clipped {_bounds(config)}.",
    )
    yield Part(
        f"x_t = min(curr − prev, {number(high)}) where Ā > 0, max(curr − prev, {number(low)}) where Ā < 0",
        "The clip acts where it would make the update larger.",
    )


def cispo(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``cispo``."""
    yield Part(
        f"ℓ_t = −sg({_clip(config, 'r_t')})·A_t·curr",
        "CISPO: every token keeps its gradient; the clipped ratio is a weight only.",
    )
    yield _TOKEN_RATIO


def sapo(config: LossConfig, options: Any) -> Iterator[Part]:
    """The surrogate of ``sapo``."""
    yield Part(
        f"ℓ_t = −(4/τ)·σ(τ·(r_t − 1))·A_t, τ = {number(options.tau_pos)} where A_t > 0, {number(options.tau_neg)} "
        "elsewhere",
        "SAPO: a soft gate in place of the clip.",
    )
    yield _TOKEN_RATIO
