"""Patterns of a run's mismatch from step to step that a single change does not describe: a rise at an edge, a cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_geomask.optional import require
from nemo_geomask.tools.diagnose.locate.change_points import (
    MIN_AFTER,
    MIN_RISE,
    MIN_SCORE,
    MIN_VALUES,
    ChangePoint,
    change_at,
    step_noise,
)
from nemo_geomask.tools.diagnose.read.record_reader import Array

MIN_CYCLES = 3
"""Number of times that a cycle must be repeated in a run."""
MAX_CHANCE = 1e-5
"""Probability, over all cycle lengths, with which noise may look like a cycle."""


class Period(NamedTuple):
    """A cycle in which the mismatch repeats."""

    steps: int  # length of the cycle
    times: float  # ratio of the largest mean of a phase to the smallest
    phases: dict[int, int]  # by the number of a step, its phase: its position in the cycle, counted from 0
    lowest: int  # the phase with the smallest mean


def find_edge_rise(logarithms: Sequence[float], min_noise: float) -> ChangePoint | None:
    """Return the largest rise that is too close to an edge of the series for :func:`~change_points.find_change`.

    In a series of fewer than ``MIN_VALUES`` values, which ``find_change`` does not search, a rise at any index counts.

    Args:
        logarithms: logarithm of the mismatch in each step.
        min_noise: lower limit of the standard deviation of a value.
    """
    values = np.asarray(logarithms, dtype=float)
    count = len(values)
    indices = range(1, count) if count < MIN_VALUES else (1, *range(count - MIN_AFTER + 1, count))
    noise = min_noise if count < MIN_VALUES else max(min_noise, step_noise(values))
    changes = [change_at(values, index, noise) for index in indices]
    rises = [change for change in changes if change.rise >= MIN_RISE and change.score >= MIN_SCORE]
    return max(rises, key=lambda change: change.rise, default=None)


def find_period(logarithms: Sequence[float], steps: Sequence[int], min_noise: float) -> Period | None:
    """Return the cycle in which a series repeats, such as the sawtooth of samples that age until the next refit.

    The variance between the phases of a cycle is compared with that within them, by an F test, after a linear trend
    is removed. If a number is missing between the steps, no cycle is sought.

    Args:
        logarithms: logarithm of the mismatch in each step.
        steps: numbers of the steps.
        min_noise: lower limit of the standard deviation of a value.
    """
    count = len(logarithms)
    if count < 2 * MIN_CYCLES or list(steps) != list(range(steps[0], steps[0] + count)):
        return None
    fdtrc = require("scipy.special", "the search for a cycle needs", "diagnose").fdtrc
    values: Array = np.asarray(logarithms, dtype=float)
    time = np.arange(count) - (count - 1) / 2
    values = values - values.mean() - time * float(time @ values) / float(time @ time)
    lengths = range(2, count // MIN_CYCLES + 1)
    best: tuple[float, Period] | None = None
    for length in lengths:
        phase = np.arange(count) % length
        means = np.bincount(phase, values) / np.bincount(phase)
        within = float(np.square(values - means[phase]).sum())
        between = float(np.square(means[phase]).sum())
        freedom = count - length - 1
        ratio = between / (length - 1) / max(within / freedom, min_noise**2)
        chance = float(fdtrc(length - 1, freedom, ratio)) * len(lengths)
        times = math.exp(float(np.ptp(means)))
        # A multiple of the cycle fits as well; the shortest is the cycle.
        if chance < MAX_CHANCE and math.log(times) >= MIN_RISE and (best is None or chance < best[0] / 1e3):
            phases = dict(zip(steps, phase.tolist(), strict=True))
            best = chance, Period(length, times, phases, int(means.argmin()))
    return None if best is None else best[1]
