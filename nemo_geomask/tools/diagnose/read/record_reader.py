"""Reading of records as flat NumPy arrays, one row group at a time, which bounds the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_geomask.records.record_checks import RecordFile, open_record
from nemo_geomask.records.record_schema import COLUMNS, REMOVED

Array = NDArray[Any]
_COLUMNS_BY_NAME = {column.name: column for column in COLUMNS}


@dataclass(frozen=True)
class RecordBlock:
    """Some of the sequences of one file, with all their tokens.

    Attributes:
        sequences: [S] for each column; ``weight_version``, ``staleness`` and ``reward`` are floats, NaN where not
            recorded; ``environment`` is texts, None where not recorded.
        trainer: column with the training engine's log-probs, ``prev`` or ``curr``, as chosen for the whole file;
            empty if the block is the whole file, so that its own sequences decide.
    """

    sequences: Mapping[str, Array]
    # [N] for each column, one sequence after another; columns that were not recorded are absent
    tokens: Mapping[str, Array]
    offsets: Array  # [S+1], index of each sequence's first token, followed by N
    # bool [N] for each mask, by its label; True where the mask removed the token
    removed: Mapping[str, Array] = field(default_factory=dict)
    trainer: str = ""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_prev(self) -> bool:
        """True if π_old was computed for a trained token."""
        prev = self.tokens.get("prev")
        if prev is None:
            return False
        return bool((np.isfinite(prev) & (prev != 0) & self.tokens["mask"].astype(bool)).any())


def read_blocks(path: Path) -> Iterator[RecordBlock]:
    """Yield the sequences of one file, a row group at a time, each checked before it is yielded.

    Raises: DataError: it is not a record, damaged, or of another version of the schema. InputLimitError: it exceeds a
    limit. MissingDependencyError: pyarrow is missing.
    """
    with open_record(path) as file:
        trainer = _trainer_column(file)
        for table in file.tables():
            yield replace(_read_table(table), trainer=trainer)


def _trainer_column(file: RecordFile) -> str:
    """Return :attr:`RecordBlock.trainer` of a file: ``prev`` if any of its row groups has π_old, or else ``curr``."""
    if file.row_groups == 1:
        return ""
    # With audit_fraction, π_old is recorded for a few of a step's sequences, which may all be in one row group.
    blocks = map(_read_table, file.tables(["length", "mask", "prev"]))
    return "prev" if any(block.has_prev for block in blocks) else "curr"


def _read_table(table: Any) -> RecordBlock:
    lengths = table.column("length").to_numpy().astype(np.int64)
    offsets = np.concatenate([[0], lengths.cumsum()])
    sequences, tokens, removed = {}, {}, {}
    for name in table.schema.names:
        column = table.column(name)
        if name.startswith(REMOVED):
            if column.null_count < len(column):
                removed[name.removeprefix(REMOVED)] = _flatten(column, lengths).astype(bool)
        elif name not in _COLUMNS_BY_NAME:
            continue
        elif _COLUMNS_BY_NAME[name].is_text:
            sequences[name] = _read_texts(column)
        elif not _COLUMNS_BY_NAME[name].is_per_token:
            sequences[name] = column.to_numpy()
        elif column.null_count < len(column):
            tokens[name] = _flatten(column, lengths)
    return RecordBlock(sequences, tokens, offsets, removed)


def _read_texts(column: Any) -> Array:
    """Return a column of texts as [S] objects, None where it is null; equal texts are one object."""
    array = column.combine_chunks()
    texts = np.array([*array.dictionary.to_pylist(), None], dtype=object)
    indices: Array = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return texts[indices]


def _flatten(column: Any, lengths: Array) -> Array:
    """Return a list column as [N], with NaN, 0 or False for the tokens of sequences whose list is null."""
    values: Array = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if not column.null_count:
        return values
    is_recorded = np.repeat(~column.is_null().to_numpy(), lengths)
    filled = np.full(len(is_recorded), np.nan if values.dtype.kind == "f" else 0, dtype=values.dtype)
    filled[is_recorded] = values
    return filled
