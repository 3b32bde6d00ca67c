"""Records on their way to the disk, off the training path."""

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

from nemo_geomask.records.schema import COLUMNS, REMOVED, Column, arrow_schema, file_name, require_arrow

__all__ = ["ROW_GROUP", "Recorder", "StepRows", "write_step"]

_log = logging.getLogger("nemo_geomask")
ROW_GROUP = 2**20
"""Tokens that a reader has to hold at once."""


@dataclass(frozen=True)
class StepRows:
    """The sequences of one step that are recorded.

    Attributes:
        lengths: [S] tokens of each.
        values: by the name of a column: [S], or for a column of lists [S, T], padded at the right. A column that is not
            here is null.
        facts: of these alone.
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
    """Write one step's records, in place of those that the same writer wrote of it before.

    Args:
        directory: the run's; made if it isn't there.
        step: its number.
        rows: the sequences.
        writer: who writes; several may write records of one step.
        masks: labels of the masks whose verdicts are recorded.
        facts: see :func:`~nemo_geomask.records.schema.arrow_schema`.

    Returns: the file.
    Raises: OSError: the disk. MissingDependencyError: there is no pyarrow.
    """
    parquet = require_arrow("pyarrow.parquet")
    table = _table(step, rows, masks, {**(facts or {}), **rows.facts})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(step, writer)
    part = path.with_suffix(".part")
    tokens = max(1, int(rows.lengths.sum()))
    try:
        parquet.write_table(
            table,
            part,
            # The cheapest in processor time; a better encoding would save a tenth of the size for half as much again.
            compression="lz4",
            use_dictionary=False,
            write_statistics=["step", "row", "group", "reward", "length"],
            row_group_size=max(1, ROW_GROUP * table.num_rows // tokens),
            write_batch_size=2**16,
        )
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
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

    def unpadded(value: Tensor) -> Tensor:
        width = value.shape[1]
        parts = torch.split(value.to("cpu").flatten(), [size for row in sizes for size in (row, width - row)])
        return torch.cat(parts[::2]) if parts else value.flatten()

    def array(column: Column) -> Any:
        value = values.get(column.name)
        kind = schema.field(column.name).type
        if value is None:
            return arrow.nulls(count, kind)
        if not column.by_token:
            return _flat(arrow, value, column.element)
        flat = _flat(arrow, unpadded(value), column.element)
        return arrow.ListArray.from_arrays(_flat(arrow, offsets, "int32"), flat, type=kind)

    columns = [*COLUMNS, *(Column(f"{REMOVED}{label}", "list<bool>", "") for label in masks)]
    return arrow.Table.from_arrays([array(column) for column in columns], schema=schema)


_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.uint8}


def _flat(arrow: Any, value: Tensor, element: str) -> Any:
    """A 1-d tensor as an array; its memory is used as it is."""
    if element == "bool":
        value = value != 0
    own = value.detach().to("cpu", _DTYPES[element]).contiguous()
    buffer = arrow.foreign_buffer(own.data_ptr(), own.numel() * own.element_size(), own)
    stored = arrow.type_for_alias("uint8" if element == "bool" else element)
    array = arrow.Array.from_buffers(stored, own.numel(), [None, buffer])
    return array.cast(arrow.bool_()) if element == "bool" else array


class Recorder:
    """Writes records in a thread of its own: the trainer waits for nothing, and no fault here reaches it.

    What can't be written (a full disk) or comes faster than the disk takes it is lost, counted and logged.

    Args:
        directory: the run's.
        writer: who writes, see :func:`write_step`.
        waiting: steps that may wait for the disk; one more is lost.

    Attributes:
        written: steps written.
        lost: steps lost.
    """

    def __init__(self, directory: Path | str, *, writer: str = "driver", waiting: int = 2) -> None:
        require_arrow()
        self.directory = Path(directory)
        self.written = self.lost = self._asked = 0
        self._writer = writer
        self._waiting: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue(maxsize=waiting)
        self._counts = threading.Lock()
        self._thread: threading.Thread | None = None
        self._first = 0

    def record(
        self,
        step: int,
        rows: Callable[[], StepRows],
        *,
        masks: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Have a step written; returns at once.

        Args:
            step: its number.
            rows: called in the recorder's thread, so that all work but keeping the tensors is off the training path.
                What it reads must not change any more.
            masks: see :func:`write_step`.
            facts: likewise.

        Returns: whether it is to be written; False: too many are waiting, and it is lost.
        """
        self._asked += 1
        if self._thread is None:
            self._first = step
            self._thread = threading.Thread(target=self._work, name="nemo_geomask records", daemon=True)
            self._thread.start()
            atexit.register(self.close)

        def write() -> None:
            write_step(self.directory, step, rows(), writer=self._writer, masks=masks, facts=facts)

        try:
            self._waiting.put_nowait((step, write))
        except queue.Full:
            self._lose(step, f"{self._waiting.maxsize} steps are waiting for the disk")
            return False
        return True

    def flush(self) -> None:
        """Wait until nothing is waiting any more."""
        self._waiting.join()

    def close(self, timeout: float = 30.0) -> None:
        """Wait until what is waiting is written, at most ``timeout`` seconds; then records are taken no more."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            with self._counts:
                self.lost = self._asked - self.written
        if self.lost:
            _log.warning("records: %d steps written to %s, %d lost", self.written, self.directory, self.lost)

    def _work(self) -> None:
        self._look_around()
        while (waiting := self._waiting.get()) is not None:
            step, write = waiting
            try:
                write()
            except Exception as error:  # whatever it is, training goes on
                self._lose(step, f"{type(error).__name__}: {error}")
            else:
                self.written += 1
            self._waiting.task_done()
        self._waiting.task_done()

    def _look_around(self) -> None:
        """Say so where later steps are there already: what reads the folder would take them for this run's."""
        later = [path.name for path in self.directory.glob("step-*.parquet") if path.name > file_name(self._first, "~")]
        if later:
            _log.warning(
                "records: %s holds %d files of steps after %d, the last %s, from an earlier run; unless this run "
                "continues that one, give it a folder of its own or delete them",
                self.directory,
                len(later),
                self._first,
                max(later),
            )

    def _lose(self, step: int, why: str) -> None:
        with self._counts:
            self.lost += 1
            lost = self.lost
        # The first is said, and then whenever there are twice as many.
        if lost & (lost - 1) == 0:
            _log.warning("records: step %d lost (%d so far) on the way to %s: %s", step, lost, self.directory, why)
