"""Writer of records: a step's Parquet file, and the thread that writes it off the training path."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.records.record_schema import RecordOrigin, file_name, require_arrow
from nemo_geomask.records.recording_folder import RecordingFolder
from nemo_geomask.records.step_table import StepRows, step_table
from nemo_geomask.records.stored_files import FileIdentity, StoredFile, open_folder, store_record

_log = logging.getLogger("nemo_geomask")
ROW_GROUP = 2**20
"""Approximate number of tokens in a row group of a file; a reader holds one row group in memory at a time."""


def write_step(
    directory: Path,
    step: int,
    rows: StepRows,
    *,
    writer: str = "driver",
    masks: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write one step's records; a file that the same writer has written for this step is replaced.

    While another recorder writes into the folder, nothing is replaced, and the file gets a name of its own.

    Args:
        directory: the run's directory; created if it does not exist.
        step: the step's number.
        rows: the sequences.
        writer: name of the writer; several may write records of one step.
        masks: labels of the masks whose verdicts are recorded.
        facts: see :func:`~nemo_geomask.records.record_schema.arrow_schema`.

    Returns: the path of the file.
    Raises: OSError: the file can't be written. MissingDependencyError: pyarrow is not installed.
    """
    origin, state = RecordOrigin(writer), RecordingFolder(directory)
    with open_folder(directory) as folder, contextlib.closing(state):
        state.enter(folder, origin)
        return directory / _store_step(folder, step, rows, origin, masks, facts, state.replaceable).name


def _store_step(
    folder: int,
    step: int,
    rows: StepRows,
    origin: RecordOrigin,
    masks: Sequence[str],
    facts: Mapping[str, Any] | None,
    replaceable: Mapping[str, FileIdentity],
) -> StoredFile:
    table = step_table(step, rows, masks, facts or {})
    name = file_name(step, origin.writer)
    replaced_identity = replaceable.get(name)
    tokens = max(1, int(rows.lengths.sum()))
    return store_record(
        folder,
        name,
        table.schema,
        [table],
        origin=origin,
        may_replace=lambda identity: identity == replaced_identity,
        # Cheapest in processor time: a better encoding would save 10% of the size and take 50% longer.
        compression="lz4",
        use_dictionary=False,
        write_statistics=["step", "row", "group", "reward", "length"],
        row_group_size=max(1, ROW_GROUP * table.num_rows // tokens),
        write_batch_size=2**16,
    )


@dataclass
class _Work:
    """Steps that one thread has to write.

    Attributes:
        queue: steps that wait, each with the function that writes it.
        unfinished: number of steps that wait or are being written.
        is_closed: True if the thread ends when nothing waits any more.
        is_abandoned: True if the unfinished steps were counted as lost.
    """

    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    unfinished: int = 0
    is_closed: bool = False
    is_abandoned: bool = False


class Recorder:
    """Thread that writes records: the trainer never waits for it, and no error in it reaches the trainer.

    A step that can't be written (a full disk), or that comes while too many others wait for the disk, is lost, counted
    and logged.

    Args:
        directory: the run's directory.
        writer: name of the writer, see :func:`write_step`.
        waiting: number of steps that may wait for the disk; one more is lost.

    Attributes:
        directory: the run's directory.
        written: number of steps written.
        lost: number of steps lost.
        losses: number of steps lost by each cause: the name of an error (``ENOSPC``, ``RuntimeError``), ``queue`` or
            ``not finished``.
    """

    def __init__(self, directory: Path | str, *, writer: str = "driver", waiting: int = 2) -> None:
        require_arrow()
        self.directory = Path(directory)
        self.written = self.lost = 0
        self.losses: Counter[str] = Counter()
        self._origin = RecordOrigin(writer)
        self._waiting = waiting
        self._state = threading.Condition()
        self._work: _Work | None = None
        self._folder = RecordingFolder(self.directory)
        self._process = os.getpid()

    def record(
        self,
        step: int,
        rows: Callable[[], StepRows],
        *,
        masks: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Queue a step to be written, and return at once.

        Args:
            step: the step's number.
            rows: returns the step's sequences; called later, in the recorder's thread, to keep that work off the
                training path. The tensors that it reads must not change after this call.
            masks: see :func:`write_step`.
            facts: see :func:`write_step`.

        Returns: False if the step is lost, because too many others are waiting or no thread can be started.
        """
        self._forget_parent_process()

        def write() -> None:
            step_rows = rows()
            with open_folder(self.directory) as folder:
                self._folder.enter(folder, self._origin)
                replaceable = self._folder.replaceable
                stored = _store_step(folder, step, step_rows, self._origin, masks, facts, replaceable)
                replaceable[stored.name] = stored.identity

        with self._state:
            if not self._origin.id:
                self._origin = RecordOrigin(self._origin.writer, secrets.token_hex(8), time.time(), step)
            cause, message = "", ""
            try:
                work = self._started_work()
            except (RuntimeError, MemoryError) as error:  # no thread can be started
                cause, message = _describe(error)
            else:
                if len(work.queue) >= self._waiting:
                    cause, message = "queue", f"{self._waiting} steps are waiting for the disk"
                else:
                    work.queue.append((step, write))
                    work.unfinished += 1
                    self._state.notify_all()
            losses = self._count_loss(cause) if cause else 0
        self._log_loss(step, losses, message)
        return not cause

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all queued steps are written or lost, at most ``timeout`` seconds.

        Returns: False if some are not finished by then.
        """
        self._forget_parent_process()
        return self._work is None or self._wait(self._work, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Wait until the queued steps are written, at most ``timeout`` seconds, and stop the thread."""
        self._forget_parent_process()
        with self._state:
            work, self._work = self._work, None
            if work is None:
                return
            work.is_closed = True
            self._state.notify_all()
        atexit.unregister(self.close)
        if not self._wait(work, timeout):
            with self._state:
                count, work.unfinished, work.is_abandoned = work.unfinished, 0, True
                work.queue.clear()
                self.lost += count
                self.losses["not finished"] += count
            self._warn("records: %d steps to %s lost: not finished within %g s", count, self.directory, timeout)
        self._folder.close()
        if self.lost:
            self._warn("records: %d steps written to %s, %d lost", self.written, self.directory, self.lost)

    def _forget_parent_process(self) -> None:
        """After a fork, begin anew: the parent's thread does not exist here, and it may have held the lock."""
        if self._process != os.getpid():
            self._folder.close()
            anew = Recorder(self.directory, writer=self._origin.writer, waiting=self._waiting)
            vars(self).update(vars(anew))

    def _started_work(self) -> _Work:
        """Return the work of the thread, starting one if there is none."""
        if self._work is None:
            work = _Work()
            threading.Thread(target=self._write_queued_steps, args=(work,), daemon=True).start()
            self._work = work
            atexit.register(self.close)
        return self._work

    def _wait(self, work: _Work, timeout: float) -> bool:
        """Wait until a thread's steps are finished, and return True; False after ``timeout`` seconds."""
        with self._state:
            return self._state.wait_for(lambda: not work.unfinished, timeout)

    def _write_queued_steps(self, work: _Work) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: work.queue or work.is_closed)
                if not work.queue:
                    return
                step, write = work.queue.popleft()
            cause = message = ""
            try:
                write()
            except BaseException as error:  # neither an error nor a SystemExit may end the thread or the training
                cause, message = _describe(error)
            del write  # it holds a copy of the batch
            losses = 0
            with self._state:
                if not work.is_abandoned:
                    work.unfinished -= 1
                    losses = self._count_loss(cause) if cause else 0
                elif not cause:  # it was counted as lost, and was written after all
                    self.lost -= 1
                    self.losses["not finished"] -= 1
                self.written += not cause
                self._state.notify_all()
            self._log_loss(step, losses, message)

    def _count_loss(self, cause: str) -> int:
        """Count a lost step, with the lock held; return how many were lost by its cause."""
        self.lost += 1
        self.losses[cause] += 1
        return self.losses[cause]

    def _log_loss(self, step: int, losses: int, message: str) -> None:
        """Log the first loss of a cause, and then whenever their number has doubled."""
        if losses and losses & (losses - 1) == 0:
            self._warn(
                "records: step %d lost (%d so far) on the way to %s: %s", step, self.lost, self.directory, message
            )

    @staticmethod
    def _warn(message: str, *arguments: Any) -> None:
        with contextlib.suppress(Exception):  # a handler of the program may fail
            _log.warning(message, *arguments)


def _describe(error: BaseException) -> tuple[str, str]:
    """Return the cause that an error is counted under, and the message to log."""
    cause = errno.errorcode.get(error.errno or 0, "OSError") if isinstance(error, OSError) else type(error).__name__
    return cause, f"{type(error).__name__}: {error}"
