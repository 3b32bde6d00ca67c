"""The control: the same recipe, model and seeds with NeMo-RL's own loss, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.checks import RecipeFacts
from nemo_geomask.checks.loss import NEMO_RL_FIELDS
from nemo_geomask.checks.tree import holds
from nemo_geomask.config.loss import LossConfig
from nemo_geomask.config.strict import as_yaml

__all__ = ["TOLERANCE", "Comparison", "compare", "control_overrides", "has_score_function", "inexpressible"]

TOLERANCE = 1e-5
"""Relative difference up to which two runs are the same."""
_ROUNDING = {"gen_kl_error": 2.0**-24, "loss": 2.0**-24}
"""Absolute ones, float32's rounding of 1: NeMo-RL takes e^x − 1 − x as it is written, which leaves that of a small x;
and a loss is a mean of terms of either sign and, where advantages are normalised, of size 1."""

# Objectives that are ClippedPGLossFn's own, with the switch that chooses them there.
_OWN: Mapping[str, Mapping[str, bool]] = {"clipped_pg": {}, "gspo": {}, "cispo": {"use_cispo": True}}
# What changes how the loss is computed, not what it is; and what it is called.
_NO_MATTER = frozenset({"name", "compile", "logprob_backend", "metrics", "nonfinite"})
# Equal as long as both runs sampled the same tokens, to the rounding of a mean over rows in another order.
_SAMPLED = ("reward", "mean_gen_tokens_per_sample", "total_num_tokens")
_COMPARED = ("loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "probs_ratio", "probs_ratio_clamped")


@dataclass(frozen=True)
class Comparison:
    """One metric at one step.

    Attributes:
        step: counted from 1.
        name: NeMo-RL's.
        ours: under the recipe's loss.
        theirs: under NeMo-RL's.
        sampled_alike: whether both had the same samples up to this step; only then are they to be equal.
    """

    step: int
    name: str
    ours: float
    theirs: float
    sampled_alike: bool

    @property
    def difference(self) -> float:
        """Relative to the larger of both."""
        if self.ours == self.theirs or (math.isnan(self.ours) and math.isnan(self.theirs)):
            return 0.0
        return abs(self.ours - self.theirs) / max(abs(self.ours), abs(self.theirs))

    @property
    def equal(self) -> bool:
        """Within :data:`TOLERANCE`, or what NeMo-RL's own rounding makes of the metric; a NaN equals only another."""
        return self.difference <= TOLERANCE or abs(self.ours - self.theirs) <= _ROUNDING.get(self.name, 0.0)


def has_score_function(checkout: Path) -> bool:
    """Whether a NeMo-RL's own KL term is differentiated through the samples as well; v0.6.0's is not (docs/kl.md)."""
    utils = "algorithms/utils.py"
    return holds(checkout, utils, "importance_sampling_weights") or not (checkout / "nemo_rl" / utils).is_file()


def inexpressible(facts: RecipeFacts, *, score_function: bool = True) -> tuple[str, ...]:
    """Settings of the recipe's loss that NeMo-RL's own has not, as ``key: value``; none: it can be compared.

    Args:
        facts: the recipe.
        score_function: as :func:`has_score_function`.
    """
    if facts.nameless:
        return ("loss_fn.name: null, so NeMo-RL's own loss is what trains",)
    config, default = facts.config, LossConfig()
    found = [] if config.name in _OWN else [f"loss_fn.name: {config.name}"]
    expressed = set(NEMO_RL_FIELDS) | _NO_MATTER
    if not score_function:
        kind, gradient = config.reference_policy_kl_type, config.reference_policy_kl_gradient
        expressed.add("reference_policy_kl_gradient")
        if config.reference_policy_kl_penalty and not config.use_kl_in_reward and gradient != kind:
            found.append(f"loss_fn.reference_policy_kl_gradient: {gradient or 'null'} (this NeMo-RL's is {kind})")
    for key in LossConfig.model_fields:
        value = getattr(config, key)
        if key in expressed or value == getattr(default, key):
            continue
        # NeMo-RL derives the level from that of the ratios.
        if key == "is_correction_level" and (
            not config.use_importance_sampling_correction
            or value == ("sequence" if config.sequence_level_importance_ratios else "token")
        ):
            continue
        found.append(f"loss_fn.{key}: {value}")
    return tuple(found)


def control_overrides(facts: RecipeFacts) -> tuple[str, ...]:
    """Overrides that make NeMo-RL's own loss of a recipe's, which can be expressed by it."""
    config = facts.config
    own = [key for key in facts.given if key not in NEMO_RL_FIELDS and facts.given[key] is not None]
    switches = {key: getattr(config, key) for key in sorted(NEMO_RL_FIELDS) if hasattr(config, key)}
    switches |= _OWN[config.name]
    default = LossConfig()
    written = {key: value for key, value in switches.items() if value != getattr(default, key) or key in facts.given}
    return (
        *(f"~loss_fn.{key}" for key in own),
        *(f"++loss_fn.{key}={as_yaml(value)}" for key, value in written.items()),
    )


def compare(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> Iterator[Comparison]:
    """Step by step, the metrics that both runs logged."""
    alike = True
    for step in sorted(set(ours) & set(theirs)):
        mine, other = ours[step], theirs[step]
        alike = alike and all(_same(mine.get(name), other.get(name)) for name in _SAMPLED)
        for name in _COMPARED:
            if name in mine and name in other:
                yield Comparison(step, name, mine[name], other[name], alike)


def _same(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=1e-6)
