"""Confidence intervals as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from nemo_geomask.tools.shared.intervals import mean_interval


def format_mean(values: Sequence[float]) -> str:
    """Return the mean of differences with its interval as text, ``+0.045 (+0.022 to +0.068)``; "–" without a value."""
    if not values:
        return "–"
    return f"{fmean(values):+.3f}{format_interval(mean_interval(values))}"


def format_interval(interval: tuple[float, float] | None, number_format: str = "+.3f") -> str:
    """Return an interval as text behind an estimate, `` (+0.022 to +0.068)``; empty for None."""
    return "" if interval is None else " ({} to {})".format(*(format(end, number_format) for end in interval))
