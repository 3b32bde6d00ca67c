"""Verdict on a run without records, from the metrics that it logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.locate.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, find_change
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS, HEALTH_ORDER, Health
from nemo_geomask.tools.diagnose.read.logged_metrics import MetricSeries

_MIN_STEPS = 10
"""A mean of fewer values than this that is beyond a limit is never called healthy."""
_LIMITS = {name: limit for limit in HEALTH_LIMITS for name in limit.logged}
"""Health limit of each metric that has one."""


@dataclass(frozen=True)
class LoggedVerdict:
    """Verdict from logged metrics alone. They cannot identify a cause, and have no interval over sequences.

    Attributes:
        health: health of the run.
        since: first step of the rise; None if there was none.
        values: mean of each metric over the steps since the rise, or over the last third of the steps; NaN if most of
            the values there are NaN.
        sentence: the verdict as text.
    """

    health: Health
    since: int | None
    values: Mapping[str, float]
    sentence: str


class _MetricVerdict(NamedTuple):
    """Verdict from one metric.

    Attributes:
        health: its health.
        since: first step of the rise.
        mean: its entry in :attr:`LoggedVerdict.values`.
        unknown: why it can't be called healthy; empty if it can.
    """

    health: Health
    since: int | None
    mean: float
    unknown: str = ""


def judge_logged(series: MetricSeries) -> LoggedVerdict | None:
    """Return the verdict from the metrics that have a health limit; None if none of them was logged as a number.

    Raises:
        DataError: no metric is beyond its limit, but one has become NaN, or has too few steps to tell.
    """
    verdicts = {
        name: _judge_metric(name, series[name])
        for name in _LIMITS
        if name in series and any(map(_is_number, series[name].values()))
    }
    if not verdicts:
        return None
    health = max((verdict.health for verdict in verdicts.values()), key=HEALTH_ORDER.index)
    onsets = [verdict.since for verdict in verdicts.values() if verdict.health == health and verdict.since is not None]
    since = min(onsets, default=None)
    values = {name: verdict.mean for name, verdict in verdicts.items()}
    if health == "healthy" and (unknown := [verdict.unknown for verdict in verdicts.values() if verdict.unknown]):
        raise DataError(
            f"the logged metrics do not tell the run's present health: {', '.join(unknown)}; to diagnose the cause, "
            "record the run (loss_fn.record)"
        )
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    for name in values:
        if count := sum(not math.isfinite(value) for value in series[name].values()):
            numbers += f", {name} NaN or infinite in {count} steps"
    onset = "" if since is None else f" since step {since}"
    sentence = (
        f"{health}{onset}, by logged metrics alone: {numbers}; to diagnose the cause, record the run (loss_fn.record)"
    )
    return LoggedVerdict(health, since, values, sentence)


def _is_number(value: float) -> bool:
    """Return True for a finite number or an overflow to +inf, which is above any limit."""
    return math.isfinite(value) or value == math.inf


def _judge_metric(name: str, by_step: Mapping[int, float]) -> _MetricVerdict:
    limit, steps = _LIMITS[name], sorted(by_step)
    numeric_steps = [step for step in steps if _is_number(by_step[step])]
    # Changes are detected in the logarithms. An overflow counts as much as the largest finite value.
    largest = max([limit.broken, *(by_step[step] for step in numeric_steps if by_step[step] < math.inf)])
    minimum = 1.0 if name == "token_mult_prob_error" else 0.0  # its value without a mismatch
    logs = [math.log(max(min(by_step[step], largest) - minimum, 1e-9)) for step in numeric_steps]
    change = find_change(logs, MIN_NOISE)
    since = None
    if change is not None and change.rise >= MIN_RISE and change.score >= MIN_SCORE:
        since = numeric_steps[change.first]
    judged_steps = steps[-max(3, len(steps) // 3) :] if since is None else [step for step in steps if step >= since]
    values = np.array([by_step[step] for step in judged_steps if _is_number(by_step[step])])
    if since is None and 2 * len(values) < len(judged_steps):
        return _MetricVerdict("healthy", None, math.nan, f"NaN in most of the last third of the steps: {name}")
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(values.mean()), float(values.std())
    if mean == math.inf:
        return _MetricVerdict("broken", since, mean)
    # A limit is exceeded only if the mean is two standard errors above it.
    lower_bound = mean - 2 * deviation / math.sqrt(len(values))
    is_drifting = lower_bound > limit.drifting or since is not None
    health: Health = "broken" if lower_bound > limit.broken else "drifting" if is_drifting else "healthy"
    unknown = ""
    if math.isnan(mean):
        unknown = f"the mean of {name} is NaN"
    elif health == "healthy" and mean > limit.drifting and len(values) < _MIN_STEPS:
        unknown = f"{name} is {mean:.4g} over {len(values)} steps, which vary too much to judge"
    return _MetricVerdict(health, since, mean, unknown)
