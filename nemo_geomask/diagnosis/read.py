"""Records from disk, a bounded part of a step at a time, as flat NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_geomask.errors import DataError
from nemo_geomask.records.schema import COLUMNS, REMOVED, VERSION, require_arrow

__all__ = ["Array", "RecordBlock", "read_blocks"]

Array = NDArray[Any]
_KIND = {column.name: column for column in COLUMNS}


@dataclass(frozen=True)
class RecordBlock:
    """Whole sequences of one file.

    Attributes:
        sequences: by column, [S]; ``weight_version``, ``staleness``, ``reward`` are floats, NaN where nobody knows.
        tokens: by column, [N], one sequence after another; a column that the file has not is not here.
        offsets: [S+1], where each sequence begins in them.
        removed: by a mask's label, bool [N].
    """

    sequences: Mapping[str, Array]
    tokens: Mapping[str, Array]
    offsets: Array
    removed: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def read_blocks(path: Path) -> Iterator[RecordBlock]:
    """The sequences of one file, a row group at a time.

    Raises: DataError: it is no record, or one of a later version. MissingDependencyError: there is no pyarrow.
    """
    arrow, parquet = require_arrow(), require_arrow("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: can't be read as a record: {error}") from None
    with file:
        metadata = file.schema_arrow.metadata or {}
        version = metadata.get(b"nemo_geomask.schema", b"").decode()
        if version != str(VERSION):
            found = f"of version {version}" if version else "without a version"
            raise DataError(
                f"{path}: a record {found}, but this package reads version {VERSION}; is it a file of nemo_geomask's "
                "flight recorder, and this package as new as the one that wrote it?"
            )
        for group in range(file.num_row_groups):
            try:
                table = file.read_row_group(group)
            except (arrow.ArrowException, OSError) as error:
                raise DataError(f"{path}: can't be read as a record: {error}") from None
            yield _block(table)


def _block(table: Any) -> RecordBlock:
    lengths = table.column("length").to_numpy().astype(np.int64)
    offsets = np.concatenate([[0], lengths.cumsum()])
    sequences, tokens, removed = {}, {}, {}
    for name in table.schema.names:
        column = table.column(name)
        if name.startswith(REMOVED):
            if column.null_count < len(column):
                removed[name.removeprefix(REMOVED)] = _flat(column, lengths).astype(bool)
        elif name not in _KIND:
            continue
        elif not _KIND[name].by_token:
            sequences[name] = column.to_numpy()
        elif column.null_count < len(column):
            tokens[name] = _flat(column, lengths)
    return RecordBlock(sequences, tokens, offsets, removed)


def _flat(column: Any, lengths: Array) -> Array:
    """[N]; NaN, or False, for the sequences that have none."""
    values: Array = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if not column.null_count:
        return values
    there = np.repeat(~column.is_null().to_numpy(), lengths)
    whole = np.full(len(there), np.nan if values.dtype.kind == "f" else 0, dtype=values.dtype)
    whole[there] = values
    return whole
