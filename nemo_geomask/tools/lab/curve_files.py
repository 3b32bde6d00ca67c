"""Parquet files of runs' metrics, a row for each step, with facts about the runs as JSON in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.optional import require
from nemo_geomask.recipe.input_limits import open_regular_file

__all__ = ["MAX_ROWS", "read_columns", "write_columns"]

MAX_ROWS = 500_000
"""Largest number of rows of a file that is read."""
# The largest file of the evidence has 434,160 values in 4 MB, 2.5 MB of which is its footer with the facts.
_MAX_VALUES = 4_000_000
_MAX_FILE_BYTES = 2**27
_MAX_FOOTER_BYTES = 2**24
_MAX_COLUMNS = 2_000
_TAIL = 8  # bytes after a Parquet file's footer: its length, and PAR1


def write_columns(
    path: Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, str], key: bytes, facts: Any
) -> None:
    """Write columns and facts; the file is complete from the moment it has its name.

    Args:
        path: the file; its folder is created if it does not exist.
        columns: values by column name; None where a step has none.
        types: Arrow type of each column, such as ``int32``.
        key: key of the facts in the file's metadata.
        facts: what ``json`` can write; other objects are written as text.
    """
    arrow, parquet = require("pyarrow", "the lab needs", "demo"), require("pyarrow.parquet", "the lab needs", "demo")
    table = arrow.table(
        {name: arrow.array(values, arrow.type_for_alias(types[name])) for name, values in columns.items()}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    parquet.write_table(table.replace_schema_metadata({key: json.dumps(facts, default=str)}), part, compression="zstd")
    os.replace(part, path)


def read_columns(
    path: Path, key: bytes, *, texts: Collection[str] = (), ignored: Collection[str] = ()
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the facts and the columns of a file, with NaN where a step has no value.

    Args:
        path: the file; its size, and what it claims to hold, are checked before it is decoded.
        key: key of the facts in the file's metadata.
        texts: names of columns of texts; all others hold numbers.
        ignored: names of columns that are not read.

    Raises: ConfigError: it is no regular file, too large, damaged, or has columns of other types.
    """
    arrow = require("pyarrow", "the lab needs", "demo")
    try:
        with open_regular_file(path) as file:
            return _read_file(file, key, texts, ignored)
    except InputLimitError:
        raise
    except (arrow.ArrowException, OSError, KeyError, TypeError, ValueError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{path} is not a run of the lab: {' '.join(reason.split())[:200] or type(error).__name__}; move it "
            "elsewhere to go on without it"
        ) from None


def _read_file(
    file: BinaryIO, key: bytes, texts: Collection[str], ignored: Collection[str]
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the facts and the columns of an open file, as :func:`read_columns`; errors do not name the file."""
    _check_size(file)
    with require("pyarrow.parquet", "the lab needs", "demo").ParquetFile(file) as parquet_file:
        metadata, schema = parquet_file.metadata, parquet_file.schema_arrow
        if key not in (metadata.metadata or {}):
            raise ValueError(f"its metadata lack {key.decode()}")
        names = [name for name in schema.names if name not in ignored]
        for name in names:
            _check_type(schema, name, is_text=name in texts)
        rows = metadata.num_rows
        if rows > MAX_ROWS or rows * len(names) > _MAX_VALUES:
            raise ValueError(
                f"it claims {rows:,} rows of {len(names)} columns; the lab reads {MAX_ROWS:,} rows and "
                f"{_MAX_VALUES:,} values"
            )
        table = parquet_file.read(columns=names)
        try:
            facts = json.loads(metadata.metadata[key])
        except RecursionError:
            raise ValueError("its facts are nested too deeply") from None
    columns = {}
    for name in names:
        column = table[name]
        if column.null_count and not require("pyarrow", "the lab needs", "demo").types.is_floating(column.type):
            raise ValueError(f"its column {name[:100]} lacks values")
        columns[name] = column.to_pylist() if name in texts else column.to_numpy().tolist()
    return facts, columns


def _check_size(file: BinaryIO) -> None:
    """Raise ValueError if a file, or the footer that it claims to have, is too large."""
    size = file.seek(0, os.SEEK_END)
    if size > _MAX_FILE_BYTES:
        raise ValueError(f"it has {size:,} bytes, and the lab reads {_MAX_FILE_BYTES:,}")
    file.seek(max(0, size - _TAIL))
    footer_bytes = int.from_bytes(file.read(_TAIL)[:4], "little")
    if size > _TAIL and footer_bytes > _MAX_FOOTER_BYTES:
        raise ValueError(f"it claims {footer_bytes:,} bytes of metadata, and the lab reads {_MAX_FOOTER_BYTES:,}")
    file.seek(0)


def _check_type(schema: Any, name: str, *, is_text: bool) -> None:
    types = require("pyarrow", "the lab needs", "demo").types
    if len(schema.names) > _MAX_COLUMNS:
        raise ValueError(f"it has {len(schema.names):,} columns, and the lab reads {_MAX_COLUMNS:,}")
    if len(schema.get_all_field_indices(name)) != 1:
        raise ValueError(f"it has several columns {name[:100]}")
    type_ = schema.field(name).type
    is_right = types.is_string(type_) if is_text else types.is_floating(type_) or types.is_integer(type_)
    if not is_right:
        raise ValueError(f"its column {name[:100]} is {type_}, not {'string' if is_text else 'a number'}")
