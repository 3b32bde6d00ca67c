"""What runs came to: measures that were fixed before any run was looked at, and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from nemo_geomask.lab.runs import Course

__all__ = [
    "TARGET",
    "VariantSummary",
    "by_variant",
    "collapsed",
    "final",
    "outcomes",
    "paired_interval",
    "steps_to",
    "student_t",
]

#: Steps that a reward is averaged over; one batch of rewards alone is noisy.
WINDOW = 10
#: Reward to which the time is taken, unless another is asked for.
TARGET = 0.5
# Of a collapse: the least that must have been gained, and the part of it that must be lost.
_GAIN, _LOST = 0.05, 0.5

Row = dict[str, Any]


def final(rewards: Sequence[float]) -> float:
    """Mean reward of the last ten steps."""
    return fmean(rewards[-WINDOW:])


def collapsed(rewards: Sequence[float]) -> bool:
    r"""Whether a run lost at least half of what it had gained, and had not got it back by its end.

    With :math:`m_k` the mean reward of the ten steps that end with step k, the gain is :math:`\max_k m_k` less that of
    the first ten steps. A run collapsed if the gain was at least 0.05 and the last :math:`m_k` lies at least half of it
    below the highest. A run that never learned did not collapse; a run with fewer than 20 steps can't be judged and
    counts as not collapsed.
    """
    if len(rewards) < 2 * WINDOW:
        return False
    means = _means(rewards)
    gain = max(means) - means[0]
    return gain >= _GAIN and max(means) - means[-1] >= _LOST * gain


def steps_to(target: float, rewards: Sequence[float]) -> int | None:
    """The step with which the mean of ten steps first reaches a reward; None: it never does."""
    reached = (step for step, mean in enumerate(_means(rewards), start=WINDOW) if mean >= target)
    return next(reached, None)


def paired_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean difference over seeds, by Student's t; None with fewer than two seeds.

    Pairs share weights and prompts, so what a seed does to both is gone from their difference. t, and no bootstrap of
    the pairs: with 3 to 10 of them a percentile bootstrap is too narrow, since it can't show a spread that the few
    pairs don't have.
    """
    count = len(differences)
    if count < 2:
        return None
    half = student_t(count - 1) * stdev(differences) / math.sqrt(count)
    mean = fmean(differences)
    return mean - half, mean + half


@dataclass(frozen=True)
class VariantSummary:
    """One variant over its seeds.

    Attributes:
        label: of the variant.
        curves: its runs.
        row: the numbers of the table, by name; None for what its loss does not report.
    """

    label: str
    curves: Sequence[Course]
    row: Row


def outcomes(curves: Sequence[Course], *, target: float = TARGET) -> list[VariantSummary]:
    """A row a variant; differences are to the first variant, on the seeds that both have.

    Args:
        curves: runs, finished or not; what is not finished is counted and left out of all rewards.
        target: reward to which the time is taken.
    """
    variants = by_variant(curves)
    base = {curve.seed: final(curve.series("reward")) for curve in next(iter(variants.values())) if curve.finished}
    found: list[VariantSummary] = []
    for label, runs in variants.items():
        done = [run for run in runs if run.finished]
        rewards = {run.seed: run.series("reward") for run in done}
        times = [steps_to(target, series) for series in rewards.values()]
        reached = [time for time in times if time is not None]
        differences = [final(rewards[seed]) - base[seed] for seed in rewards if seed in base and found]
        row: Row = {
            "variant": label,
            "seeds": sorted(rewards),
            "unfinished": sorted(run.seed for run in runs if not run.finished),
            "errors": {run.seed: run.facts["error"] for run in runs if "error" in run.facts},
            "corrected": bool(runs[0].facts["corrected"]),
            "reward_first": _mean([series[0] for series in rewards.values()]),
            "reward_last": _mean([final(series) for series in rewards.values()]),
            "reward_last_by_seed": {seed: final(series) for seed, series in sorted(rewards.items())},
            "validation": _mean([_last(run.series("validation/reward")) for run in done]),
            "difference": _mean(differences),
            "interval": paired_interval(differences),
            "collapses": sum(collapsed(series) for series in rewards.values()),
            "target": target,
            "reached": len(reached),
            "steps_to_target": median(reached) if reached else None,
            "seconds": _mean([sum(run.series("step_seconds")) for run in done]),
        }
        for name, key in _MEANS.items():
            row[name] = _mean([_mean(run.series(key)) for run in runs])
        found.append(VariantSummary(label, runs, row))
    return found


_MEANS = {
    "mismatch_abs": "geomask/mismatch_abs",
    "mismatch_k3": "geomask/mismatch_k3",
    "weight": "geomask/weight_mean",
    "ess_fraction": "geomask/weight_ess",
    "removed": "removed",
    "clip_fraction_low": "geomask/clip_fraction_low",
    "clip_fraction_high": "geomask/clip_fraction_high",
    "skipped_updates": "skipped_update",
    "dropped_sequences": "geomask/dropped_sequences",
}


def by_variant(curves: Sequence[Course]) -> Mapping[str, list[Course]]:
    """Runs by label, in order of appearance."""
    variants: dict[str, list[Course]] = {}
    for curve in curves:
        variants.setdefault(curve.label, []).append(curve)
    return variants


def _means(rewards: Sequence[float]) -> list[float]:
    return [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(present) if present else None


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if math.isfinite(value)), None)


# For 1, 2, … degrees of freedom.
_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student_t(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    # The expansion about the normal quantile (Abramowitz and Stegun, 26.7.5).
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2
