"""Parquet files of runs' metrics, a row for each step, with facts about the runs as JSON in the metadata."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.optional import require

__all__ = ["read_columns", "write_columns"]


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


def read_columns(path: Path, key: bytes) -> tuple[Any, dict[str, list[Any]]]:
    """Return the facts and the columns of a file, with NaN where a step has no value."""
    table = require("pyarrow.parquet", "the lab needs", "demo").read_table(path, partitioning=None)
    columns = {
        name: [math.nan if value is None else value for value in table[name].to_pylist()] for name in table.column_names
    }
    return json.loads(table.schema.metadata[key]), columns
