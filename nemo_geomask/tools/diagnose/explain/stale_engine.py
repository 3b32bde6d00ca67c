"""Detector of a generation engine whose weights are no longer updated."""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.explain.evidence import Detection, Evidence
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums

MIN_VERSIONED_STEPS = 5
"""Number of steps that prove a stale engine if all their samples are from the same weight version."""
MIN_GROWTH = 1.5
"""Factor by which k3 must have grown since the rise for the engine to be stale."""
FAST_GROWTH = 4.0
"""Growth of k3 above which three quarters of the threshold are enough."""
MIN_RISE_OF_AGE = 0.25
"""Rise of the mean staleness, in steps, that can explain a rise of the mismatch."""
_PLACES_OF_OLD_WEIGHTS = ("step", "advantage", "staleness", "probability")
MAX_HELD = 0.3
"""Excess of other places above which these, and not old weights, hold the mismatch."""
MIN_STEPS_SINCE_RISE = 3
"""Number of steps since the rise in which k3 can be seen to grow."""


def detect_stale_engine(evidence: Evidence, threshold: float) -> Detection:
    """Look for a generation engine whose weights are no longer updated while the policy is trained.

    π_old then moves towards tokens with a positive advantage and the mismatch keeps growing. The measured value is the
    z-score of the correlation of Δ with the advantage. Old samples show both as well. Where the recorded staleness rose
    with the mismatch, the cause is therefore left open.
    """
    steps = [evidence.statistics.steps[step] for step in evidence.steps_after]
    if not steps:
        return Detection(math.nan, "no step with log-probs of both engines", needs="log-probs of both engines")
    versions = [sums.versions for sums in steps if math.isfinite(sums.versions[0])]
    if len(versions) >= MIN_VERSIONED_STEPS and versions[0][1] == versions[-1][1]:
        description = f"all of the last {len(versions)} steps were sampled from weight version {versions[0][1]:.0f}"
        return Detection(math.inf, description, True)
    if evidence.onset is None:
        if evidence.sums_before is not None:
            needs = "a mismatch that grows within the run; two runs can't be compared for it"
            return Detection(math.nan, "the mismatch does not grow within the run", needs=needs)
        if len(versions) >= MIN_VERSIONED_STEPS:
            first, last = versions[0][0], versions[-1][1]
            return Detection(0.0, f"the steps were sampled from weight versions {first:.0f} to {last:.0f}")
        needs = "a step at which the mismatch rises, or weight versions (loss_fn.record)"
        return Detection(math.nan, "the mismatch has not risen", needs=needs)
    z, usual = _advantage_score(evidence.sums_after), _usual_score(evidence)
    third = max(1, len(steps) // 3)
    early, late = (float(np.mean([sums.mean("k3") for sums in part])) for part in (steps[:third], steps[-third:]))
    growth = late / early if early else math.nan
    description = (
        f"Δ correlates with the advantage by {z:.1f} standard errors ({usual:.1f} as before), and k3 is {growth:.2g} "
        "times as large at the end as at the beginning"
    )
    # The mismatch of hardly any other cause keeps growing, so a weaker correlation is enough if the growth is fast.
    # Samples of a constant age have a correlation of their own, which is there before.
    is_correlated = z - max(usual, 0.0) > (0.75 * threshold if growth > FAST_GROWTH else threshold)
    explained = None if evidence.sums_before is None else evidence.mismatch_beyond(evidence.sums_before)
    needs = ""
    if len(steps) < MIN_STEPS_SINCE_RISE:
        needs = f"{MIN_STEPS_SINCE_RISE} steps since the rise"
    elif is_correlated and _has_aged(evidence):
        needs = "the engine's weights, since the recorded staleness rose with the mismatch and may be its cause"
    elsewhere = sum(region.excess for region in evidence.location.regions if region.id not in _PLACES_OF_OLD_WEIGHTS)
    is_shown = is_correlated and not needs and growth > MIN_GROWTH and elsewhere < MAX_HELD
    return Detection(z, description, is_shown, needs=needs, explained=explained)


def _usual_score(evidence: Evidence) -> float:
    """Return the z-score that *after* would have with the correlation of *before*; 0 if there is none."""
    before = evidence.sums_before
    if before is None or not before["sequences"]:
        return 0.0
    return _advantage_score(before) * math.sqrt(evidence.sums_after["sequences"] / before["sequences"])


def _has_aged(evidence: Evidence) -> bool:
    """Return True if the samples are older than before the rise of the mismatch; False if no age is recorded."""
    if evidence.sums_before is None:
        return False
    before, after = (
        sums.mean("staleness", "sequences_with_staleness") for sums in (evidence.sums_before, evidence.sums_after)
    )
    return after > before + MIN_RISE_OF_AGE


def _advantage_score(sums: StepSums) -> float:
    """Return the z-score of Σ a · (d − n · mean) over sequences, with a, d and n as in ``ADVANTAGE_SUMS``."""
    mean = sums.mean("scaled_delta")
    covariance = sums["ad"] - mean * sums["an"]
    variance = sums["a2d2"] - 2 * mean * sums["a2dn"] + mean * mean * sums["a2n2"]
    return covariance / math.sqrt(variance) if variance > 0 else 0.0
