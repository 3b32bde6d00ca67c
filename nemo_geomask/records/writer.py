"""Writer of records: a step's Parquet file, and the thread that writes it off the training path."""

from __future__ import annotations

import atexit
import errno
import logging
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
from nemo_geomask.records.stored_files import open_folder, store_record

_log = logging.getLogger("nemo_geomask")
ROW_GROUP = 2**20
"""Approximate number of tokens in a row group of a file; a reader holds one row group in memory at a time."""
_PARQUET_OPTIONS: dict[str, Any] = {
    # Cheapest in processor time: a better encoding would save 10% of the size and take 50% longer.
    "compression": "lz4",
    "use_dictionary": False,
    "write_statistics": ["step", "row", "group", "reward", "length"],
    "write_batch_size": 2**16,
}


@dataclass
class _Work:
    """Steps that one thread has to write.

    Attributes:
        queue: steps that wait, each with the function that writes it.
        unfinished: number of steps that wait or are being written.
        is_closed: True if the thread ends when nothing waits any more.
    """

    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    unfinished: int = 0
    is_closed: bool = False


class Recorder:
    """Thread that writes records: the trainer never waits for it, and no error in it reaches the trainer.

    A step that can't be written (a full disk), or that comes while too many others wait for the disk, is lost, counted
    and logged.

    Args:
        directory: the run's directory.
        waiting: number of steps that may wait for the disk; one more is lost.

    Attributes:
        directory: the run's directory.
        written: number of steps written.
        lost: number of steps lost.
        losses: number of steps lost by each cause: the name of an error (``ENOSPC``, ``RuntimeError``), ``queue`` or
            ``not finished``.
    """

    def __init__(self, directory: Path | str, *, waiting: int = 2) -> None:
        require_arrow()
        self.directory = Path(directory)
        self.written = self.lost = 0
        self.losses: Counter[str] = Counter()
        self._origin = RecordOrigin("driver")
        self._waiting = waiting
        self._state = threading.Condition()
        self._work: _Work | None = None
        self._folder = RecordingFolder(self.directory)

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
            masks: labels of the masks whose verdicts are recorded.
            facts: see :func:`~nemo_geomask.records.record_schema.arrow_schema`.

        Returns: False if the step is lost, because too many others are waiting.
        """

        def write() -> None:
            step_rows = rows()
            table = step_table(step, step_rows, masks, facts or {})
            tokens = max(1, int(step_rows.lengths.sum()))
            name = file_name(step, self._origin.writer)
            with open_folder(self.directory) as folder:
                self._folder.enter(folder, self._origin)
                replaceable = self._folder.replaceable
                replaced_identity = replaceable.get(name)
                stored = store_record(
                    folder,
                    name,
                    table.schema,
                    [table],
                    origin=self._origin,
                    may_replace=lambda identity: identity == replaced_identity,
                    row_group_size=max(1, ROW_GROUP * table.num_rows // tokens),
                    **_PARQUET_OPTIONS,
                )
                replaceable[stored.name] = stored.identity

        with self._state:
            if not self._origin.id:
                self._origin = RecordOrigin(self._origin.writer, secrets.token_hex(8), time.time(), step)
            work = self._started_work()
            is_lost = len(work.queue) >= self._waiting
            losses = self._count_loss("queue") if is_lost else 0
            if not is_lost:
                work.queue.append((step, write))
                work.unfinished += 1
                self._state.notify_all()
        self._log_loss(step, losses, f"{self._waiting} steps are waiting for the disk")
        return not is_lost

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all queued steps are written or lost, at most ``timeout`` seconds.

        Returns: False if some are not finished by then.
        """
        return self._work is None or self._wait(self._work, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Wait until the queued steps are written, at most ``timeout`` seconds, and stop the thread."""
        with self._state:
            work, self._work = self._work, None
            if work is None:
                return
            work.is_closed = True
            self._state.notify_all()
        atexit.unregister(self.close)
        if not self._wait(work, timeout):
            with self._state:
                count = work.unfinished
                work.queue.clear()
                self.lost += count
                self.losses["not finished"] += count
            _log.warning("records: %d steps to %s lost: not finished within %g s", count, self.directory, timeout)
        self._folder.close()
        if self.lost:
            _log.warning("records: %d steps written to %s, %d lost", self.written, self.directory, self.lost)

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
            with self._state:
                work.unfinished -= 1
                losses = self._count_loss(cause) if cause else 0
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
            _log.warning(
                "records: step %d lost (%d so far) on the way to %s: %s", step, self.lost, self.directory, message
            )


def _describe(error: BaseException) -> tuple[str, str]:
    """Return the cause that an error is counted under, and the message to log."""
    cause = errno.errorcode.get(error.errno or 0, "OSError") if isinstance(error, OSError) else type(error).__name__
    return cause, f"{type(error).__name__}: {error}"
