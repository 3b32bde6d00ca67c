"""Files of recorded runs: finds them in folders, and calls a function on each record; logs are converted to records."""

from __future__ import annotations

import hashlib
import os
import re
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
from nemo_geomask.records.record_checks import open_record, read_origin
from nemo_geomask.records.record_schema import RecordOrigin, file_name, step_files
from nemo_geomask.tools.diagnose.read.jsonl_logs import JSONL_WRITER, convert_log, log_step

CONVERTED_FOLDER = "geomask-records"
"""Name of the folder, beside NeMo-RL's logs, for the records that are converted from them."""

DAMAGE = (DataError, InputLimitError)
"""Errors of a file that can't be read."""
_MIN_BYTES_FOR_PROCESSES = 2**25
"""Size of records from which they are read by several processes.

Starting a process takes as long as reading a few million tokens.
"""
_LOG_BYTES_PER_RECORD_BYTE = 10
"""Bytes of a log that take as long to convert as a byte of a record takes to survey, or less."""


@dataclass(frozen=True)
class RunFiles:
    """Files of one run."""

    directory: Path
    records: dict[int, list[Path]]  # the flight recorder's files of each step
    logs: dict[int, Path]  # NeMo-RL's log of each step that the flight recorder has no file of
    # files of an earlier recording, of steps that a later one has begun again; they are not read
    superseded: Sequence[Path] = ()
    conflict: str = ""  # why the records can't be read together; empty if they can
    skips_damaged: bool = False

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps, in ascending order."""
        return sorted({*self.records, *self.logs})

    @property
    def is_converted(self) -> bool:
        """True if all files are records that were converted from logs."""
        files = (path for paths in self.records.values() for path in paths)
        return not self.logs and all(path.stem.endswith(f"-{JSONL_WRITER}") for path in files)

    def paths(self, steps: Sequence[int] | None = None) -> list[Path]:
        """Return the files of some steps, or of all steps for None."""
        steps = self.steps if steps is None else steps
        return [path for step in steps for path in self.records.get(step) or [self.logs[step]]]

    def check(self, steps: Sequence[int] | None = None) -> None:
        """Raise DataError if the records of some steps, or of all for None, are of several runs."""
        if self.conflict:
            raise DataError(self.conflict)
        for step in self.steps if steps is None else steps:
            paths = self.records.get(step, [])
            if len(paths) > 1:
                _check_rows_differ(step, paths)


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
    all_records = step_files(folder)
    origins = {path: _origin(path) for paths in all_records.values() for path in paths}
    records, superseded = _latest_recordings(all_records, origins)
    logs = {step: path for path in sorted(folder.iterdir()) if (step := log_step(path)) is not None}
    return RunFiles(
        folder,
        records,
        {step: path for step, path in sorted(logs.items()) if step not in records},
        superseded,
        _find_conflict(folder, all_records, origins),
        skip_damaged,
    )


def _origin(path: Path) -> RecordOrigin:
    """Return what wrote a record; by the file's name alone if the file does not say."""
    return read_origin(path) or RecordOrigin(re.sub(r"^step-\d+-", "", path.stem))


def _find_conflict(folder: Path, records: Mapping[int, list[Path]], origins: Mapping[Path, RecordOrigin]) -> str:
    """Return why the records can't be those of one run: two files of one step by the same writer."""
    for step, paths in records.items():
        by_writer: dict[str, Path] = {}
        for path in paths:
            other = by_writer.setdefault(origins[path].writer, path)
            if other is not path:
                return (
                    f"{folder}: two recorders wrote into this folder at the same time, so that it holds rows of two "
                    f"runs: {other.name} and {path.name} are both of step {step}; move the files of one to a folder of "
                    "their own"
                )
    return ""


def _latest_recordings(
    records: Mapping[int, list[Path]], origins: Mapping[Path, RecordOrigin]
) -> tuple[dict[int, list[Path]], list[Path]]:
    """Return the files without those of steps that a later recording has begun again, and those files."""
    recordings: dict[str, set[tuple[int, float]]] = {}
    for origin in origins.values():
        if origin.id:
            recordings.setdefault(origin.writer, set()).add((int(origin.first_step), origin.started))
    # For each writer: first steps in ascending order, and the latest start among the recordings up to each.
    tables: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for writer, begins in recordings.items():
        first_steps, starts = zip(*sorted(begins), strict=True)
        tables[writer] = first_steps, list(accumulate(starts, max))
    superseded = []
    latest: dict[int, list[Path]] = {}
    for step, paths in records.items():
        for path in paths:
            begun, latest_starts = tables.get(origins[path].writer, ((), ()))
            count = bisect_right(begun, step)
            if count and latest_starts[count - 1] > origins[path].started:
                superseded.append(path)
            else:
                latest.setdefault(step, []).append(path)
    return latest, superseded


def _check_rows_differ(step: int, paths: Sequence[Path]) -> None:
    """Raise DataError if two files of a step hold the same row; a file that can't be read is left to its reader."""
    files: dict[int, Path] = {}
    for path in paths:
        try:
            with open_record(path) as file:
                rows = [row for table in file.tables(["length", "row"]) for row in table.column("row").to_pylist()]
        except DAMAGE:
            continue
        for row in rows:
            other = files.setdefault(row, path)
            if other is not path:
                raise DataError(
                    f"{path}: has row {row} of step {step}, and so has {other.name}: these are rows of two runs; move "
                    "the files of one to a folder of their own"
                )


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
    function: Callable[[Path], Any], paths: Sequence[Path], cache: Path | None = None, *, processes: int | None = None
) -> Iterator[Any]:
    """Yield ``function(record)`` for each file, in the order of the paths, computed on all cores.

    NeMo-RL's logs are converted to records first, in the folder ``cache`` or next to them. ``function`` is picklable.
    Small files are read by this process alone, unless ``processes`` is set.
    """
    count = min(len(paths), processes or len(os.sched_getaffinity(0)))
    size = sum(_bytes_to_survey(path, cache) for path in paths)
    if count < 2 or (processes is None and size < _MIN_BYTES_FOR_PROCESSES):
        yield from (apply_to_record(function, path, cache) for path in paths)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_apply_with_limits, current_limits(), function, cache), paths)


def _bytes_to_survey(path: Path, cache: Path | None) -> int:
    """Return the size of a record, or of the record that is, or will be, converted from a log; 0 if there is none."""
    step = log_step(path)
    converted = None if step is None else _folder_of_converted(path, cache) / file_name(step, JSONL_WRITER)
    if converted is not None and converted.exists():
        return converted.stat().st_size
    # A link may lead nowhere, which its reader will say.
    size = path.stat().st_size if path.exists() else 0
    return size if step is None else size // _LOG_BYTES_PER_RECORD_BYTE


def _apply_with_limits(limits: InputLimits, function: Callable[[Path], Any], cache: Path | None, path: Path) -> Any:
    """Call :func:`apply_to_record` under the limits of the process that started this one."""
    with use_limits(limits):
        return apply_to_record(function, path, cache)


@dataclass(frozen=True)
class Tolerant:
    """Function of a record's path that has a value for a damaged one, too: ``of_damage`` of the path and the error."""

    function: Callable[[Path], Any]
    of_damage: Callable[[Path, Exception], Any]

    def __call__(self, path: Path) -> Any:
        """Return the value of one record."""
        return self.function(path)


def apply_to_record(function: Callable[[Path], Any], path: Path, cache: Path | None) -> Any:
    """Return ``function(record)`` for one file; a log is converted to a record first, as in :func:`map_records`."""
    try:
        return function(path if log_step(path) is None else _convert(path, cache))
    except DAMAGE as error:
        if isinstance(function, Tolerant):
            return function.of_damage(path, error)
        raise


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
