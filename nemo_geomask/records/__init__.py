"""The flight recorder: what a step was trained on, as Parquet files; needs pyarrow, from the ``diagnose`` extra.

:mod:`.schema` says what they hold, without torch; :mod:`.writer` writes them; :mod:`.flight` makes them of a batch.
"""

from __future__ import annotations

from nemo_geomask.records.schema import COLUMNS, REMOVED, VERSION, Column, arrow_schema, file_name, step_files

__all__ = ["COLUMNS", "REMOVED", "VERSION", "Column", "arrow_schema", "file_name", "step_files"]
