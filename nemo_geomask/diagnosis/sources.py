"""Where the records of runs are: a recorder's directories, and logs of NeMo-RL's that become records once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nemo_geomask.diagnosis.jsonl import JSONL_WRITER, convert, step_of
from nemo_geomask.errors import DataError
from nemo_geomask.records.schema import step_files

__all__ = ["RunFiles", "find_runs", "of_file", "over_files"]

CONVERTED = "geomask-records"
"""Folder beside NeMo-RL's files that holds them as records."""


@dataclass(frozen=True)
class RunFiles:
    """One run's files.

    Attributes:
        directory: where they are.
        records: of the recorder, by step.
        logs: NeMo-RL's, by step, where the recorder wrote none of that step.
    """

    directory: Path
    records: dict[int, list[Path]]
    logs: dict[int, Path]

    @property
    def steps(self) -> list[int]:
        """In order."""
        return sorted({*self.records, *self.logs})

    @property
    def converted(self) -> bool:
        """Whether all of them are what logs have become."""
        files = (path for found in self.records.values() for path in found)
        return not self.logs and all(path.stem.endswith(f"-{JSONL_WRITER}") for path in files)

    def paths(self, steps: Sequence[int] | None = None) -> list[Path]:
        """Files of those steps, or of all."""
        wanted = self.steps if steps is None else steps
        return [path for step in wanted for path in self.records.get(step) or [self.logs[step]]]


def find_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """Every folder that holds records or ``train_data_step{N}.jsonl``, at or below those given.

    Logs that were converted are no run beside the logs; where there is nothing else, they are one. Records in a folder
    of the logs' are the same run.

    Raises: DataError: there is no such folder, or none in it.
    """
    found = []
    for top in directories:
        if not top.is_dir():
            raise DataError(f"{top}: no folder; give that of the records (loss_fn.record.dir) or of NeMo-RL's log")
        runs = [run for folder, _, _ in sorted(os.walk(top)) if (run := _run(Path(folder))).steps]
        runs = _joined([run for run in runs if not run.converted] or runs)
        if not runs:
            raise DataError(
                f"{top}: holds neither records (step-0000001-….parquet, from loss_fn.record) nor "
                "train_data_step{N}.jsonl, which NeMo-RL writes into logger.log_dir unless "
                "env.should_log_nemo_gym_responses is true"
            )
        found += runs
    return found


def _joined(runs: list[RunFiles]) -> list[RunFiles]:
    of_logs = {run.directory: run for run in runs if not run.records}
    found = {run.directory: run for run in runs}
    for run in runs:
        logged = of_logs.get(run.directory.parent)
        if logged is not None and run.records:
            del found[run.directory]
            records = found[logged.directory].records | run.records
            logs = {step: path for step, path in logged.logs.items() if step not in records}
            found[logged.directory] = RunFiles(logged.directory, dict(sorted(records.items())), logs)
    return list(found.values())


def _run(folder: Path) -> RunFiles:
    records = step_files(folder)
    logs = {step: path for path in sorted(folder.iterdir()) if (step := step_of(path)) is not None}
    return RunFiles(folder, records, {step: path for step, path in sorted(logs.items()) if step not in records})


def over_files(
    work: Callable[[Path], Any], paths: Sequence[Path], cache: Path | None = None, *, processes: int | None = None
) -> Iterator[Any]:
    """``work`` of each file's record, in the order of the paths, on all cores.

    Args:
        work: picklable, takes the path of a Parquet file.
        paths: records, or logs of NeMo-RL's, which are converted first.
        cache: folder for those; beside them if None.
        processes: how many; as many as there are cores if None.
    """
    count = min(len(paths), processes or len(os.sched_getaffinity(0)))
    size = sum(path.stat().st_size for path in paths)
    # A process costs as much as reading a few million tokens.
    if count < 2 or (processes is None and size < 2**25):
        yield from (of_file(work, path, cache) for path in paths)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield from pool.map(of_file, [work] * len(paths), paths, [cache] * len(paths))


def of_file(work: Callable[[Path], Any], path: Path, cache: Path | None) -> Any:
    """``work`` of one file's record, which is made of it where it is a log."""
    if step_of(path) is not None:
        path = _converted(path, cache)
    return work(path)


def _converted(path: Path, cache: Path | None) -> Path:
    directory = path.parent / CONVERTED
    if cache is not None:  # of several runs, maybe
        directory = cache / hashlib.sha256(os.fsencode(path.parent.resolve())).hexdigest()[:16]
    try:
        return convert(path, directory)
    except OSError as error:
        raise DataError(
            f"{directory}: can't hold the records made of {path.name} ({error.strerror or error}); name another folder "
            "by --cache"
        ) from None
