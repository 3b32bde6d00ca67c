"""What a run has logged of itself: a number a step and metric, for the report, and where nothing else was recorded.

From TensorBoard's event files (NeMo-RL's ``logger.tensorboard_enabled``), ``metrics.jsonl`` (an object a step) or the
lab's table. NeMo-RL's prefix ``train/`` is left out, so that a metric has one name wherever it is from.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_geomask.diagnosis.changes import find_change
from nemo_geomask.diagnosis.levels import LEVELS, Health
from nemo_geomask.diagnosis.verdict import CERTAIN, LEAST_NOISE, RISE
from nemo_geomask.errors import DataError, MissingDependencyError
from nemo_geomask.records.schema import require_arrow

__all__ = ["LoggedVerdict", "Series", "as_series", "judge_logged", "read_logged"]

Series = dict[str, dict[int, float]]
"""By the metric's name, then the step."""
EVENTS = "events*tfevents*"
_NAMES = {name: level for level in LEVELS for name in level.logged}
"""Metrics that have a limit."""


@dataclass(frozen=True)
class LoggedVerdict:
    """What the metrics alone say: no cause, and no interval over sequences.

    Attributes:
        health: of the run.
        since: first changed step.
        values: by metric, its mean over the steps that count; NaN where most of them are.
        sentence: the verdict.
    """

    health: Health
    since: int | None
    values: Mapping[str, float]
    sentence: str


def read_logged(folder: Path) -> Series:
    """All metrics of the run in a folder; empty where it has logged none there.

    The lab has a table of each run beside the runs' folders.

    Raises: DataError: a file that is none, or event files of several runs. MissingDependencyError: event files without
        ``tensorboard``.
    """
    found: Series = {}
    lines, table = folder / "metrics.jsonl", folder.parent / "steps" / f"{folder.name}.parquet"
    entries = _lines(lines) if lines.is_file() else _table(table) if table.is_file() else []
    events = sorted(folder.rglob(EVENTS), key=lambda path: (path.stat().st_mtime, path))
    # Folders below one that has such files are its own: TensorBoard's hyperparameters have one each.
    holders = {path.parent for path in events}
    runs = sorted(str(holder.relative_to(folder)) for holder in holders if not holders & {*holder.parents})
    if len(runs) > 1:
        raise DataError(f"{folder} holds the metrics of several runs: {', '.join(runs)}; name one of these folders")
    # Of a run that was resumed, the later file holds what counts.
    for step, name, value in [*entries, *(entry for path in events for entry in _events(path))]:
        found.setdefault(name.removeprefix("train/"), {})[step] = value
    return found


def as_series(history: Iterable[Mapping[str, float]]) -> Series:
    """Of metrics in the order of the steps, from 1."""
    found: Series = {}
    for step, metrics in enumerate(history, 1):
        for name, value in metrics.items():
            found.setdefault(name, {})[step] = float(value)
    return found


def _lines(path: Path) -> list[tuple[int, str, float]]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            entry = json.loads(line)
            step = int(entry["step"])
        except (ValueError, TypeError, KeyError) as error:
            if not line.endswith(b"\n"):
                break  # being written
            raise DataError(f"{path}:{number}: not an object with a step: {error!r}") from None
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float)) and name != "step"}
        found += [(step, name, float(value)) for name, value in numbers.items()]
    return found


def _table(path: Path) -> list[tuple[int, str, float]]:
    table = require_arrow("pyarrow.parquet").read_table(path, partitioning=None).to_pydict()
    steps = table.pop("step")
    return [
        (step, name, value)
        for name, column in table.items()
        for step, value in zip(steps, column, strict=True)
        if isinstance(value, float)
    ]


def _events(path: Path) -> list[tuple[int, str, float]]:
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: TensorBoard's files need tensorboard, which could not be imported ({error}); "
            "pip install tensorboard"
        ) from error
    events = module.EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (int(event.step), str(name), float(event.value))
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]


def judge_logged(series: Series) -> LoggedVerdict | None:
    """The verdict by the metrics that have a limit; None where none of them was ever logged as a number.

    Raises: DataError: a metric has become NaN, and no other one is beyond its limit.
    """
    limited = {name: series[name] for name in _NAMES if name in series}
    verdicts = [_judge(name, found) for name, found in limited.items() if any(map(_is_number, found.values()))]
    if not verdicts:
        return None
    order: Sequence[Health] = ("healthy", "drifting", "broken")
    worst = max(verdicts, key=lambda one: order.index(one[0]))
    since = min((one[1] for one in verdicts if one[0] == worst[0] and one[1] is not None), default=None)
    values = {name: one[2] for one in verdicts for name in [one[3]]}
    if worst[0] == "healthy" and (gone := [name for name, value in values.items() if math.isnan(value)]):
        raise DataError(
            f"its metrics say nothing of how it is now: NaN in most of the last third of the steps: {', '.join(gone)}; "
            "for the cause, record it (loss_fn.record)"
        )
    said = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    lost = {name: sum(not math.isfinite(value) for value in limited[name].values()) for name in values}
    said += "".join(f", {name} NaN or infinite in {count} steps" for name, count in lost.items() if count)
    when = worst[0] if since is None else f"{worst[0]} since step {since}"
    sentence = f"{when}, by its metrics alone: {said}; for the cause, record it (loss_fn.record)"
    return LoggedVerdict(worst[0], since, values, sentence)


def _is_number(value: float) -> bool:
    """Or an overflow, which is more than any limit."""
    return math.isfinite(value) or value == math.inf


def _judge(name: str, by_step: Mapping[int, float]) -> tuple[Health, int | None, float, str]:
    """Its health, since when, its mean over the steps that count (NaN where most of them are) and its name."""
    level, steps = _NAMES[name], sorted(by_step)
    known = [step for step in steps if _is_number(by_step[step])]
    # A change is that of logarithms, in which an overflow is no more than the worst of the other values.
    worst = max([level.broken, *(by_step[step] for step in known if by_step[step] < math.inf)])
    excess = 1.0 if name == "token_mult_prob_error" else 0.0  # its least value
    change = find_change([math.log(max(min(by_step[step], worst) - excess, 1e-9)) for step in known], LEAST_NOISE)
    since = None
    if change is not None and change.rise >= RISE and change.score >= CERTAIN:
        since = known[change.first]
    last = steps[-max(3, len(steps) // 3) :] if since is None else [step for step in steps if step >= since]
    counted = np.array([by_step[step] for step in last if step in known])
    if since is None and 2 * len(counted) < len(last):
        return "healthy", None, math.nan, name
    mean = float(counted.mean())
    if mean == math.inf:
        return "broken", since, mean, name
    sure = mean - 2 * float(counted.std()) / math.sqrt(len(counted))
    drifting = sure > level.drifting or since is not None
    health: Health = "broken" if sure > level.broken else "drifting" if drifting else "healthy"
    return health, since, mean, name
