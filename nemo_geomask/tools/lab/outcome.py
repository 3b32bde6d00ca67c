"""Outcome measures of runs, fixed before any run was evaluated, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.shared.intervals import mean_interval

WINDOW = 10
"""Number of steps over which a reward is averaged, since the mean reward of one batch is noisy."""
_LEARNED = 0.5  # reward from which on a run can't have died
# A run collapsed if its reward rose by at least _MIN_GAIN and then lost at least the fraction _MIN_LOSS of that gain.
_MIN_GAIN, _MIN_LOSS = 0.05, 0.5
# A run died if its gradient or its entropy is as good as zero at its end.
_DEAD_GRADIENT, _DEAD_ENTROPY = 1e-3, 0.01

Row = dict[str, Any]


def final_reward(rewards: Sequence[float]) -> float:
    """Return the mean reward of the last ten steps."""
    return fmean(rewards[-WINDOW:])


def has_collapsed(rewards: Sequence[float]) -> bool:
    r"""Return True if a run's reward fell by at least half of its gain and did not recover by the end.

    Let :math:`m_k` be the mean reward of the ten steps that end with step k. The gain is :math:`\max_k m_k` minus the
    mean reward of the first ten steps. A run collapsed if the gain was at least 0.05 and the last :math:`m_k` is below
    the highest by at least half of the gain. A run that never learned did not collapse. A run with fewer than 20 steps
    can't be judged and counts as not collapsed.
    """
    if len(rewards) < 2 * WINDOW:
        return False
    means = _moving_means(rewards)
    gain = max(means) - means[0]
    return gain >= _MIN_GAIN and max(means) - means[-1] >= _MIN_LOSS * gain


def best_reward(rewards: Sequence[float]) -> float:
    """Return the largest mean reward of ten consecutive steps; with fewer steps, the mean of all."""
    return max(_moving_means(rewards), default=fmean(rewards))


def has_died(run: RunCurves) -> bool:
    r"""Return True if a run can't learn any more, although its reward is low.

    Means are over the last ten steps. A run died if its mean reward is below 0.5, and its mean gradient norm is
    below 1e-3 of that of its first ten steps or its mean entropy, ``approx_entropy``, below 0.01 nats. Such a run may
    end far above chance, so :func:`has_collapsed` does not see it. A run with fewer than 20 steps can't be judged and
    counts as alive.
    """
    if run.steps < 2 * WINDOW or final_reward(run.series("reward")) >= _LEARNED:
        return False
    norms, entropies = run.series("grad_norm"), run.series("approx_entropy")
    has_no_gradient = fmean(norms[-WINDOW:]) < _DEAD_GRADIENT * fmean(norms[:WINDOW])
    return has_no_gradient or fmean(entropies[-WINDOW:]) < _DEAD_ENTROPY


@dataclass(frozen=True)
class VariantSummary:
    """Results of one variant over its seeds: its runs, and its entry of ``summary.json``.

    In the row, a metric that the loss does not report is None.
    """

    label: str
    curves: Sequence[RunCurves]
    row: Row


def summarize_variants(curves: Sequence[RunCurves]) -> list[VariantSummary]:
    """Summarize each variant; differences are from the first variant, over the seeds that both variants have.

    Unfinished runs are listed, and left out of all rewards.
    """
    variants = group_by_variant(curves)
    base = {
        curve.seed: final_reward(curve.series("reward")) for curve in next(iter(variants.values())) if curve.finished
    }
    summaries: list[VariantSummary] = []
    for label, runs in variants.items():
        done = [run for run in runs if run.finished]
        rewards = {run.seed: run.series("reward") for run in done}
        differences = [final_reward(rewards[seed]) - base[seed] for seed in rewards if seed in base and summaries]
        row: Row = {
            "variant": label,
            "seeds": sorted(rewards),
            "unfinished": sorted(run.seed for run in runs if not run.finished),
            "errors": {run.seed: run.facts["error"] for run in runs if "error" in run.facts},
            "corrected": bool(runs[0].facts["corrected"]),
            "reward_first": _mean([series[0] for series in rewards.values()]),
            "reward_last": _mean([final_reward(series) for series in rewards.values()]),
            "reward_last_by_seed": {seed: final_reward(series) for seed, series in sorted(rewards.items())},
            "validation": _mean([_last_finite(run.series("validation/reward")) for run in done]),
            "difference": _mean(differences),
            "interval": mean_interval(differences),
            "reward_best": _mean([best_reward(series) for series in rewards.values()]),
            "collapses": sum(has_collapsed(series) for series in rewards.values()),
            "deaths": sum(has_died(run) for run in done),
            "seconds": _mean([sum(run.series("step_seconds")) for run in done]),
        }
        for name, key in _MEANS.items():
            row[name] = _mean([_mean(run.series(key)) for run in runs])
        summaries.append(VariantSummary(label, runs, row))
    return summaries


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


def group_by_variant(curves: Sequence[RunCurves]) -> Mapping[str, list[RunCurves]]:
    """Group runs by label, in order of appearance."""
    variants: dict[str, list[RunCurves]] = {}
    for curve in curves:
        variants.setdefault(curve.label, []).append(curve)
    return variants


def _moving_means(rewards: Sequence[float]) -> list[float]:
    return [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(present) if present else None


def _last_finite(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if math.isfinite(value)), None)
