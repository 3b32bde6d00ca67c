"""Reading of a run's records: the run's statistics for the diagnosis, or the sequences of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_geomask.tools.diagnose.record_reader import RecordBlock, read_blocks
from nemo_geomask.tools.diagnose.record_sources import RunFiles, apply_to_record, map_records
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.step_survey import survey_block

__all__ = ["read_step", "survey_file", "survey_run"]

DimensionPairs = Sequence[tuple[str, str]]
"""Names of two dimensions each, by which tokens are split together."""
RecordMapper = Callable[[Callable[[Path], Any], Sequence[Path], Path | None], Iterator[Any]]
"""Function that maps a function over record files, like ``map_records``; its last argument is the cache folder."""


def survey_file(path: Path, dimension_pairs: DimensionPairs = ()) -> RunStatistics:
    """Return the statistics of one record; ``dimension_pairs`` as for :func:`survey_run`."""
    statistics = RunStatistics()
    for block in read_blocks(path):
        statistics.add(survey_block(block, dimension_pairs))
    return statistics


def survey_run(
    run: RunFiles,
    steps: Sequence[int] | None = None,
    cache: Path | None = None,
    *,
    dimension_pairs: DimensionPairs = (),
    mapper: RecordMapper = map_records,
) -> RunStatistics:
    """Return the statistics of a run, or of some of its steps.

    Args:
        run: the run's files.
        steps: numbers of the steps; None: all steps.
        cache: folder for records converted from logs; None: next to the logs.
        dimension_pairs: pairs of dimensions by which tokens are split together.
        mapper: function that calls a function on each file, in the order of the paths:
            :func:`~nemo_geomask.tools.diagnose.record_sources.map_records` on all cores of this machine, or the result
            of :func:`~nemo_geomask.tools.diagnose.ray_survey.connect_ray` on all cores of a cluster.
    """
    statistics = RunStatistics()
    for part in mapper(partial(survey_file, dimension_pairs=tuple(dimension_pairs)), run.paths(steps), cache):
        statistics.add(part)
    return statistics


def read_step(run: RunFiles, step: int, cache: Path | None = None) -> Iterator[RecordBlock]:
    """Yield the sequences of one step; ``cache`` as for :func:`survey_run`."""
    for path in run.paths([step]):
        yield from apply_to_record(read_blocks, path, cache)
