"""Reading of a run's records: the run's statistics for the diagnosis, or the sequences of one step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import DataError
from nemo_geomask.records.record_checks import read_metadata
from nemo_geomask.records.record_schema import FACTS_KEY
from nemo_geomask.tools.diagnose.measure.run_statistics import ENGINES, RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock, read_blocks
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles, apply_to_record, map_records
from nemo_geomask.tools.shared.progress_bar import track


def survey_file(path: Path) -> RunStatistics:
    """Return the statistics of one record."""
    facts = read_facts(read_metadata(path))
    experts = facts.get("experts")
    statistics = RunStatistics(
        files=1,
        experts=experts if type(experts) is int else None,
        engines={role: {text} for role in ENGINES if isinstance(text := facts.get(role), str)},
    )
    for block in read_blocks(path):
        statistics.add(survey_block(block))
    return statistics


def read_facts(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return what a record's metadata say of the whole run."""
    facts = json.loads(metadata.get(FACTS_KEY.encode(), b"{}"))
    return facts if isinstance(facts, dict) else {}


def _leave_out(path: Path, error: Exception) -> RunStatistics:
    return RunStatistics(files=1, left_out={path: str(error)})


def survey_run(run: RunFiles, steps: Sequence[int] | None = None, cache: Path | None = None) -> RunStatistics:
    """Return the statistics of a run, or of some of its steps.

    Args:
        run: the run's files.
        steps: numbers of the steps; None: all steps.
        cache: folder for records converted from logs; None: next to the logs.
    """
    statistics = RunStatistics(superseded=run.superseded)
    paths, of_damage = run.paths(steps), _leave_out if run.skips_damaged else None
    for part in track(map_records(survey_file, paths, cache, of_damage), len(paths), "reading files"):
        statistics.add(part)
    if paths and len(statistics.left_out) == len(paths):
        first, *_ = statistics.left_out.values()
        raise DataError(f"{run.directory}: all {len(paths)} files are damaged; the first: {first}")
    return statistics


def read_step(
    run: RunFiles, step: int, cache: Path | None = None, left_out: dict[Path, str] | None = None
) -> Iterator[RecordBlock]:
    """Yield the sequences of one step; ``left_out`` gets the damaged files that the run skips, with their errors."""

    def leave_out(path: Path, error: Exception) -> Sequence[RecordBlock]:
        if left_out is not None:
            left_out[path] = str(error)
        return ()

    for path in run.paths([step]):
        if run.skips_damaged:  # read as a whole before its sequences are yielded
            yield from apply_to_record(lambda path: list(read_blocks(path)), path, cache, leave_out)
        else:
            yield from apply_to_record(read_blocks, path, cache)
