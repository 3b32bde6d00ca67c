"""Statistics of the gap between two sides' log-probs of the same tokens, with intervals over prompts.

Tokens of one prompt depend on each other, so prompts are what is resampled. The k3 of a token is capped, because its
mean is otherwise that of the largest token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.probe.paired_tests import sign_flip_p
from nemo_geomask.tools.shared.intervals import percentile_interval

numpy: Any = require("numpy", "the probe's statistics need", "diagnose")

LARGE = 0.1
VERY_LARGE = math.log(2.0)
"""Sizes of |Δ| whose shares of tokens are reported: 10 % and a factor of 2 in probability."""

_CAP = 5.0  # on |Δ| in k3: a factor of 148 in probability
_REPLICATES = 2000
_SEED = 20260


@dataclass(frozen=True)
class Gap:
    """Gap between two sides."""

    tokens: int  # number of tokens
    k3: float  # mean of exp(Δ) − 1 − Δ in nats a token, with Δ the first side's log-prob minus the second's, within ±5
    large: float  # share of tokens with |Δ| > 0.1
    very_large: float  # share of tokens with |Δ| > ln 2
    largest: float  # largest |Δ|


@dataclass(frozen=True)
class GapChange:
    """Change of a gap's k3 from one arm to another."""

    value: float  # k3 after minus k3 before, nats a token
    low: float  # lower end of its 95 % interval, by bootstrap over prompts
    high: float  # upper end
    p: float  # two-sided p-value of no change, by the signs of the prompts' changes


def k3_of(delta: Any) -> Any:
    """Return exp(Δ) − 1 − Δ of each token, with Δ within ±5; float64, as exact as expm1."""
    clipped = numpy.clip(numpy.asarray(delta, dtype=numpy.float64), -_CAP, _CAP)
    return numpy.expm1(clipped) - clipped


def gap(first: Any, second: Any) -> Gap:
    """Return the gap between two sides' log-probs of the same tokens.

    Args:
        first: log-probs, of the trainer in a mismatch.
        second: log-probs, of the engine in a mismatch.
    """
    delta = numpy.asarray(first, dtype=numpy.float64) - numpy.asarray(second, dtype=numpy.float64)
    size = numpy.abs(delta)
    return Gap(
        tokens=int(delta.size),
        k3=float(k3_of(delta).mean()),
        large=float((size > LARGE).mean()),
        very_large=float((size > VERY_LARGE).mean()),
        largest=float(size.max()),
    )


def change_between(before: Any, after: Any, prompts: Any) -> GapChange:
    """Return the change of the mean k3 between two arms that scored the same tokens."""
    difference = k3_of(after) - k3_of(before)
    _, numbers = numpy.unique(numpy.asarray(prompts), return_inverse=True)
    sums = numpy.bincount(numbers, weights=difference)
    counts = numpy.bincount(numbers)
    generator = numpy.random.default_rng(_SEED)
    drawn = generator.integers(0, len(sums), size=(_REPLICATES, len(sums)))
    low, high = percentile_interval(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    # If a switch changes nothing, each prompt's change is as likely up as down.
    return GapChange(float(difference.mean()), low, high, sign_flip_p(sums, generator))
