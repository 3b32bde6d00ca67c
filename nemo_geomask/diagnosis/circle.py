"""Whether mismatch begets mismatch: does a step's mismatch say what the next step's tokens will be, and they it?

The vicious circle of "When Speed Kills Stability" (Liu, Li et al. 2025): gradients of tokens with a large mismatch move
the policy to less likely tokens or longer responses, where the mismatch is larger. Two series that both rise go
together for no reason, so what is asked is what the one adds (Granger 1969): the partial correlation of a series with
the other's step before, given its own step before and the time and its square. It is that of ranks, since one step of a
collapse outweighs all the others. Without a connection, artanh of it is normal, of variance 1/(n - 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from nemo_geomask.diagnosis.read import Array
from nemo_geomask.diagnosis.statistics import Statistics, StepSums

__all__ = ["CERTAIN", "LEAST_STEPS", "Lead", "circle", "leads", "verdict"]

CERTAIN = 2.5
"""Standard errors from which on one series is said to lead the other."""
LEAST_STEPS = 20

SERIES: dict[str, Callable[[StepSums], float]] = {
    "mismatch": lambda sums: sums.mean("size", "model"),
    "surprise": lambda sums: sums.mean("surprise"),
    "length": lambda sums: sums.mean("response", "sequences"),
    "entropy": lambda sums: sums.mean("entropy", "entropy_known"),
    "reward": lambda sums: sums.mean("reward", "rewarded"),
}
"""By step: mean |Δ|, at most 1, in units of 1 − p; −gen; tokens of a response; entropy; reward."""


class Lead(NamedTuple):
    """How a series follows another.

    Attributes:
        first, then: their names.
        correlation: partial, of the first with the other a step later.
        score: the same in standard errors.
    """

    first: str
    then: str
    correlation: float
    score: float

    @property
    def shown(self) -> bool:
        """Whether it is more than chance."""
        return abs(self.score) > CERTAIN


def circle(statistics: Statistics) -> list[Lead]:
    """The mismatch against each other series, both ways; empty of a run of fewer than 20 steps."""
    steps = [sums for _, sums in sorted(statistics.steps.items()) if sums["tokens"] > 0]
    if len(steps) < LEAST_STEPS:
        return []
    found = {name: np.array([value(sums) for sums in steps]) for name, value in SERIES.items()}
    mine = found.pop("mismatch")
    known = {name: values for name, values in found.items() if np.isfinite(values).all() and np.ptp(values) > 0}
    if not np.ptp(mine):
        return []
    return [
        leads(first, then, one, other)
        for name, values in known.items()
        for (first, one), (then, other) in permutations((("mismatch", mine), (name, values)))
    ]


def leads(first: str, then: str, one: Array, other: Array) -> Lead:
    """How ``other`` follows ``one``.

    Args:
        first, then: their names.
        one, other: [steps], finite.
    """
    time = np.linspace(-1, 1, len(one) - 1)
    before, now = _ranks(other[:-1]), _ranks(other[1:])
    given = np.stack([np.ones_like(time), time, time * time, before], axis=1)
    left = [values - given @ np.linalg.lstsq(given, values, rcond=None)[0] for values in (_ranks(one[:-1]), now)]
    scale = math.sqrt(float(left[0] @ left[0]) * float(left[1] @ left[1]))
    correlation = float(left[0] @ left[1]) / scale if scale > 1e-9 else 0.0
    free = len(time) - given.shape[1] - 2
    return Lead(first, then, correlation, math.atanh(min(max(correlation, -0.999), 0.999)) * math.sqrt(free))


def verdict(found: Sequence[Lead]) -> str:
    """What the leads say, in a sentence."""
    if not found:
        return f"Fewer than {LEAST_STEPS} steps with a mismatch that differs: nothing can be said."
    shown = {(one.first, one.then): one for one in found if one.shown}
    circles = [
        name
        for first, name in shown
        # That what feeds itself is of one sign: less of the one, more of the other, less of the one, … is none.
        if first == "mismatch"
        and (back := shown.get((name, first))) is not None
        and shown[first, name].score * back.score > 0
    ]
    if circles:
        return f"A circle: the mismatch and {' and '.join(circles)} each say something of the other's next step."
    if shown:
        said = ", ".join(f"{one.first} by {one.then}" for one in shown.values())
        return f"No circle; one way only is followed: {said}."
    return "No circle."


def _ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values)).astype(float)
