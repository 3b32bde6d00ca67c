"""From a run's files to its diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_geomask.diagnosis.read import RecordBlock, read_blocks
from nemo_geomask.diagnosis.sources import RunFiles, over_files
from nemo_geomask.diagnosis.statistics import Statistics
from nemo_geomask.diagnosis.survey import survey

__all__ = ["blocks_of", "survey_file", "survey_run"]

Crosses = Sequence[tuple[str, str]]
OverFiles = Callable[[Callable[[Path], Any], Sequence[Path], Path | None], Iterator[Any]]


def survey_file(path: Path, crosses: Crosses = ()) -> Statistics:
    """The sums of one record; ``crosses`` as for :func:`~nemo_geomask.diagnosis.survey.survey`."""
    found = Statistics()
    for block in read_blocks(path):
        found.add(survey(block, crosses))
    return found


def survey_run(
    run: RunFiles,
    steps: Sequence[int] | None = None,
    cache: Path | None = None,
    *,
    crosses: Crosses = (),
    over: OverFiles = over_files,
) -> Statistics:
    """The sums of a run, or of some of its steps, whatever reads its files.

    Args:
        run: its files.
        steps: some of its steps; None: all.
        cache: where logs that were converted are kept; None: beside them.
        crosses: pairs of dimensions by which tokens are split at once.
        over: gives ``work`` of each file, in the order of the paths:
            :func:`~nemo_geomask.diagnosis.sources.over_files` on all cores of this machine, or
            :func:`~nemo_geomask.diagnosis.cluster.over_ray`'s on all of a cluster.
    """
    found = Statistics()
    for part in over(partial(survey_file, crosses=tuple(crosses)), run.paths(steps), cache):
        found.add(part)
    return found


def blocks_of(run: RunFiles, step: int, cache: Path | None = None) -> Iterator[RecordBlock]:
    """One step's records."""
    for path in over_files(_same, run.paths([step]), cache, processes=1):
        yield from read_blocks(path)


def _same(path: Path) -> Path:
    return path
