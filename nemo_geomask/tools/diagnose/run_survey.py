"""Reading a run's records: its statistics for the diagnosis, and one step's sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_geomask.tools.diagnose.record_reader import RecordBlock, read_blocks
from nemo_geomask.tools.diagnose.record_sources import RunFiles, map_records
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.step_survey import survey

__all__ = ["read_step", "survey_file", "survey_run"]

DimensionPairs = Sequence[tuple[str, str]]
RecordMapper = Callable[[Callable[[Path], Any], Sequence[Path], Path | None], Iterator[Any]]


def survey_file(path: Path, crosses: DimensionPairs = ()) -> RunStatistics:
    """Return the statistics of one record; ``crosses`` as for :func:`survey_run`."""
    statistics = RunStatistics()
    for block in read_blocks(path):
        statistics.add(survey(block, crosses))
    return statistics


def survey_run(
    run: RunFiles,
    steps: Sequence[int] | None = None,
    cache: Path | None = None,
    *,
    crosses: DimensionPairs = (),
    mapper: RecordMapper = map_records,
) -> RunStatistics:
    """Return the statistics of a run, or of some of its steps.

    Args:
        run: its files.
        steps: numbers of the steps; None: all.
        cache: folder of converted logs; None: beside the logs.
        crosses: pairs of dimensions by which tokens are split at once.
        mapper: calls a function on each file, in the order of the paths:
            :func:`~nemo_geomask.tools.diagnose.record_sources.map_records` on all cores of this machine, or the result
            of :func:`~nemo_geomask.tools.diagnose.ray_survey.connect_ray` on all cores of a cluster.
    """
    statistics = RunStatistics()
    for part in mapper(partial(survey_file, crosses=tuple(crosses)), run.paths(steps), cache):
        statistics.add(part)
    return statistics


def read_step(run: RunFiles, step: int, cache: Path | None = None) -> Iterator[RecordBlock]:
    """Yield the sequences of one step; ``cache`` as for :func:`survey_run`."""
    for record in map_records(_identity, run.paths([step]), cache, processes=1):
        yield from read_blocks(record)


def _identity(path: Path) -> Path:
    return path
