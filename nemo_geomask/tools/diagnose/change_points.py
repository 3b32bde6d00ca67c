"""Detection of the step at which a series of a run's values changes: a jump, or the beginning of a slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.record_reader import Array

__all__ = [
    "MIN_AFTER",
    "MIN_NOISE",
    "MIN_RISE",
    "MIN_SCORE",
    "MIN_VALUES",
    "ChangePoint",
    "change_at",
    "find_change",
    "step_noise",
]

MIN_RISE = math.log(1.5)
"""Smallest change of a mismatch's logarithm that counts as a change: a factor of 1.5."""
MIN_SCORE = 6.0
"""Number of standard errors that such a change must exceed."""
MIN_NOISE = 0.05
"""Lower limit of the standard deviation, from step to step, of a mismatch's logarithm."""
MIN_BEFORE, MIN_AFTER = 3, 2
"""Number of values that must precede and follow a change."""
MIN_VALUES = MIN_BEFORE + MIN_AFTER
"""Number of values below which no change can be found."""
MAX_SLOPE_RESIDUAL = 0.8
"""A slope replaces the best fit so far only if its squared residual is below this fraction of that fit's."""


class ChangePoint(NamedTuple):
    """A point at which a series changes.

    Attributes:
        first: index of the first changed value.
        rise: mean of the changed values minus the mean of the values before.
        score: the rise in standard errors.
        is_gradual: True if a slope begins there, False if the series jumps.
    """

    first: int
    rise: float
    score: float
    is_gradual: bool


def find_change(
    series: Sequence[float], min_noise: float, *, min_before: int = MIN_BEFORE, min_after: int = MIN_AFTER
) -> ChangePoint | None:
    """Return the jump, or the beginning of a slope, that explains most of a series; None if it is too short.

    Args:
        series: finite values in the order of the steps; logarithms for a quantity that changes by factors.
        min_noise: lower limit of the standard deviation of a value. The deviation itself is estimated from the
            differences of successive values, without the trend that they have in common.
        min_before, min_after: numbers of values that must precede and follow the change, each at least 1.
    """
    values = np.asarray(series, dtype=float)
    count = len(values)
    if count < MIN_VALUES or not np.isfinite(values).all():
        return None
    time = np.arange(count, dtype=float)
    best: tuple[float, int, bool] | None = None
    for index in range(min_before, count - min_after + 1):
        steps_since = np.maximum(time - index + 1, 0.0)  # 0 before the change, then 1, 2, …
        for shape, is_gradual in ((np.sign(steps_since), False), (steps_since, True), (np.log1p(steps_since), True)):
            residual = _squared_residual(values, shape)
            if best is None or residual < best[0] * (MAX_SLOPE_RESIDUAL if is_gradual else 1.0):
                best = residual, index, is_gradual
    assert best is not None
    _, index, is_gradual = best
    return change_at(values, index, min_noise, is_gradual=is_gradual)


def change_at(values: Array, index: int, min_noise: float, *, is_gradual: bool = False) -> ChangePoint:
    """Return the change of a series at a known index; the arguments are those of :func:`find_change`."""
    count = len(values)
    rise = float(values[index:].mean() - values[:index].mean())
    noise = max(min_noise, step_noise(values))
    score = rise / (noise * math.sqrt(1 / index + 1 / (count - index)))
    return ChangePoint(index, rise, score, is_gradual)


def step_noise(values: Array) -> float:
    """Return the standard deviation of a value, estimated from the differences of successive values.

    It is the median absolute deviation from their median. That is robust, since one of the differences may be the jump
    itself, and a steady rise, in which all differences are equal, does not count as noise.
    """
    median_of_normal = NormalDist().inv_cdf(0.75)  # median of |x| for a standard normal x
    differences = np.diff(values)
    deviation = float(np.median(np.abs(differences - np.median(differences))))
    return deviation / median_of_normal / math.sqrt(2)


def _squared_residual(values: Array, shape: Array) -> float:
    """Return the squared residual of the least-squares fit of a constant plus a multiple of ``shape``."""
    centred_values, centred_shape = values - values.mean(), shape - shape.mean()
    slope = float(centred_values @ centred_shape) / float(centred_shape @ centred_shape)
    residual = centred_values - slope * centred_shape
    return float(residual @ residual)
