"""Tests of paired differences, and the correction of their p-values for their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_geomask.errors import ArgumentError
from nemo_geomask.optional import require

_MAX_PAIRS = 16  # 65,536 sign patterns
_MAX_EXACT_PAIRS = 14
"""Largest number of pairs for which all 2^n sign patterns are tried although a generator could draw some."""


def sign_flip_p(differences: Sequence[float] | Any, generator: Any = None) -> float:
    r"""Return the two-sided p-value of the sign-flip test.

    The hypothesis is that the differences are symmetric about 0. The p-value is the share of all :math:`2^n` sign
    patterns whose mean is at least as far from 0 as the observed mean.

    Args:
        differences: one for each pair, 1 to 16 of them; any number with a generator.
        generator: ``numpy.random.Generator`` that draws :math:`2^{14}` patterns, the observed one among them, if there
            are more than 14 differences. None: all patterns are tried.

    Raises:
        ArgumentError: no differences, or more than 16 without a generator.
    Source: Fisher, "The Design of Experiments", 1935.
    """
    count = len(differences)
    if count < 1 or (generator is None and count > _MAX_PAIRS):
        raise ArgumentError(f"the sign-flip test takes 1 to {_MAX_PAIRS} differences, but got {count}")
    numpy = require("numpy", "the sign-flip test needs", "diagnose")
    values = numpy.asarray(differences, dtype=numpy.float64)
    if generator is None or count <= _MAX_EXACT_PAIRS:
        signs = 1.0 - 2.0 * (numpy.arange(1 << count)[:, None] >> numpy.arange(count) & 1)
    else:
        signs = generator.choice((-1.0, 1.0), size=(1 << _MAX_EXACT_PAIRS, count))
        signs[0] = 1.0  # the observed pattern
    totals = numpy.abs(signs @ values)
    tolerance = 1e-12 * count * numpy.abs(values).max()  # sums in another order differ by rounding
    return float((totals >= abs(values.sum()) - tolerance).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's method, in the same order.

    Sorted ascending, the i-th of m (from 0) is multiplied by m − i; no value is below an earlier one, or above 1.
    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
