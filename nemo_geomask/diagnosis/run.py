"""From a run's files to its diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_geomask.diagnosis.read import RecordBlock, read_blocks
from nemo_geomask.diagnosis.sources import RunFiles, over_files
from nemo_geomask.diagnosis.statistics import Statistics
from nemo_geomask.diagnosis.survey import survey

__all__ = ["blocks_of", "survey_file", "survey_run"]


def survey_file(path: Path) -> Statistics:
    """The sums of one record."""
    found = Statistics()
    for block in read_blocks(path):
        found.add(survey(block))
    return found


def survey_run(run: RunFiles, steps: Sequence[int] | None = None, cache: Path | None = None) -> Statistics:
    """The sums of a run, or of some of its steps; files are read on all cores."""
    found = Statistics()
    for part in over_files(survey_file, run.paths(steps), cache):
        found.add(part)
    return found


def blocks_of(run: RunFiles, step: int, cache: Path | None = None) -> Iterator[RecordBlock]:
    """One step's records."""
    for path in over_files(_same, run.paths([step]), cache, processes=1):
        yield from read_blocks(path)


def _same(path: Path) -> Path:
    return path
