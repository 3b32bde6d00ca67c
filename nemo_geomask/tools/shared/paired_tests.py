"""Tests of paired differences, and the correction of their p-values for their number."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

from nemo_geomask.errors import ArgumentError

__all__ = ["holm", "sign_flip_p"]

_MAX_PAIRS = 16  # 65,536 sign patterns


def sign_flip_p(differences: Sequence[float]) -> float:
    r"""Return the two-sided p-value of the exact sign-flip test.

    The hypothesis is that the differences are symmetric about 0. The p-value is the share of all :math:`2^n` sign
    patterns whose mean is at least as far from 0 as the observed mean.

    Args:
        differences: one for each pair, 1 to 16 of them.

    Raises:
        ArgumentError: no differences, or more than 16.
    Source: Fisher, "The Design of Experiments", 1935.
    """
    if not 1 <= len(differences) <= _MAX_PAIRS:
        raise ArgumentError(f"the sign-flip test takes 1 to {_MAX_PAIRS} differences, but got {len(differences)}")
    observed = abs(fmean(differences))
    tolerance = 1e-12 * max(map(abs, differences))  # sums in another order differ by rounding
    patterns = itertools.product((1, -1), repeat=len(differences))
    means = (fmean(sign * value for sign, value in zip(signs, differences, strict=True)) for signs in patterns)
    return fmean(abs(mean) >= observed - tolerance for mean in means)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's method, in the same order.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
