"""Detectors of samples from old weights: a generation engine that is no longer updated, and asynchronous staleness."""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.location_detectors import MIN_LIFT, MIN_SCORE, detect_range, squared_relative_error
from nemo_geomask.tools.diagnose.run_evidence import BIN_SUM_COLUMN, Detection, Evidence
from nemo_geomask.tools.diagnose.step_sums import StepSums

__all__ = ["detect_stale_engine", "detect_staleness"]

MIN_VERSIONED_STEPS = 5
"""Number of steps that prove a stale engine if all their samples are from the same weight version."""
MIN_GROWTH = 1.5
"""Factor by which k3 must have grown since the rise for the engine to be stale."""
FAST_GROWTH = 4.0
"""Growth of k3 above which half of the threshold is enough."""
MIN_TOKENS = 100
"""Smallest number of fresh, and of stale, tokens that are compared."""


def detect_stale_engine(evidence: Evidence, threshold: float) -> Detection:
    """Look for a generation engine whose weights are no longer updated while the policy is trained.

    π_old then moves towards tokens with a positive advantage and the mismatch keeps growing. The measured value is the
    z-score of the correlation of Δ with the advantage.
    """
    steps = [evidence.statistics.steps[step] for step in evidence.steps_after]
    if not steps:
        return Detection(math.nan, "no step with log-probs of both engines")
    versions = [sums.versions for sums in steps if math.isfinite(sums.versions[0])]
    if len(versions) >= MIN_VERSIONED_STEPS and versions[0][1] == versions[-1][1]:
        description = f"all of the last {len(versions)} steps were sampled from weight version {versions[0][1]:.0f}"
        return Detection(math.inf, description, True)
    if evidence.onset is None:
        if evidence.sums_before is not None:
            return Detection(math.nan, "can't be judged by comparing two runs: the mismatch has to grow within one run")
        return Detection(0.0, "the mismatch has not grown")
    z = _advantage_score(evidence.sums_after)
    third = max(1, len(steps) // 3)
    early, late = (float(np.mean([sums.mean("k3") for sums in part])) for part in (steps[:third], steps[-third:]))
    growth = late / early if early else math.nan
    description = f"Δ correlates with the advantage by {z:.1f} standard errors, and k3 has grown {growth:.1f} times"
    # The mismatch of hardly any other cause keeps growing, so a weaker correlation is enough if the growth is fast.
    is_correlated = z > (threshold / 2 if growth > FAST_GROWTH else threshold)
    return Detection(z, description, is_correlated and len(steps) >= 3 and growth > MIN_GROWTH)


def _advantage_score(sums: StepSums) -> float:
    """Return the z-score of Σ a · (d − n · mean) over sequences, with a, d and n as in ``ADVANTAGE_SUMS``."""
    mean = sums.mean("scaled_delta")
    covariance = sums["ad"] - mean * sums["an"]
    variance = sums["a2d2"] - 2 * mean * sums["a2dn"] + mean * mean * sums["a2n2"]
    return covariance / math.sqrt(variance) if variance > 0 else 0.0


def detect_staleness(evidence: Evidence, threshold: float) -> Detection:
    """Look for a larger mismatch of the older samples, or of all stale samples.

    Fresh samples have a staleness of 0. In asynchronous loops only the first steps have any, so the stale samples of
    *after* are compared with the fresh samples of the whole run.
    """
    name = "staleness"
    by_age = detect_range(name, upper_only=True)(evidence, threshold)
    if by_age.is_shown or evidence.compares_runs:
        return by_age
    run, after = evidence.statistics.merge_windows(), evidence.after
    fresh, stale = run.bin_sums[name][0], after.bin_sums[name][1:].sum(axis=0)
    tokens, size, expected = BIN_SUM_COLUMN["tokens"], BIN_SUM_COLUMN["capped_abs"], BIN_SUM_COLUMN["one_minus_p"]
    if min(fresh[tokens], stale[tokens]) < MIN_TOKENS or not fresh[size]:
        return by_age
    fresh_rate, stale_rate = float(fresh[size] / fresh[expected]), float(stale[size] / stale[expected])
    if evidence.before is not None:
        before = evidence.before.bin_sums[name][1:].sum(axis=0)
        if before[size] < MIN_LIFT * fresh_rate * before[expected]:
            return by_age  # there were stale samples before the rise, without this mismatch
    error = squared_relative_error(run.bin_products[name][0], fresh_rate, float(fresh[size]))
    error += squared_relative_error(after.bin_products[name][1:].sum(axis=0), stale_rate, float(stale[size]))
    lift = stale_rate / fresh_rate
    excess = float(stale[size] - stale[expected] * fresh_rate) / float(fresh[size] + stale[size])
    if lift <= MIN_LIFT or math.log(lift) <= MIN_SCORE * math.sqrt(error + 1e-12) or excess <= threshold:
        return by_age
    return Detection(excess, f"stale samples have {lift:.1f} times the mismatch of fresh ones", True)
