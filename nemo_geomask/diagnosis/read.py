"""Records from disk, a bounded part of a step at a time, as flat NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_geomask.errors import DataError
from nemo_geomask.records.schema import COLUMNS, REMOVED, VERSION, require_arrow

__all__ = ["Array", "RecordBlock", "read_blocks"]

Array = NDArray[Any]
_KIND = {column.name: column for column in COLUMNS}
_OF_PREV = ("length", "mask", "prev")


@dataclass(frozen=True)
class RecordBlock:
    """Whole sequences of one file.

    Attributes:
        sequences: by column, [S]; ``weight_version``, ``staleness``, ``reward`` are floats, NaN where nobody knows.
        tokens: by column, [N], one sequence after another; a column that the file has not is not here.
        offsets: [S+1], where each sequence begins in them.
        removed: by a mask's label, bool [N].
        trainer: the column of the training engine's log-probs, ``prev`` or ``curr``, by all of the file; empty: by
            these sequences alone.
    """

    sequences: Mapping[str, Array]
    tokens: Mapping[str, Array]
    offsets: Array
    removed: Mapping[str, Array] = field(default_factory=dict)
    trainer: str = ""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_prev(self) -> bool:
        """Whether π_old was computed for a trained token."""
        prev = self.tokens.get("prev")
        known = prev is not None and (np.isfinite(prev) & (prev != 0) & self.tokens["mask"].astype(bool)).any()
        return bool(known)


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
        try:
            trainer = _trainer(file)
            for group in range(file.num_row_groups):
                yield replace(_block(file.read_row_group(group)), trainer=trainer)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: can't be read as a record: {error}") from None


def _trainer(file: Any) -> str:
    """Where π_old is audited, a few of a step's sequences have it, and not in every row group."""
    if file.num_row_groups == 1:
        return ""
    parts = (_block(file.read_row_group(group, list(_OF_PREV))) for group in range(file.num_row_groups))
    return "prev" if any(part.has_prev for part in parts) else "curr"


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
