"""The flight recorder: what a step was trained on, as Parquet files; needs pyarrow, from the ``diagnose`` extra."""

from __future__ import annotations

from nemo_geomask.records.schema import COLUMNS, VERSION, Column, arrow_schema, file_name, step_files
from nemo_geomask.records.writer import Recorder

__all__ = ["COLUMNS", "VERSION", "Column", "Recorder", "arrow_schema", "file_name", "step_files"]
