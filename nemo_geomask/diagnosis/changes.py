"""Since when a run's number is another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_geomask.diagnosis.read import Array

__all__ = ["ChangePoint", "find_change"]

LEAST_BEFORE, LEAST_AFTER = 3, 2


class ChangePoint(NamedTuple):
    """Where a series parts from what it was.

    Attributes:
        first: index of the first of the changed values.
        rise: mean of those, less that of the values before.
        score: the rise in standard errors.
        gradual: whether it is a slope that begins there, and not a jump.
    """

    first: int
    rise: float
    score: float
    gradual: bool


def find_change(series: Sequence[float], least_noise: float) -> ChangePoint | None:
    """The jump, or beginning of a slope, that explains most of a series; None of one too short.

    Args:
        series: in the order of the steps; logarithms for what changes by factors.
        least_noise: a value's standard deviation is taken to be no less. What the values differ by from one to the next
            counts as noise, so that no smooth trend is mistaken for certainty, and no jump for noise.
    """
    values = np.asarray(series, dtype=float)
    count = len(values)
    if count < LEAST_BEFORE + LEAST_AFTER or not np.isfinite(values).all():
        return None
    # Robust, since one of the differences may be the jump itself.
    noise = max(least_noise, 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2))
    time = np.arange(count, dtype=float)
    best: tuple[float, int, bool] | None = None
    for index in range(LEAST_BEFORE, count - LEAST_AFTER + 1):
        since = np.maximum(time - index + 1, 0.0)
        for shape, gradual in ((np.sign(since), False), (since, True), (np.log1p(since), True)):
            error = _residual(values, shape)
            if best is None or error < best[0] * (0.8 if gradual else 1.0):
                best = error, index, gradual
    assert best is not None
    _, index, gradual = best
    before, after = values[:index], values[index:]
    rise = float(after.mean() - before.mean())
    score = rise / (noise * np.sqrt(1 / len(before) + 1 / len(after)))
    return ChangePoint(index, rise, float(score), gradual)


def _residual(values: Array, shape: Array) -> float:
    centred, of_shape = values - values.mean(), shape - shape.mean()
    scale = float(of_shape @ of_shape)
    slope = float(centred @ of_shape) / scale if scale else 0.0
    left = centred - slope * of_shape
    return float(left @ left)
