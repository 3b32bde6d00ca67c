"""Verdict on a run without records, from the metrics that it logged.

Each step counts by whether its value is beyond a limit, never by how far: a heavy tail or a spike moves no verdict, and
a worse value can't improve one. A rise within the limits is a remark for the same reason: worse values before it would
undo it. What no mismatch can be (a negative KL, a multiplicative error below 1) is named instead of averaged.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.locate.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, find_change
from nemo_geomask.tools.diagnose.locate.factors import describe_steps
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_ORDER, Health
from nemo_geomask.tools.diagnose.read.logged_metrics import MetricSeries

TO_RECORD = "to diagnose the cause, record the run (loss_fn.record)"
_OTHER_MODES = ("val", "validation", "eval", "test")
"""First parts of the names of metrics that are not of training."""
_ROUNDING = 1e-4
"""How far below its smallest value a metric may be by rounding."""


@dataclass(frozen=True)
class LoggedMetric:
    """A quantity that training systems log, and how it is judged; ``logged_metrics.toml`` describes the fields."""

    names: Mapping[str, Sequence[str]]
    excess: str
    drifting: float
    broken: float
    floor: float
    limits: str
    smallest: float = 0.0
    largest: float = math.inf
    impossible: str = "a mean of absolute values can't be below 0"

    def measure_excess(self, value: float) -> float:
        """Return how far a value is on the bad side of perfect agreement, 0 or more."""
        if self.excess in ("below_one", "ratio"):
            logarithm = math.log(value) if value > 0 else -math.inf
            return -logarithm if self.excess == "below_one" else abs(logarithm)
        return abs(value) if self.excess == "size" else max(value - (self.excess == "above_one"), 0.0)


_TEXT = files("nemo_geomask.tools.diagnose.explain").joinpath("logged_metrics.toml").read_text(encoding="utf-8")
LOGGED_METRICS = tuple(LoggedMetric(**table) for table in tomllib.loads(_TEXT)["metric"])
"""Judged quantities."""
_BY_NAME = {name: metric for metric in LOGGED_METRICS for names in metric.names.values() for name in names}


class LoggedVerdict(NamedTuple):
    """Verdict from logged metrics alone. They cannot identify a cause, and have no interval over sequences."""

    health: Health  # health of the run
    since: int | None  # first step of the rise to unhealthy values; None if there was none
    sentence: str  # the verdict as text


class _MetricVerdict(NamedTuple):
    """Verdict from one metric, as :class:`LoggedVerdict`."""

    health: Health
    since: int | None
    median: float  # over the last third of the steps, or those since a rise within them
    remarks: list[str]  # spikes, impossible values and rises that are no reason for the verdict
    beyond: str  # in which of the judged steps an unhealthy metric is beyond its limit, if its median is not
    unknown: str  # why it can't be called healthy; empty if it can


def expected_names() -> str:
    """Return the names of the metrics that are judged, by system."""
    systems: dict[str, list[str]] = {}
    for metric in LOGGED_METRICS:
        for system, names in metric.names.items():
            systems.setdefault(system, []).append(names[0])
    return "; ".join(f"{system}: {', '.join(names)}" for system, names in systems.items())


def judge_logged(series: MetricSeries) -> LoggedVerdict | None:
    """Return the verdict from the metrics that tell the mismatch; None if none of them was logged as a number.

    Raises:
        DataError: no metric is beyond its limit, but one has become NaN or impossible.
    """
    metrics = {name: metric for name in series if (metric := _find_metric(name)) is not None}
    empty_steps = {
        step
        for name, metric in metrics.items()
        if metric.excess == "above_one"
        for step, value in series[name].items()
        if value < 1.0 - _ROUNDING
    }
    verdicts = {
        name: _judge_metric(name, metric, series[name], empty_steps)
        for name, metric in metrics.items()
        if any(math.isfinite(value) or value == math.inf for value in series[name].values())
    }
    if not verdicts:
        return None
    health = max((verdict.health for verdict in verdicts.values()), key=HEALTH_ORDER.index)
    onsets = [verdict.since for verdict in verdicts.values() if verdict.health == health and verdict.since is not None]
    since = min(onsets, default=None) if health != "healthy" else None
    if health == "healthy" and (unknown := [verdict.unknown for verdict in verdicts.values() if verdict.unknown]):
        raise DataError(f"the logged metrics do not tell the run's present health: {'; '.join(unknown)}; {TO_RECORD}")
    numbers = [_value_text(name, metrics[name], verdict) for name, verdict in verdicts.items()]
    remarks = [remark for verdict in verdicts.values() for remark in verdict.remarks]
    onset = "" if since is None else f" since step {since}"
    sentence = "; ".join([f"{health}{onset}, by logged metrics alone: {', '.join(numbers)}", *remarks, TO_RECORD])
    return LoggedVerdict(health, since, sentence)


def _find_metric(name: str) -> LoggedMetric | None:
    """Return the metric of a name or of the part behind a prefix, such as ``actor/rollout_corr/kl``."""
    parts = name.split("/")
    if parts[0] in _OTHER_MODES:
        return None
    suffixes = ("/".join(parts[first:]) for first in range(len(parts)))
    return next((_BY_NAME[suffix] for suffix in suffixes if suffix in _BY_NAME), None)


def _value_text(name: str, metric: LoggedMetric, verdict: _MetricVerdict) -> str:
    text = f"{name} {verdict.median:.4g}"
    beyond = f", beyond its limit in {verdict.beyond}" if verdict.beyond else ""
    return text if verdict.health == "healthy" else f"{text} ({verdict.health}{beyond}; limits {metric.limits})"


def _judge_metric(
    name: str, metric: LoggedMetric, by_step: Mapping[int, float], empty_steps: set[int]
) -> _MetricVerdict:
    steps = sorted(by_step)
    excess, impossible = _read_excess(metric, by_step, set() if metric.excess == "above_one" else empty_steps)
    usable = list(excess)
    last_third = steps[-max(3, len(steps) // 3) :]
    windows = ([excess[step] for step in last_third if step in excess], [excess[step] for step in usable[-2:]])
    health = max((_judge_window(window, metric) for window in windows), key=HEALTH_ORDER.index)
    since, rise = _find_rise(list(excess.values()), usable, metric)
    is_risen = since is not None and since > last_third[0] and health != "healthy"
    judged = [step for step in usable if is_risen and step >= (since or 0)] or last_third
    values = sorted(by_step[step] for step in judged if step in excess and step not in impossible)
    values = values or sorted(by_step[step] for step in judged if step in excess)
    median = values[len(values) // 2] if values else math.nan
    remarks = []
    if impossible:
        lowest = min(by_step[step] for step in impossible)
        count = f"{len(impossible)} of {len(steps)} steps"
        remarks.append(f"{name} is impossible in {count}, down to {lowest:.4g}: {metric.impossible}")
    if nonfinite := [step for step in steps if not math.isfinite(by_step[step])]:
        remarks.append(f"{name} is NaN or infinite in {len(nonfinite)} of {len(steps)} steps")
    beyond = [step for step in usable if excess[step] > metric.drifting]
    if health == "healthy" and beyond:
        worst = max(beyond, key=excess.__getitem__)
        spikes = f"{name} is beyond its limit in {len(beyond)} of {len(steps)} steps only"
        remarks.append(f"{spikes} (step {worst}: {by_step[worst]:.4g})")
    elif health == "healthy" and since is not None:
        remarks.append(
            f"{name} is {math.exp(rise):.3g} times as far from agreement since step {since}, within its limit"
        )
    elif health != "healthy" and metric.excess == "ratio" and median < 1:
        remarks.append(
            "the weights of the correction have vanished, and with them the gradient, as products over long sequences "
            "do: set loss_fn.name: clipped_pg with is_correction_level: token; in a recipe without loss_fn.name, "
            "sequence_level_importance_ratios: true makes such products"
        )
    beyond_now = [step for step in beyond if step in judged]
    is_half = health != "healthy" and 0 < 2 * len(beyond_now) <= len(judged)
    half = f"{len(beyond_now)} of {len(judged)} steps: {describe_steps(beyond_now, len(judged))}" if is_half else ""
    unknown = ""
    missing = [step for step in last_third if step not in excess]
    nan_count = sum(math.isnan(by_step[step]) for step in last_third)
    if 2 * len(missing) > len(last_third):
        kind = "NaN" if nan_count == len(missing) else "impossible, or of empty steps,"
        unknown = f"{kind} in most of the last third of the steps: {'; '.join(remarks) or name}"
    elif {*beyond} & {*last_third} and _is_many(nan_count + len({*beyond} & {*last_third}), len(last_third)):
        unknown = f"{name} is beyond its limit or NaN in too many of the last {len(last_third)} steps"
    return _MetricVerdict(health, since, median, remarks, half, unknown)


def _read_excess(
    metric: LoggedMetric, by_step: Mapping[int, float], empty_steps: set[int]
) -> tuple[dict[int, float], set[int]]:
    """Return the excess of each step that can be judged, in order, and the steps with impossible values."""
    excess, impossible = {}, set()
    for step, value in sorted(by_step.items()):
        if math.isnan(value) or step in empty_steps:
            continue
        if metric.smallest - _ROUNDING <= value <= metric.largest + _ROUNDING:
            excess[step] = metric.measure_excess(value)
        else:
            impossible.add(step)
    return excess, impossible


def _is_many(count: int, steps: int) -> bool:
    """Return True for more than a quarter of the steps, and more than one of them unless there is only one."""
    return count >= min(steps, max(2, steps // 4 + 1))


def _judge_window(values: Sequence[float], metric: LoggedMetric) -> Health:
    """Return broken if most values are beyond that limit, drifting if more than a quarter is beyond the lower one."""
    beyond = [sum(value > limit for value in values) for limit in (metric.drifting, metric.broken)]
    if values and beyond[1] >= min(len(values), max(2, len(values) // 2 + 1)):
        return "broken"
    return "drifting" if values and _is_many(beyond[0], len(values)) else "healthy"


def _find_rise(excess: Sequence[float], steps: Sequence[int], metric: LoggedMetric) -> tuple[int | None, float]:
    """Return the first step of a lasting rise, and its size as a logarithm; None if there is none.

    Changes are detected in the logarithms, of medians of three values, so that a single value is no change. An overflow
    counts as much as the largest finite value.
    """
    if len(excess) < 3:
        return None, 0.0
    finite = [value for value in excess if value < math.inf]
    values = np.clip(excess, metric.floor, max([metric.broken, *finite]))
    middle = np.sort(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)[1]
    logs = np.log([min(values[0], values[1]), *middle, min(values[-1], values[-2])])
    change = find_change(logs.tolist(), MIN_NOISE)
    if change is None or change.rise < MIN_RISE or change.score < MIN_SCORE:
        return None, 0.0
    return steps[change.first], change.rise
