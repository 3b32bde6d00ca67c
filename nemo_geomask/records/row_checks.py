"""Checks of a record's rows against each other and against the schema, vectorised over a row group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.records.record_schema import COLUMNS, MAX_TEXT_BYTES, REMOVED, file_step, require_arrow

_COLUMNS = {column.name: column for column in COLUMNS}
_NOT_NEGATIVE = ("row", "group", "sample", "length", "prompt_length", "turns")


class RowError(ValueError):
    """A row contradicts another, or the schema; the message names the row, counted from 0 within the file."""


class RowChecks:
    """Checks of one file's row groups, in their order.

    Args:
        path: the file; its name tells the step.
    """

    def __init__(self, path: Path) -> None:
        self._step = file_step(path)
        self._rows_before = 0
        self._numbers: set[int] = set()

    def check(self, table: Any) -> None:
        """Check the next row group, a ``pyarrow.Table`` with all columns of the file or some; texts are dictionaries.

        Raises: RowError: a row is not valid.
        """
        for is_invalid, explain in self._problems(table):
            if is_invalid.any():
                index = int(is_invalid.argmax())
                raise RowError(f"row {self._rows_before + index}: {explain(index)}")
        self._rows_before += table.num_rows

    def _problems(self, table: Any) -> Iterator[tuple[Any, Any]]:
        """Yield for each check a bool array of invalid rows, and a function that explains the row of an index."""
        compute = require_arrow("pyarrow.compute")
        names = [name for name in table.schema.names if name in _COLUMNS or name.startswith(REMOVED)]
        columns = {name: table.column(name).combine_chunks() for name in names}
        for name, column in columns.items():
            if name in _COLUMNS and _COLUMNS[name].is_required and column.null_count:
                yield _to_numpy(column.is_null()), _message(f"{name} is null, but every record has it")
        lengths = _to_numpy(columns["length"])
        for name, column in columns.items():
            if name not in _COLUMNS or _COLUMNS[name].is_per_token:
                sizes = _to_numpy(compute.fill_null(compute.list_value_length(column), -1))
                yield (sizes != lengths) & (sizes >= 0), _sizes_message(name, lengths, sizes)
                if column.flatten().null_count:
                    has_null = [row is not None and None in row for row in column.to_pylist()]
                    yield np.array(has_null), _message(f"{name} has a token without a value")
        for name, column in columns.items():
            if name in _COLUMNS and _COLUMNS[name].is_text:
                sizes = compute.binary_length(column.dictionary).take(column.indices)
                values = _to_numpy(compute.fill_null(sizes, 1))
                message = _value_message(f"the size of {name}", values, f"1 to {MAX_TEXT_BYTES} bytes")
                yield (values < 1) | (values > MAX_TEXT_BYTES), message
        for name in _NOT_NEGATIVE:
            if name in columns:
                values = _to_numpy(compute.fill_null(columns[name], 0))
                yield values < 0, _value_message(name, values, "at least 0")
        if "prompt_length" in columns:
            values = _to_numpy(columns["prompt_length"])
            yield values > lengths, _value_message("prompt_length", values, "at most length")
        if "sample_mask" in columns:
            values = _to_numpy(columns["sample_mask"])
            yield ~(np.isfinite(values) & (values >= 0)), _value_message("sample_mask", values, "finite and at least 0")
        if "step" in columns and table.num_rows:
            values = _to_numpy(columns["step"])
            if self._step is None:
                self._step = int(values[0])
            yield values != self._step, _value_message("step", values, f"{self._step}, as in the file's name")
        if "row" in columns:
            values = _to_numpy(columns["row"])
            message = _value_message("row", values, "another number in each row; are these rows of two runs?")
            yield self._repeated(values), message

    def _repeated(self, numbers: Any) -> Any:
        """Return True for each row whose number an earlier row of the file has."""
        is_repeated = np.ones(len(numbers), bool)
        _, first = np.unique(numbers, return_index=True)
        is_repeated[first] = False
        values = numbers.tolist()
        if self._numbers:
            is_repeated |= np.array([value in self._numbers for value in values], bool)
        self._numbers.update(values)
        return is_repeated


def _to_numpy(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False)


def _message(text: str) -> Any:
    return lambda index: text


def _value_message(name: str, values: Any, allowed: str) -> Any:
    return lambda index: f"{name} is {values[index]}, but must be {allowed}"


def _sizes_message(name: str, lengths: Any, sizes: Any) -> Any:
    return lambda index: f"length is {lengths[index]}, but {name} has {sizes[index]} tokens"
