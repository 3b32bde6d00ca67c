"""Metrics that a run logged.

They are read from TensorBoard's event files (NeMo-RL's ``logger.tensorboard_enabled``) or from ``metrics.jsonl`` (an
object for each step; in verl's the metrics are its ``data``). NeMo-RL's prefix ``train/`` is removed, so that a metric
has the same name in both.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from nemo_geomask.errors import DataError, MissingDependencyError
from nemo_geomask.recipe.input_limits import check_limit
from nemo_geomask.tools.diagnose.read.json_lines import open_log, read_json_lines

MetricSeries = dict[str, dict[int, float]]
"""Values by metric name, then by step."""

_EVENT_FILES = "events*tfevents*"
_MAX_STEP = 2**63
_STEP_KEYS = ("step", "_step", "global_step", "train/step")
"""Keys of the step: ours and verl's, of exports from Weights & Biases, TRL's and slime's."""
_LINE_COST = 4
"""Numbers that take as long to read as what a line of JSON takes beside its numbers."""

_Entries = list[tuple[int, str, float]]
"""Step, metric name and value of each logged number."""


def read_logged(folder: Path) -> MetricSeries:
    """Return all metrics that the run in a folder logged; empty if there are none.

    Raises: DataError: a file is damaged, or there are event files of several runs. MissingDependencyError: there are
    event files, but ``tensorboard`` is not installed.
    """
    jsonl = folder / "metrics.jsonl"
    entries = _read_jsonl(jsonl) if jsonl.is_file() else []
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


def _read_jsonl(path: Path) -> _Entries:
    entries: _Entries = []
    _check_size(path)
    for number, metrics in read_json_lines(path):
        try:
            step = int(next(metrics[key] for key in _STEP_KEYS if key in metrics))
            metrics = metrics["data"] if isinstance(metrics.get("data"), dict) else metrics
            if abs(step) >= _MAX_STEP:
                raise ValueError("its step does not fit 64 bits")
            entries += [
                (step, sys.intern(name), float(value))
                for name, value in metrics.items()
                if isinstance(value, (int, float)) and name not in _STEP_KEYS
            ]
        except (ValueError, TypeError, StopIteration, AttributeError, OverflowError) as error:
            raise DataError(f"{path}:{number}: not an object with a step: {str(error)[:200]}") from None
        check_limit("metric_values", len(entries) + _LINE_COST * number, f"{path}:{number}")
    return entries


def _check_size(path: Path) -> None:
    """Raise InputLimitError if a file of metrics, which is held in memory, is too large or no regular file."""
    with open_log(path) as file:
        check_limit("metrics_bytes", os.fstat(file.fileno()).st_size, path)


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
    check_limit("metric_values", len(entries), path)
    return entries
