"""Detection of the step at which a series of a run's values changes: a jump, or the beginning of a slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.read.record_reader import Array

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
    """A point at which a series changes."""

    first: int  # index of the first changed value
    rise: float  # mean of the changed values minus the mean of the values before
    score: float  # the rise in standard errors
    is_gradual: bool  # True if a slope begins there, False if the series jumps


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
    best: tuple[float, int, bool] | None = None
    indices = range(min_before, count - min_after + 1)
    residuals = _squared_residuals(values)[indices.start : indices.stop]
    for index, fits in zip(indices, residuals.tolist(), strict=True):
        for residual, is_gradual in zip(fits, (False, True, True), strict=True):
            if best is None or residual < best[0] * (MAX_SLOPE_RESIDUAL if is_gradual else 1.0):
                best = residual, index, is_gradual
    assert best is not None
    _, index, is_gradual = best
    return change_at(values, index, max(min_noise, step_noise(values)), is_gradual=is_gradual)


def change_at(values: Array, index: int, noise: float, *, is_gradual: bool = False) -> ChangePoint:
    """Return the change of a series at a known index, for values with a standard deviation of ``noise``."""
    count = len(values)
    rise = float(values[index:].mean() - values[:index].mean())
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


def _squared_residuals(values: Array) -> Array:
    """Return the squared residuals of the fits of a jump, a line and a logarithm that begin at each index, [count, 3].

    Each fit is, by least squares, a constant plus a multiple of a shape. The shape is 0 before the index; from there on
    it is 1, or n, or log(1 + n) in the n-th value. With centred values y and a shape x, the residual is
    Σy² - (Σxy)² / Σ(x - mean x)². The sums are computed for all indices at once, in the order of the number of changed
    values. The row of index 0, where the jump is no change, is NaN.
    """
    count = len(values)
    centred = values - values[0]  # first, so that the sums of numbers far from 0 lose no digits
    centred -= centred.mean()
    square = float(centred @ centred)
    from_last = centred[::-1]
    sums = np.cumsum(from_last)
    steps = np.arange(1.0, count + 1)
    logarithms = np.log1p(steps)
    residuals = np.full((count, 3), np.nan)
    for column, (shape, products) in enumerate(
        ((np.ones(count), sums), (steps, np.cumsum(sums)), (logarithms, _convolution(logarithms, from_last)))
    ):
        variation = np.cumsum(shape * shape) - np.cumsum(shape) ** 2 / count
        residuals[1:, column] = (square - products[:-1] ** 2 / variation[:-1])[::-1]
    # Rounding errors are smaller than this. They must not decide between fits that are all perfect.
    smallest = 4 * count * np.finfo(float).eps * square
    residuals[residuals <= smallest] = 0.0
    return residuals


def _convolution(first: Array, second: Array) -> Array:
    """Return the convolution of two series of the same length, up to that length, by the fast Fourier transform."""
    count = len(first)
    size = 1 << (2 * count - 1).bit_length()  # zeros keep the ends apart; a power of 2 is fast
    return np.fft.irfft(np.fft.rfft(first, size) * np.fft.rfft(second, size), size)[:count]
