"""Files of recorded runs: finds them in folders, and calls a function on each record; logs are converted to records."""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, DataError, InputLimitError
from nemo_geomask.recipe.input_limits import InputLimits, current_limits, use_limits
from nemo_geomask.records.record_checks import read_origin
from nemo_geomask.records.record_schema import RecordOrigin, step_files
from nemo_geomask.tools.diagnose.read.jsonl_logs import JSONL_WRITER, convert_log, log_step

CONVERTED_FOLDER = "geomask-records"
"""Name of the folder, beside NeMo-RL's logs, for the records that are converted from them."""

DAMAGE = (DataError, InputLimitError)
"""Errors of a file that can't be read."""
OfDamage = Callable[[Path, Exception], Any]
MIN_BYTES_FOR_PROCESSES = 2**25
"""Size of records from which they are read by several processes.

Starting a process takes as long as reading a few million tokens.
"""
_LOG_BYTES_PER_RECORD_BYTE = 10
"""Bytes of a log that take as long to convert as a byte of a record takes to survey, or less."""


@dataclass(frozen=True)
class RunFiles:
    """Files of one run."""

    directory: Path
    records: dict[int, Path]  # the flight recorder's file of each step
    logs: dict[int, Path]  # NeMo-RL's log of each step that the flight recorder has no file of
    superseded: int = 0  # number of files of an earlier recording, of steps that a later one has begun again
    conflict: str = ""  # why the records can't be read together; empty if they can
    skips_damaged: bool = False

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps, in ascending order."""
        return sorted({*self.records, *self.logs})

    @property
    def is_converted(self) -> bool:
        """True if all files are records that were converted from logs."""
        return not self.logs and all(path.stem.endswith(f"-{JSONL_WRITER}") for path in self.records.values())

    def paths(self, steps: Sequence[int] | None = None) -> list[Path]:
        """Return the files of some steps, or of all steps for None.

        Raises: DataError: the records are of several runs.
        """
        if self.conflict:
            raise DataError(self.conflict)
        return [self.records.get(step) or self.logs[step] for step in (self.steps if steps is None else steps)]


def find_runs(directories: Sequence[Path], *, skip_damaged: bool = False) -> list[RunFiles]:
    """Return a run for each folder, at or below ``directories``, that holds records or ``train_data_step{N}.jsonl``.

    Records in a folder directly below a folder of logs belong to the run of the logs. Records that were converted from
    logs are a run only if no other files are found.

    Raises: DataError: one of the directories does not exist, or no run is in or below it.
    """
    all_runs = []
    for top in directories:
        if not top.is_dir():
            problem = "is a file, not a folder" if top.exists() else "no such folder"
            raise DataError(f"{top}: {problem}; name that of the records (loss_fn.record.dir) or of NeMo-RL's logs")
        runs = [run for folder, _, _ in sorted(os.walk(top)) if (run := _list_files(Path(folder), skip_damaged)).steps]
        runs = _join_records_to_logs([run for run in runs if not run.is_converted] or runs)
        if not runs:
            raise DataError(
                f"{top}: holds neither records (step-0000001-….parquet, from loss_fn.record) nor "
                "train_data_step{N}.jsonl, which NeMo-RL writes into logger.log_dir unless "
                "env.should_log_nemo_gym_responses is true"
            )
        all_runs += runs
    return all_runs


def find_run(directory: Path, *, skip_damaged: bool = False) -> RunFiles:
    """Return the only run in a folder.

    Raises: ConfigError: the folder holds several runs. DataError: it does not exist, or holds no run.
    """
    runs = find_runs([directory], skip_damaged=skip_damaged)
    if len(runs) > 1:
        raise ConfigError(f"{directory} holds several runs: {', '.join(str(run.directory) for run in runs)}; name one")
    return runs[0]


def _list_files(folder: Path, skip_damaged: bool) -> RunFiles:
    files = step_files(folder)
    conflicts = (
        f"{folder}: two recorders wrote into this folder at the same time, so that it holds rows of two runs: "
        f"{paths[0].name} and {paths[1].name} are both of step {step}; move the files of one to a folder of their own"
        for step, paths in files.items()
        if len(paths) > 1
    )
    all_records = {step: paths[0] for step, paths in files.items()}
    records = _latest_recordings(all_records)
    logs = {step: path for path in sorted(folder.iterdir()) if (step := log_step(path)) is not None}
    return RunFiles(
        folder,
        records,
        {step: path for step, path in sorted(logs.items()) if step not in records},
        len(all_records) - len(records),
        next(conflicts, ""),
        skip_damaged,
    )


def _latest_recordings(records: Mapping[int, Path]) -> dict[int, Path]:
    """Return the files without those of steps that a later recording has begun again."""
    origins = {step: read_origin(path) or RecordOrigin("") for step, path in records.items()}
    begins = sorted({(int(origin.first_step), origin.started) for origin in origins.values() if origin.id})
    first_steps, starts = [first_step for first_step, _ in begins], [started for _, started in begins]
    # The latest start among the recordings up to each.
    latest_starts = [-math.inf, *accumulate(starts, max)]
    return {
        step: path
        for step, path in records.items()
        if latest_starts[bisect_right(first_steps, step)] <= origins[step].started
    }


def _join_records_to_logs(runs: list[RunFiles]) -> list[RunFiles]:
    """Merge each run of records into the run of logs whose folder is its parent."""
    log_runs = {run.directory: run for run in runs if not run.records}
    joined = {run.directory: run for run in runs}
    for run in runs:
        parent = log_runs.get(run.directory.parent)
        if parent is not None and run.records:
            del joined[run.directory]
            records = dict(sorted((joined[parent.directory].records | run.records).items()))
            logs = {step: path for step, path in parent.logs.items() if step not in records}
            joined[parent.directory] = replace(run, directory=parent.directory, records=records, logs=logs)
    return list(joined.values())


def map_records(
    function: Callable[[Path], Any],
    paths: Sequence[Path],
    cache: Path | None = None,
    of_damage: OfDamage | None = None,
) -> Iterator[Any]:
    """Yield :func:`apply_to_record` of each file, in the order of the paths, computed on all cores.

    ``function`` and ``of_damage`` are picklable. Small files are read by this process alone.
    """
    count = min(len(paths), len(os.sched_getaffinity(0)))
    if count < 2 or sum(map(_bytes_to_survey, paths)) < MIN_BYTES_FOR_PROCESSES:
        yield from (apply_to_record(function, path, cache, of_damage) for path in paths)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_apply_with_limits, current_limits(), function, cache, of_damage), paths)


def _bytes_to_survey(path: Path) -> int:
    """Return the size of a record, or about that of the record of a log; 0 for a link that leads nowhere."""
    size = path.stat().st_size if path.exists() else 0
    return size if log_step(path) is None else size // _LOG_BYTES_PER_RECORD_BYTE


def _apply_with_limits(
    limits: InputLimits,
    function: Callable[[Path], Any],
    cache: Path | None,
    of_damage: OfDamage | None,
    path: Path,
) -> Any:
    """Call :func:`apply_to_record` under the limits of the process that started this one."""
    with use_limits(limits):
        return apply_to_record(function, path, cache, of_damage)


def apply_to_record(
    function: Callable[[Path], Any], path: Path, cache: Path | None, of_damage: OfDamage | None = None
) -> Any:
    """Return ``function(record)`` for one file, or for a damaged one ``of_damage`` of its path and the error.

    A log of NeMo-RL is converted to a record first, in the folder ``cache`` or next to the log.
    """
    try:
        return function(path if log_step(path) is None else _convert(path, cache))
    except DAMAGE as error:
        if of_damage is None:
            raise
        return of_damage(path, error)


def _folder_of_converted(log: Path, cache: Path | None) -> Path:
    """Return the folder of the records that are converted from a log and its neighbours."""
    if cache is None:
        return log.parent / CONVERTED_FOLDER
    return cache / hashlib.sha256(os.fsencode(log.parent.resolve())).hexdigest()[:16]  # several runs may share a cache


def _convert(log: Path, cache: Path | None) -> Path:
    directory = _folder_of_converted(log, cache)
    try:
        return convert_log(log, directory)
    except OSError as error:
        raise DataError(
            f"{directory}: the record converted from {log.name} can't be written here ({error.strerror or error}); "
            "name another folder by --cache"
        ) from None
