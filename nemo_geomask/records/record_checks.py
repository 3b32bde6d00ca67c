"""Reading of record files that may be damaged, hostile or of another run: each is checked before it is decoded.

A file is held to the limits of :mod:`nemo_geomask.recipe.input_limits`, to its checksum and to the schema. Its rows are
held to each other as they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import check_limit, open_regular_file
from nemo_geomask.records.record_schema import (
    CHECKSUM_KEY,
    COLUMNS,
    ORIGIN_KEY,
    REMOVED,
    VERSION,
    RecordOrigin,
    arrow_schema,
    require_arrow,
)
from nemo_geomask.records.row_checks import RowChecks, RowError
from nemo_geomask.records.stored_files import TAIL, find_checksum, hash_without, read_footer

FREE_TOKENS = 2**20
"""Number of tokens that a file may claim however small it is."""
_TEXT_NAMES = {column.name for column in COLUMNS if column.is_text}


@contextlib.contextmanager
def open_record(path: Path) -> Iterator[RecordFile]:
    """Open a record file for reading.

    Raises:
        DataError: it is not a regular file, not a record, damaged, or of another version of the schema.
        InputLimitError: it exceeds a limit.
        MissingDependencyError: pyarrow is missing.
    """
    with _errors_with_name(path), _open(path) as file:
        yield RecordFile(path, file)


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular_file(path)
    except InputLimitError as error:
        raise DataError(str(error)) from None


@contextlib.contextmanager
def _errors_with_name(path: Path) -> Iterator[None]:
    """Turn what pyarrow and the system raise into errors that name the file."""
    arrow = require_arrow()
    try:
        yield
    except RowError as error:
        raise DataError(f"{path}: {error}") from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        message = reason or " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{path}: can't be read as a record: {message}") from None


class RecordFile:
    """Record file whose bytes and schema have been checked; made by :func:`open_record`.

    Attributes:
        path: the file.
        origin: what wrote it; None in a file that another program has rewritten, which has no checksum either.
        has_checksum: True if its bytes were compared with a checksum.
        row_groups: number of row groups.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._descriptor = file.fileno()
        self._size, start, footer = _read_footer(path, self._descriptor)
        entry = find_checksum(footer)
        self.has_checksum = entry is not None
        if entry is not None:
            self._check_bytes(start + entry[0], entry[1])
        parquet = require_arrow("pyarrow.parquet")
        self._metadata = _parse_footer(footer)
        # As a dictionary, a text that many rows share takes its memory once.
        texts = sorted(_TEXT_NAMES.intersection(self._metadata.schema.names))
        self._file = parquet.ParquetFile(file, metadata=self._metadata, read_dictionary=texts)
        self._check_schema()
        self.row_groups: int = self._metadata.num_row_groups
        self._check_claims()

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield the file's row groups as ``pyarrow.Table``, their rows checked; columns of texts are dictionaries.

        Args:
            columns: names of the columns; None: all of the schema that the file has.

        Raises: DataError: the rows contradict each other or the schema.
        """
        names = self._names if columns is None else [name for name in columns if name in self._names]
        checks = RowChecks(self.path)
        with _errors_with_name(self.path):
            for group in range(self.row_groups):
                table = self._file.read_row_group(group, columns=names)
                checks.check(table)
                yield table

    def _check_bytes(self, position: int, checksum: str) -> None:
        if hash_without(self._descriptor, self._size, position) != checksum:
            raise DataError(
                f"{self.path}: its bytes do not match their checksum: the file was damaged or changed after it was "
                "written; restore it from a copy, or leave it out"
            )

    def _check_schema(self) -> None:
        metadata = self._metadata.metadata or {}
        version = metadata.get(b"nemo_geomask.schema", b"").decode()
        if version != str(VERSION):
            described = f"version {version[:20]}" if version else "no version"
            raise DataError(
                f"{self.path}: the record's schema has {described}, but this package reads version {VERSION}; check "
                "that nemo_geomask's flight recorder wrote the file, and read it with the nemo_geomask that wrote it"
            )
        self.origin = _parse_origin(metadata)
        if ORIGIN_KEY.encode() in metadata and (self.origin is None or not self.has_checksum):
            missing = CHECKSUM_KEY if self.origin else ORIGIN_KEY
            raise DataError(f"{self.path}: damaged: its metadata have no valid {missing}")
        schema = self._file.schema_arrow
        names = schema.names
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(f"{self.path}: has several columns named {', '.join(twice)[:200]}")
        record_schema = arrow_schema([name.removeprefix(REMOVED) for name in names if name.startswith(REMOVED)])
        self._names = [name for name in names if name in record_schema.names]
        missing_names = [field.name for field in record_schema if not field.nullable and field.name not in names]
        if missing_names:
            raise DataError(f"{self.path}: has no column {', '.join(missing_names)}, which every record has")
        arrow = require_arrow()
        for name in self._names:
            expected, actual = record_schema.field(name).type, schema.field(name).type
            if name in _TEXT_NAMES and arrow.types.is_dictionary(actual):
                actual = actual.value_type
            if expected != actual:
                raise DataError(f"{self.path}: column {name} is {actual}, but records have {expected}")

    def _check_claims(self) -> None:
        """Hold the numbers of rows and values that the metadata claim to the limits."""
        total = 0
        for group in map(self._metadata.row_group, range(self.row_groups)):
            claims = [group.num_rows, *(group.column(index).num_values for index in range(group.num_columns))]
            if min(claims) < 0:
                raise DataError(f"{self.path}: damaged: a row group claims a negative number of values")
            check_limit("row_group_tokens", max(claims), self.path)
            total += max(claims)
        check_limit("record_tokens", total, self.path)
        if total > FREE_TOKENS:
            check_limit("tokens_per_byte", math.ceil(total / self._size), self.path)


def _read_footer(path: Path, descriptor: int) -> tuple[int, int, bytes]:
    """Return a file's size, the offset of its metadata, and their bytes."""
    size = os.fstat(descriptor).st_size
    check_limit("record_bytes", size, path)
    is_complete = size > 2 * TAIL and os.pread(descriptor, 4, size - 4) == b"PAR1"
    length = int.from_bytes(os.pread(descriptor, 4, size - TAIL), "little") if is_complete else 0
    if not is_complete or not 0 < length < size - TAIL:
        raise DataError(
            f"{path}: can't be read as a record: {'it is empty' if size == 0 else 'it does not end as Parquet does'}; "
            "it was truncated, or is another kind of file"
        )
    check_limit("footer_bytes", length, path)
    return size, *read_footer(descriptor, size)


def _parse_footer(footer: bytes) -> Any:
    """Return the ``pyarrow.parquet.FileMetaData`` of a footer's bytes."""
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    content = b"".join((b"PAR1", footer, len(footer).to_bytes(4, "little"), b"PAR1"))
    return parquet.read_metadata(arrow.BufferReader(content))


def _parse_origin(metadata: dict[bytes, bytes]) -> RecordOrigin | None:
    """Return the origin in a file's metadata; None if there is none, or no valid one."""
    try:
        origin = RecordOrigin(**json.loads(metadata[ORIGIN_KEY.encode()]))
        types = [type(getattr(origin, field.name)) for field in dataclasses.fields(origin)]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return origin if types == [str, str, float, int] else None


def read_metadata(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of a file, unchecked; empty if it can't be read, which :func:`open_record` explains."""
    try:
        with _errors_with_name(path), _open(path) as file:
            _, _, footer = _read_footer(path, file.fileno())
            return dict(_parse_footer(footer).metadata or {})
    except (DataError, InputLimitError):
        return {}


def read_origin(path: Path) -> RecordOrigin | None:
    """Return what wrote a file, unchecked; None if it does not say, or can't be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _read_origin(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2**17)
def _read_origin(path: Path, size: int, modified: int) -> RecordOrigin | None:
    return _parse_origin(read_metadata(path))
