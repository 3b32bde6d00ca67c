"""95 % confidence intervals: of bootstrap replicates, of means by Student's t, and of ratios.

numpy and scipy, which the ``diagnose`` extra installs, are imported when an interval is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from nemo_geomask.optional import require

CONFIDENCE_LABEL = "95 %"
"""Probability with which an interval contains the value that is estimated, for headings and captions."""

_TAILS = (0.025, 0.975)
# Cap on log_error that keeps both ends of the interval finite. At the cap it spans fifteen orders of magnitude.
_LARGEST_LOG_ERROR = 9.0


def student_quantile(degrees_of_freedom: int) -> float:
    """Return t such that Student's t is within ±t with a probability of 95 % (2.776 with 4 degrees of freedom)."""
    # Not scipy.stats, whose import takes a second.
    special = require("scipy.special", "confidence intervals need", "diagnose")
    return float(special.stdtrit(degrees_of_freedom, _TAILS[1]))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the mean of independent values by Student's t; None for fewer than two values.

    Use it for a few values, such as one for each seed: with 3 to 10 of them a percentile bootstrap is too narrow.
    """
    if len(values) < 2:
        return None
    mean, half = fmean(values), student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def percentile_interval(replicates: Any) -> tuple[float, float]:
    """Return the percentiles of bootstrap replicates that enclose 95 % of them.

    Args:
        replicates: an array or a sequence of the estimates, one from each resample; NaN for both ends if it is empty.
    """
    numpy = require("numpy", "confidence intervals need", "diagnose")
    if not len(replicates):
        return math.nan, math.nan
    low, high = numpy.quantile(replicates, _TAILS)
    return float(low), float(high)


def ratio_interval(ratio: float, log_error: float) -> tuple[float, float]:
    """Return the interval of a positive ratio whose logarithm is approximately normal.

    Args:
        ratio: the estimate.
        log_error: standard error of the ratio's logarithm; if small, about the ratio's relative standard error.

    Returns:
        ``ratio · exp(±z · log_error)``; NaN for both ends if either argument is not finite.
    """
    if not (math.isfinite(ratio) and math.isfinite(log_error)):
        return math.nan, math.nan
    factor = math.exp(NormalDist().inv_cdf(_TAILS[1]) * min(log_error, _LARGEST_LOG_ERROR))
    return ratio / factor, ratio * factor
