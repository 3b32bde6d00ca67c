"""Test of the vicious circle: whether mismatch and another series of a run each predict the other's next step.

In the vicious circle of "When Speed Kills Stability" (Liu, Li et al. 2025), gradients of tokens with a large mismatch
move the policy towards less likely tokens or longer responses, and these have a larger mismatch. Two series that both
rise are correlated even if neither affects the other. So the test asks what one series adds to the prediction of the
other (Granger 1969): the partial correlation of the leading series with the following one a step later, controlling for
the following series' previous step, the time and its square. It correlates ranks, because one step of a collapse would
outweigh all others. If the series are independent, artanh of the partial correlation is approximately normal with
variance 1/(n − 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nemo_geomask.optional import require
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import QUANTITIES
from nemo_geomask.tools.diagnose.read.record_reader import Array

SHOWN_SCORE = 2.5
"""Standard errors above which one series is said to predict the other."""
MIN_STEPS = 20
"""Number of steps that a run must have for the test."""
MISMATCH = "mismatch"
_VALUES = {quantity.name: quantity.value for quantity in QUANTITIES}
SERIES: dict[str, Callable[[StepSums], float]] = {
    MISMATCH: _VALUES["noise"],
    "surprise": _VALUES["surprise"],
    "length": _VALUES["response length"],
    "entropy": lambda sums: sums.mean("entropy", "tokens_with_entropy"),
    "reward": _VALUES["reward"],
}
"""Value of each series in a step."""


class LaggedCorrelation(NamedTuple):
    """Partial rank correlation of a leading series with another one a step later, and that in standard errors."""

    leader: str
    follower: str
    correlation: float
    score: float

    @property
    def is_shown(self) -> bool:
        """True if the correlation is larger than chance explains."""
        return abs(self.score) > SHOWN_SCORE


def mismatch_feedback(statistics: RunStatistics) -> list[LaggedCorrelation]:
    """Test the mismatch against each other series, in both directions.

    Returns:
        An empty list if the run has fewer than ``MIN_STEPS`` steps, or the mismatch does not vary. Series that were not
        recorded in every step, or do not vary, are left out.
    """
    steps = [sums for _, sums in sorted(statistics.steps.items()) if sums["tokens"] > 0]
    if len(steps) < MIN_STEPS:
        return []
    series = {name: np.array([value(sums) for sums in steps]) for name, value in SERIES.items()}
    varying = {name: values for name, values in series.items() if np.isfinite(values).all() and np.ptp(values) > 0}
    if MISMATCH not in varying:
        return []
    mismatch = varying.pop(MISMATCH)
    correlations = []
    for name, values in varying.items():
        correlations.append(measure_lagged_correlation(MISMATCH, name, mismatch, values))
        correlations.append(measure_lagged_correlation(name, MISMATCH, values, mismatch))
    return correlations


def measure_lagged_correlation(leader: str, follower: str, leading: Array, following: Array) -> LaggedCorrelation:
    """Measure how well one series of finite values predicts the next step of another."""
    time = np.linspace(-1, 1, len(leading) - 1)
    previous, current = _ranks(following[:-1]), _ranks(following[1:])
    controls = np.stack([np.ones_like(time), time, time * time, previous], axis=1)
    first, second = (_residuals(values, controls) for values in (_ranks(leading[:-1]), current))
    scale = math.sqrt(float(first @ first) * float(second @ second))
    correlation = float(first @ second) / scale if scale > 1e-9 else 0.0
    degrees_of_freedom = len(time) - controls.shape[1] - 2
    z = math.atanh(min(max(correlation, -0.999), 0.999))
    return LaggedCorrelation(leader, follower, correlation, z * math.sqrt(degrees_of_freedom))


def _ranks(values: Array) -> Array:
    stats = require("scipy.stats", "the test of the vicious circle needs", "diagnose")
    ranks: Array = stats.rankdata(values)
    return ranks


def _residuals(values: Array, controls: Array) -> Array:
    """Return the residuals of a linear regression of the values on the controls."""
    coefficients = np.linalg.lstsq(controls, values, rcond=None)[0]
    residuals: Array = values - controls @ coefficients
    return residuals


def summarize_feedback(correlations: Sequence[LaggedCorrelation]) -> str:
    """Return the outcome of the test in a sentence."""
    if not correlations:
        return f"Not tested: fewer than {MIN_STEPS} steps, or a mismatch that does not vary."
    shown = {(pair.leader, pair.follower): pair.score for pair in correlations if pair.is_shown}
    # A circle amplifies itself only if both effects have the same sign; otherwise it damps itself.
    circles = [
        follower
        for leader, follower in shown
        if leader == MISMATCH and shown[leader, follower] * shown.get((follower, leader), 0.0) > 0
    ]
    if circles:
        return f"A circle: the mismatch and {' and '.join(circles)} each predict the other's next step."
    if shown:
        pairs = ", ".join(f"{leader} predicts {follower}" for leader, follower in shown)
        return f"No circle; prediction in one direction only: {pairs}."
    return "No circle."
