"""Metrics that a run logged: how they are read, and a verdict from them for a run without records.

They are read from TensorBoard's event files (NeMo-RL's ``logger.tensorboard_enabled``), from ``metrics.jsonl`` (a JSON
object for each step) or from the lab's table. NeMo-RL's prefix ``train/`` is removed, so that a metric has the same
name in all three.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_geomask.errors import DataError, InputLimitError, MissingDependencyError
from nemo_geomask.recipe.input_limits import current_limits, limit_error
from nemo_geomask.records.record_schema import require_arrow
from nemo_geomask.tools.diagnose.change_points import MIN_NOISE, MIN_RISE, MIN_SCORE, find_change
from nemo_geomask.tools.diagnose.json_lines import open_log, read_json_lines
from nemo_geomask.tools.diagnose.thresholds import HEALTH_LIMITS, HEALTH_ORDER, Health

__all__ = ["LoggedVerdict", "MetricSeries", "judge_logged", "metric_series", "read_logged"]

MetricSeries = dict[str, dict[int, float]]
"""Values by metric name, then by step."""

_EVENT_FILES = "events*tfevents*"
_MAX_STEP = 2**63
_MIN_STEPS = 10
"""A mean of fewer values than this that is beyond a limit is never called healthy."""
_LINE_COST = 4
"""Numbers that take as long to read as what a line of JSON takes beside its numbers."""
_LIMITS = {name: limit for limit in HEALTH_LIMITS for name in limit.logged}
"""Health limit of each metric that has one."""

_Entries = list[tuple[int, str, float]]
"""Step, metric name and value of each logged number."""


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


def read_logged(folder: Path) -> MetricSeries:
    """Return all metrics that the run in a folder logged; empty if there are none.

    Raises:
        DataError: a file is damaged, or there are event files of several runs.
        MissingDependencyError: there are event files, but ``tensorboard`` is not installed.
    """
    jsonl = folder / "metrics.jsonl"
    lab_table = folder.parent / "steps" / f"{folder.name}.parquet"
    entries = _read_jsonl(jsonl) if jsonl.is_file() else _read_table(lab_table) if lab_table.is_file() else []
    event_files = sorted(folder.rglob(_EVENT_FILES), key=lambda path: (_modified(path), path))
    # TensorBoard writes hyperparameters into folders below the run's; these folders are not runs of their own.
    parents = {path.parent for path in event_files}
    runs = sorted(str(parent.relative_to(folder)) for parent in parents if not parents & {*parent.parents})
    if len(runs) > 1:
        raise DataError(f"{folder} holds the metrics of several runs: {', '.join(runs)}; name one of these folders")
    series: MetricSeries = {}
    # A resumed run repeats steps: the later file overwrites the earlier one's values.
    for step, name, value in [*entries, *(entry for path in event_files for entry in _read_events(path))]:
        series.setdefault(name.removeprefix("train/"), {})[step] = value
    return series


def _modified(path: Path) -> float:
    """Return when a file was written; raise DataError if it can't be told, as of a link to nowhere."""
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None


def metric_series(history: Iterable[Mapping[str, float]]) -> MetricSeries:
    """Return the series of metrics from one mapping per step, the first of which is step 1."""
    series: MetricSeries = {}
    for step, metrics in enumerate(history, 1):
        for name, value in metrics.items():
            series.setdefault(name, {})[step] = float(value)
    return series


def _read_jsonl(path: Path) -> _Entries:
    entries: _Entries = []
    _check_size(path)
    for number, metrics in read_json_lines(path):
        try:
            step = int(metrics["step"])
            if abs(step) >= _MAX_STEP:
                raise ValueError("its step does not fit 64 bits")
            entries += [
                (step, sys.intern(name), float(value))
                for name, value in metrics.items()
                if isinstance(value, (int, float)) and name != "step"
            ]
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise DataError(f"{path}:{number}: not an object with a step: {str(error)[:200]}") from None
        _check_count(len(entries) + _LINE_COST * number, f"{path}:{number}")
    return entries


def _check_count(count: int, source: object) -> None:
    limits = current_limits()
    if count > limits.metric_values:
        raise limit_error("metric_values", source, limits)


def _check_size(path: Path) -> None:
    """Raise InputLimitError if a file of metrics, which is held in memory, is too large or no regular file."""
    limits = current_limits()
    with open_log(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > limits.metrics_bytes:
        raise limit_error("metrics_bytes", path, limits, size)


def _read_table(path: Path) -> _Entries:
    _check_size(path)
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if not arrow.types.is_integer(schema.field("step").type):
                raise ValueError(f"its steps are of type {schema.field('step').type}")
            names = [field.name for field in schema if arrow.types.is_floating(field.type)]
            _check_count(file.metadata.num_rows * (1 + len(names)), path)
            table = file.read(columns=["step", *names])
        if table["step"].null_count:
            raise ValueError("it has rows without a step")
        columns = table.to_pydict()
    except InputLimitError:
        raise
    except (arrow.ArrowException, OSError, KeyError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: not the lab's table of steps: {str(error)[:200]}") from None
    return [
        (step, name, value)
        for name in names
        for step, value in zip(columns["step"], columns[name], strict=True)
        if value is not None
    ]


def _read_events(path: Path) -> _Entries:
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: TensorBoard's files need tensorboard, which could not be imported ({error}); "
            "pip install tensorboard"
        ) from error
    _check_size(path)
    try:
        events = module.EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        entries = [
            (int(event.step), str(name), float(event.value))
            for name in events.Tags()["scalars"]
            for event in events.Scalars(name)
        ]
    except Exception as error:  # TensorBoard raises errors of many types for a damaged file
        raise DataError(
            f"{path}: not an event file of TensorBoard: {type(error).__name__}: {str(error)[:200]}"
        ) from None
    _check_count(len(entries), path)
    return entries


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
