"""The flight recorder, which writes what each step was trained on to Parquet files.

:mod:`.record_schema` defines the files and needs no torch, :mod:`.flight` turns a batch into records and :mod:`.writer`
writes them. Reading and writing need pyarrow, from the ``diagnose`` extra.
"""

from __future__ import annotations

from nemo_geomask.records.record_schema import COLUMNS, REMOVED, VERSION, Column, arrow_schema, file_name, step_files

__all__ = ["COLUMNS", "REMOVED", "VERSION", "Column", "arrow_schema", "file_name", "step_files"]
