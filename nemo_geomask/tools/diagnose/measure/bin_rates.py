"""Mismatch of each bin of a dimension, with its standard error over sequences."""

from __future__ import annotations

import math

import numpy as np

from nemo_geomask.tools.diagnose.measure.run_statistics import BIN_SUMS, Window
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.shared.intervals import ratio_interval
from nemo_geomask.tools.shared.terminal_tables import ABSENT


class BinRates:
    """Mismatch of each bin of a window.

    Args:
        window: the statistics of the window.
        key: name of the dimension that is divided into bins.

    Attributes:
        rate: [bins], mean |Δ| over mean 1 − p.
        error: [bins], relative standard error of the rate, over sequences.
    """

    def __init__(self, window: Window, key: str) -> None:
        bin_sums: Array = window.bin_sums[key]
        capped_abs, one_minus_p = (bin_sums[:, BIN_SUMS.index(name)] for name in ("capped_abs", "one_minus_p"))
        abs_squared, product, expected_squared = window.bin_products[key].T
        with np.errstate(invalid="ignore", divide="ignore"):
            self.rate: Array = capped_abs / one_minus_p
            # Delta method for the ratio of two sums over sequences.
            variance = abs_squared - 2 * self.rate * product + np.square(self.rate) * expected_squared
            self.error: Array = np.sqrt(np.maximum(variance, 0.0)) / capped_abs


def format_ratio_interval(ratio: float, relative_error: float) -> str:
    """Return the confidence interval of a ratio as text; ``ABSENT`` if it is not finite."""
    low, high = ratio_interval(ratio, relative_error)
    return ABSENT if math.isnan(low) else f"{low:.3g} to {high:.3g}"
