"""Control run: the same recipe, model and seeds with NeMo-RL's own loss, and the differences between the two runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.errors import GeomaskError
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.diagnose import find_run, read_step
from nemo_geomask.tools.rehearse.setting_changes import Change

TOLERANCE = 1e-5
"""Largest relative difference between metrics that count as equal."""
_ROUNDING = {"gen_kl_error": 2.0**-24, "loss": 2.0**-24}
"""Absolute differences that also count as equal: float32's rounding of 1.

For small x, NeMo-RL's e^x − 1 − x (gen_kl_error) has the rounding error of e^x, which is about 1. With normalised
advantages, a loss is a mean of positive and negative terms of size 1, which may cancel.
"""

# Objectives that ClippedPGLossFn has, with the switches that select them there.
_NEMO_RL_OBJECTIVES: Mapping[str, Mapping[str, bool]] = {"clipped_pg": {}, "gspo": {}, "cispo": {"use_cispo": True}}
# Fields that name the loss or choose how it is computed; they do not change its value.
_NOT_COMPARED = frozenset({"name", "compare_ranks", "compile", "logprob_backend", "metrics", "nonfinite"})
# Metrics that are equal as long as both runs sampled the same tokens, up to the order of summation.
_SAMPLE_METRICS = ("reward", "mean_gen_tokens_per_sample", "total_num_tokens")
_COMPARED = ("loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "probs_ratio", "probs_ratio_clamped")


@dataclass(frozen=True)
class Comparison:
    """One metric of two runs at one step."""

    step: int  # counted from 1
    name: str  # NeMo-RL's name of the metric
    ours: float  # value under the recipe's loss
    theirs: float  # value under NeMo-RL's loss
    sampled_alike: bool  # True if both runs drew the same samples up to this step; only then must the values be equal

    @property
    def difference(self) -> float:
        """Difference relative to the larger value."""
        if self.ours == self.theirs or (math.isnan(self.ours) and math.isnan(self.theirs)):
            return 0.0
        return abs(self.ours - self.theirs) / max(abs(self.ours), abs(self.theirs))

    @property
    def equal(self) -> bool:
        """True within :data:`TOLERANCE` or the metric's rounding error; NaN equals only NaN."""
        return self.difference <= TOLERANCE or abs(self.ours - self.theirs) <= _ROUNDING.get(self.name, 0.0)


def settings_of_ours_alone(facts: RecipeFacts, *, score_function: bool = True) -> tuple[str, ...]:
    """Return the settings of the recipe's loss that NeMo-RL's loss does not have, as ``key: value``.

    Args:
        score_function: from :func:`~nemo_geomask.hosts.nemo_rl.facts.has_kl_score_function`.
    """
    if facts.trains_nemo_rl_loss:
        return ("loss_fn.name: null, so NeMo-RL's own loss trains",)
    config, default = facts.config, LossConfig()
    unsupported = [] if config.name in _NEMO_RL_OBJECTIVES else [f"loss_fn.name: {config.name}"]
    if config.reference_policy_kl_type == "k4":
        unsupported.append("loss_fn.reference_policy_kl_type: k4")
    if facts.is_true("policy.sequence_packing.enabled") and config.positive_example_nll_weight:
        unsupported.append("loss_fn.positive_example_nll_weight under packing (a count of each sequence, not of a row)")
    expressible = set(LOSS_FIELDS) | _NOT_COMPARED
    if not score_function:
        estimator, gradient = config.reference_policy_kl_type, config.reference_policy_kl_gradient
        expressible.add("reference_policy_kl_gradient")
        if config.reference_policy_kl_penalty and not config.use_kl_in_reward and gradient != estimator:
            unsupported.append(
                f"loss_fn.reference_policy_kl_gradient: {gradient or 'null'} (this NeMo-RL's is {estimator})"
            )
    for key in LossConfig.model_fields:
        value = getattr(config, key)
        if key in expressible or value == getattr(default, key):
            continue
        # NeMo-RL corrects at the level of its importance ratios, so this value says the same.
        if key == "is_correction_level" and (
            not config.use_importance_sampling_correction
            or value == ("sequence" if config.sequence_level_importance_ratios else "token")
        ):
            continue
        unsupported.append(f"loss_fn.{key}: {value}")
    return tuple(unsupported)


def control_overrides(facts: RecipeFacts) -> tuple[str, ...]:
    """Return overrides that replace the recipe's loss by NeMo-RL's own.

    The recipe must have no :func:`settings_of_ours_alone`.
    """
    config = facts.config
    plugin_keys = [key for key in facts.loss_block if key not in LOSS_FIELDS and facts.loss_block[key] is not None]
    switches = {key: getattr(config, key) for key in sorted(LOSS_FIELDS) if hasattr(config, key)}
    switches |= _NEMO_RL_OBJECTIVES[config.name]
    default = LossConfig()
    written = {
        key: value for key, value in switches.items() if value != getattr(default, key) or key in facts.loss_block
    }
    return (
        *(f"~loss_fn.{key}" for key in plugin_keys),
        *(override for key, value in written.items() for override in Change(f"loss_fn.{key}", value).overrides),
    )


Samples = Mapping[int, Sequence[Sequence[float]]]
"""By step, token ids and the sampler's log-probs of the trained tokens, one after another."""


def read_samples(source: Path) -> Samples:
    """Return what a run sampled, from its records or NeMo-RL's logs; empty if they can't be read."""
    try:
        run = find_run(source)
        samples = {}
        for step in run.steps:
            blocks = [(block.tokens, block.tokens["mask"].astype(bool)) for block in read_step(run, step)]
            names = [name for name in ("tokens", "gen") if all(name in tokens for tokens, _ in blocks)]
            samples[step] = [[x for tokens, mask in blocks for x in tokens[name][mask].tolist()] for name in names]
    except GeomaskError:
        return {}
    return samples


def compare(
    ours: Mapping[int, Mapping[str, float]],
    theirs: Mapping[int, Mapping[str, float]],
    samples: tuple[Samples, Samples] = ({}, {}),
) -> Iterator[Comparison]:
    """Compare the metrics that both runs logged, step by step.

    Args:
        samples: what each run sampled; empty where it is not known. Steps are alike only as long as it is the same.
    """
    alike = True
    for step in sorted(set(ours) & set(theirs)):
        our_metrics, their_metrics = ours[step], theirs[step]
        alike = alike and all(_same(our_metrics.get(name), their_metrics.get(name)) for name in _SAMPLE_METRICS)
        alike = alike and _sampled_alike(*(side.get(step, ()) for side in samples))
        for name in _COMPARED:
            if name in our_metrics and name in their_metrics:
                yield Comparison(step, name, our_metrics[name], their_metrics[name], alike)


def _same(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6)


def _sampled_alike(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
    """Return True if tokens are the same and the sampler's log-probs are within :data:`TOLERANCE`, or not known."""
    if not (ours and theirs):
        return True
    close = functools.partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return all(len(a) == len(b) and all(map(close, a, b)) for a, b in zip(ours, theirs, strict=True))
