"""Writer of records: a step's Parquet file, and the thread that writes it off the training path."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.records.record_schema import COLUMNS, REMOVED, Column, arrow_schema, file_name, require_arrow

__all__ = ["ROW_GROUP", "Recorder", "StepRows", "write_step"]

_log = logging.getLogger("nemo_geomask")
ROW_GROUP = 2**20
"""Approximate number of tokens in a row group of a file; a reader holds one row group in memory at a time."""


@dataclass(frozen=True)
class StepRows:
    """The recorded sequences of one step.

    Attributes:
        lengths: [S] number of tokens of each sequence.
        values: tensors by column name: [S], or [S, T] with padding at the right for a column of lists. A column
            without a tensor is null.
        facts: properties of these sequences, in addition to those of the run.
    """

    lengths: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


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
    parquet = require_arrow("pyarrow.parquet")
    table = _table(step, rows, masks, {**(facts or {}), **rows.facts})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(step, writer)
    partial_file = path.with_suffix(".part")
    tokens = max(1, int(rows.lengths.sum()))
    try:
        parquet.write_table(
            table,
            partial_file,
            # Cheapest in processor time: a better encoding would save 10% of the size and take 50% longer.
            compression="lz4",
            use_dictionary=False,
            write_statistics=["step", "row", "group", "reward", "length"],
            row_group_size=max(1, ROW_GROUP * table.num_rows // tokens),
            write_batch_size=2**16,
        )
        os.replace(partial_file, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial_file.unlink(missing_ok=True)
        raise
    return path


def _table(step: int, rows: StepRows, masks: Sequence[str], facts: Mapping[str, Any]) -> Any:
    arrow = require_arrow()
    schema = arrow_schema(masks, facts)
    count = rows.lengths.numel()
    lengths = rows.lengths.to("cpu", torch.int64)
    offsets = torch.zeros(count + 1, dtype=torch.int32)
    offsets[1:] = lengths.cumsum(0)
    values = {
        **rows.values,
        "step": torch.full((count,), step),
        "length": lengths,
    }
    sizes = lengths.tolist()

    def remove_padding(value: Tensor) -> Tensor:
        width = value.shape[1]
        tokens_and_padding = [size for length in sizes for size in (length, width - length)]
        parts = torch.split(value.to("cpu").flatten(), tokens_and_padding)
        return torch.cat(parts[::2]) if parts else value.flatten()

    def to_array(column: Column) -> Any:
        value = values.get(column.name)
        arrow_type = schema.field(column.name).type
        if value is None:
            return arrow.nulls(count, arrow_type)
        if not column.is_per_token:
            return _flat_array(arrow, value, column.element)
        elements = _flat_array(arrow, remove_padding(value), column.element)
        return arrow.ListArray.from_arrays(_flat_array(arrow, offsets, "int32"), elements, type=arrow_type)

    columns = [*COLUMNS, *(Column(f"{REMOVED}{label}", "list<bool>", "") for label in masks)]
    return arrow.Table.from_arrays([to_array(column) for column in columns], schema=schema)


# Arrow stores booleans as bits: they are passed as bytes and cast.
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.uint8}


def _flat_array(arrow: Any, value: Tensor, element: str) -> Any:
    """Return a 1-d tensor as an Arrow array that shares the tensor's memory where dtype and device allow."""
    if element == "bool":
        value = value != 0
    stored = value.detach().to("cpu", _DTYPES[element]).contiguous()
    # The buffer keeps a reference to the tensor, so that its memory lives as long as the array.
    buffer = arrow.foreign_buffer(stored.data_ptr(), stored.numel() * stored.element_size(), stored)
    stored_type = arrow.type_for_alias("uint8" if element == "bool" else element)
    array = arrow.Array.from_buffers(stored_type, stored.numel(), [None, buffer])
    return array.cast(arrow.bool_()) if element == "bool" else array


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
    """

    def __init__(self, directory: Path | str, *, writer: str = "driver", waiting: int = 2) -> None:
        require_arrow()
        self.directory = Path(directory)
        self.written = self.lost = self._submitted = 0
        self._writer = writer
        self._queue: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue(maxsize=waiting)
        self._counts = threading.Lock()
        self._thread: threading.Thread | None = None
        self._first_step = 0

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

        Returns: False if the step is lost because too many others are waiting.
        """
        self._submitted += 1
        if self._thread is None:
            self._first_step = step
            self._thread = threading.Thread(target=self._write_queued_steps, name="nemo_geomask records", daemon=True)
            self._thread.start()
            atexit.register(self.close)

        def write() -> None:
            write_step(self.directory, step, rows(), writer=self._writer, masks=masks, facts=facts)

        try:
            self._queue.put_nowait((step, write))
        except queue.Full:
            self._count_loss(step, f"{self._queue.maxsize} steps are waiting for the disk")
            return False
        return True

    def flush(self) -> None:
        """Wait until all queued steps are written or lost."""
        self._queue.join()

    def close(self, timeout: float = 30.0) -> None:
        """Wait until the queued steps are written, at most ``timeout`` seconds, and stop the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            with self._counts:
                self.lost = self._submitted - self.written
        if self.lost:
            _log.warning("records: %d steps written to %s, %d lost", self.written, self.directory, self.lost)

    def _write_queued_steps(self) -> None:
        self._warn_of_later_steps()
        while (queued := self._queue.get()) is not None:
            step, write = queued
            try:
                write()
            except Exception as error:  # no error may stop training
                self._count_loss(step, f"{type(error).__name__}: {error}")
            else:
                self.written += 1
            self._queue.task_done()
        self._queue.task_done()

    def _warn_of_later_steps(self) -> None:
        """Warn if the directory has later steps already, which a reader would take for this run's."""
        first_name = file_name(self._first_step, "~")  # "~" sorts after the names of all writers
        later = [path.name for path in self.directory.glob("step-*.parquet") if path.name > first_name]
        if later:
            _log.warning(
                "records: %s holds %d files of steps after %d, the last %s, from an earlier run; unless this run "
                "continues that one, set another loss_fn.record.dir or delete the files",
                self.directory,
                len(later),
                self._first_step,
                max(later),
            )

    def _count_loss(self, step: int, reason: str) -> None:
        with self._counts:
            self.lost += 1
            lost = self.lost
        # Log the first loss, and then whenever the number has doubled.
        if lost & (lost - 1) == 0:
            _log.warning("records: step %d lost (%d so far) on the way to %s: %s", step, lost, self.directory, reason)
