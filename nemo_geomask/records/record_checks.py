"""Reading of record files that may be damaged, hostile or of another run: each is checked before it is decoded.

A file is held to the limits of :mod:`nemo_geomask.recipe.input_limits`, to its checksum and to the schema. Its rows are
held to each other as they are read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import InputLimits, current_limits, irregular_file_type, limit_error
from nemo_geomask.records import checksums
from nemo_geomask.records.page_headers import PageError, count_values
from nemo_geomask.records.record_schema import (
    CHECKSUM_KEY,
    COLUMNS,
    MAX_TEXT_BYTES,
    ORIGIN_KEY,
    REMOVED,
    VERSION,
    RecordOrigin,
    arrow_schema,
    require_arrow,
)
from nemo_geomask.records.row_checks import RowChecks, RowError

__all__ = ["RecordFile", "open_record", "read_metadata", "read_origin"]

FREE_TOKENS = 2**20
"""Number of tokens that a file may claim however small it is."""
_MAX_PAGES = 100_000
_TEXT_NAMES = {column.name for column in COLUMNS if column.is_text}
_OPEN_ERRORS = {
    errno.ELOOP: "it is a symbolic link; name the folder of the file that it leads to",
    errno.ENXIO: "it is a socket",
}


@contextlib.contextmanager
def open_record(path: Path, limits: InputLimits | None = None) -> Iterator[RecordFile]:
    """Open a record file for reading.

    Args:
        path: the file.
        limits: those in effect if None.

    Raises:
        DataError: it is not a regular file, not a record, damaged, or of another version of the schema.
        InputLimitError: it exceeds a limit.
        MissingDependencyError: pyarrow is missing.
    """
    with _open_regular(path) as file, _errors_with_name(path):
        yield RecordFile(path, file, limits or current_limits())


@contextlib.contextmanager
def _errors_with_name(path: Path) -> Iterator[None]:
    """Turn what pyarrow and the system raise into errors that name the file."""
    arrow = require_arrow()
    try:
        yield
    except PageError as error:
        raise DataError(f"{path}: damaged: {error}") from None
    except RowError as error:
        raise DataError(f"{path}: {error}") from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        message = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{path}: can't be read as a record: {message}") from None


@contextlib.contextmanager
def _open_regular(path: Path) -> Iterator[BinaryIO]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        message = _OPEN_ERRORS.get(error.errno or 0, error.strerror)
        raise DataError(f"{path}: can't be read as a record: {message}") from None
    file_type = irregular_file_type(os.fstat(descriptor).st_mode)
    if file_type is not None:
        os.close(descriptor)
        raise DataError(f"{path}: can't be read as a record: it is {file_type}")
    with open(descriptor, "rb") as file:
        yield file


class RecordFile:
    """Record file whose bytes and schema have been checked; made by :func:`open_record`.

    Attributes:
        path: the file.
        origin: what wrote it; None in files of earlier versions, which have no checksum either.
        has_checksum: True if its bytes were compared with a checksum.
        row_groups: number of row groups.
    """

    def __init__(self, path: Path, file: BinaryIO, limits: InputLimits) -> None:
        self.path = path
        self._descriptor, self._limits = file.fileno(), limits
        self._size, start, footer = _read_footer(path, self._descriptor, limits)
        entry = checksums.find_checksum(footer)
        self.has_checksum = entry is not None
        if entry is not None:
            self._check_bytes(start + entry[0], entry[1])
        parquet = require_arrow("pyarrow.parquet")
        self._metadata = _parse_footer(footer)
        paths = [self._metadata.schema.column(index).path for index in range(self._metadata.num_columns)]
        # As a dictionary, a text that many rows share takes its memory once.
        texts = sorted(_TEXT_NAMES.intersection(paths))
        self._file = parquet.ParquetFile(file, metadata=self._metadata, read_dictionary=texts)
        self._check_schema()
        self.row_groups: int = self._metadata.num_row_groups
        self._leaves = [
            index for index, path in enumerate(paths) if any(_is_within(path, name) for name in self._names)
        ]
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
                self._check_pages(group)
                table = self._file.read_row_group(group, columns=names)
                checks.check(table)
                yield table

    def _check_bytes(self, position: int, checksum: str) -> None:
        if checksums.hash_without(self._descriptor, self._size, position) != checksum:
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
        for group in range(self.row_groups):
            tokens = max(self._metadata.row_group(group).num_rows, *self._values(group))
            if tokens > self._limits.row_group_tokens:
                raise limit_error("row_group_tokens", self.path, self._limits, tokens)
            total += tokens
        if total > self._limits.record_tokens:
            raise limit_error("record_tokens", self.path, self._limits, total)
        if total > max(FREE_TOKENS, self._limits.tokens_per_byte * self._size):
            raise limit_error("tokens_per_byte", self.path, self._limits, total // self._size)

    def _values(self, group: int) -> list[int]:
        """Return the number of values that the metadata claim for each column that is read."""
        row_group = self._metadata.row_group(group)
        values = [row_group.column(leaf).num_values for leaf in self._leaves]
        if min(row_group.num_rows, *values) < 0:
            raise DataError(f"{self.path}: damaged: row group {group} claims a negative number of values")
        return values

    def _check_pages(self, group: int) -> None:
        """Hold the pages of the columns that are read to what the metadata claim."""
        row_group = self._metadata.row_group(group)
        pages = 0
        for leaf, claimed in zip(self._leaves, self._values(group), strict=True):
            chunk = row_group.column(leaf)
            starts = [chunk.data_page_offset, chunk.dictionary_page_offset]
            start = min(offset for offset in starts if offset is not None)
            end = start + chunk.total_compressed_size
            if not 0 < start <= end <= self._size:
                raise PageError(f"column {chunk.path_in_schema[:100]} is not within the file")
            text_bytes = MAX_TEXT_BYTES if chunk.path_in_schema in _TEXT_NAMES else 0
            values, count = count_values(self._descriptor, start, end, claimed, _MAX_PAGES - pages, text_bytes)
            pages += count
            if values != claimed:
                raise PageError(f"column {chunk.path_in_schema[:100]} has {values} values, not {claimed}")


def _is_within(path: str, name: str) -> bool:
    """Return True if a leaf of the Parquet schema belongs to a column."""
    return path == name or path.startswith(f"{name}.")


def _read_footer(path: Path, descriptor: int, limits: InputLimits) -> tuple[int, int, bytes]:
    """Return a file's size, the offset of its metadata, and their bytes."""
    size = os.fstat(descriptor).st_size
    if size > limits.record_bytes:
        raise limit_error("record_bytes", path, limits, size)
    is_complete = size > 2 * checksums.TAIL and os.pread(descriptor, 4, size - 4) == b"PAR1"
    length = int.from_bytes(os.pread(descriptor, 4, size - checksums.TAIL), "little") if is_complete else 0
    if not is_complete or not 0 < length < size - checksums.TAIL:
        raise DataError(
            f"{path}: can't be read as a record: {'it is empty' if size == 0 else 'it does not end as Parquet does'}; "
            "it was truncated, or is another kind of file"
        )
    if length > limits.footer_bytes:
        raise limit_error("footer_bytes", path, limits, length)
    return size, *checksums.read_footer(descriptor, size)


def _parse_footer(footer: bytes) -> Any:
    """Return the ``pyarrow.parquet.FileMetaData`` of a footer's bytes."""
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    content = b"".join((b"PAR1", footer, len(footer).to_bytes(4, "little"), b"PAR1"))
    return parquet.read_metadata(arrow.BufferReader(content))


def _parse_origin(metadata: dict[bytes, bytes]) -> RecordOrigin | None:
    """Return the origin in a file's metadata; None if there is none, or no valid one."""
    content = metadata.get(ORIGIN_KEY.encode(), b"")
    try:
        origin = RecordOrigin(**json.loads(content)) if len(content) < 1000 else None
        if origin is None or not isinstance(origin.writer, str) or not isinstance(origin.id, str):
            return None
        numbers = (origin.started, origin.first_step)
        is_valid = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return origin if is_valid else None


def read_metadata(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of a file, unchecked; empty if it can't be read, which :func:`open_record` explains."""
    try:
        with _open_regular(path) as file, _errors_with_name(path):
            _, _, footer = _read_footer(path, file.fileno(), current_limits())
            return dict(_parse_footer(footer).metadata or {})
    except (DataError, InputLimitError):
        return {}


def read_origin(path: Path) -> RecordOrigin | None:
    """Return what wrote a file, unchecked; None if it does not say, or can't be read."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return _read_origin(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2**17)
def _read_origin(path: Path, size: int, modified: int) -> RecordOrigin | None:
    return _parse_origin(read_metadata(path))
