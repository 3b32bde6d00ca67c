"""Columns of the tables on the terminal and in docs/background/performance.md, and the format of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_geomask.tools.shared.markdown import markdown_table
from nemo_geomask.tools.shared.terminal_tables import ABSENT, format_table

__all__ = [
    "COLLECTIVE_COLUMNS",
    "GROUP_COLUMNS",
    "LINEAR_COLUMNS",
    "LOGPROB_COLUMNS",
    "LONGEST_COLUMNS",
    "LOSS_COLUMNS",
    "POOLING_COLUMNS",
    "SKEWED_COLUMNS",
    "STEP_COLUMNS",
    "TARGET_COLUMNS",
    "Row",
    "TableColumn",
    "format_number",
    "measured_rows",
    "page_table",
    "terminal_table",
]

Row = Mapping[str, Any]
"""The entry of one path, loss or target in the JSON of a benchmark."""


class TableColumn(NamedTuple):
    """A column of a table.

    Attributes:
        head: heading of the column.
        cell: function from a row to the text of its cell.
        is_on_page: True if docs/background/performance.md also shows the column.
    """

    head: str
    cell: Callable[[Row], str]
    is_on_page: bool = True


def terminal_table(columns: Sequence[TableColumn], rows: Iterable[Row]) -> str:
    """Return a table of all columns for the terminal."""
    return format_table([column.head for column in columns], [[column.cell(row) for column in columns] for row in rows])


def page_table(columns: Sequence[TableColumn], rows: Iterable[Row]) -> str:
    """Return a Markdown table of the columns that docs/background/performance.md shows."""
    shown = [column for column in columns if column.is_on_page]
    return markdown_table([column.head for column in shown], [[column.cell(row) for column in shown] for row in rows])


def measured_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose ``status`` is ``measured``."""
    return [row for row in rows if row["status"] == "measured"]


def format_number(value: float | None) -> str:
    """Format a number with three digits; integers and numbers of 100 or more without decimals; None as a dash."""
    if value is None:
        return ABSENT
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def _number(head: str, key: str, *, scale: float = 1.0, is_on_page: bool = True) -> TableColumn:
    """Return a column of ``row[key] / scale``, with a dash for a missing value."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return format_number(value if value is None or scale == 1 else value / scale)

    return TableColumn(head, cell, is_on_page)


def _median(head: str, key: str) -> TableColumn:
    return TableColumn(head, lambda row: format_number(row.get(key, {}).get("median")))


def _share(head: str, key: str, digits: int = 0) -> TableColumn:
    def cell(row: Row) -> str:
        value = row.get(key)
        return ABSENT if value is None else f"{value:.{digits}%}"

    return TableColumn(head, cell)


def _error(head: str, key: str) -> TableColumn:
    def cell(row: Row) -> str:
        errors = row.get("errors", {})
        if key not in errors:
            return ABSENT
        return "NaN" if errors[key] is None else f"{errors[key]:.0e}"  # JSON has null for NaN

    return TableColumn(head, cell)


def _quartiles(row: Row) -> str:
    median, low, high = (format_number(row["ms"][key]) for key in ("median", "q1", "q3"))
    return f"{median} ({low}–{high})"


_PATH = TableColumn("path", lambda row: row["path"])
_TIME = TableColumn("ms (quartiles)", _quartiles)
_STAGES = (_median("forward", "forward_ms"), _median("backward", "backward_ms"))
_EXTRA_MEMORY = _number("extra MB", "extra_bytes", scale=1e6)
_ERRORS = (_error("error logp", "logprob"), _error("gradient", "gradient"))

LOGPROB_COLUMNS = (
    _PATH,
    _TIME,
    _median("CPU ms", "processor_ms"),
    *_STAGES,
    _number("B/el", "bytes_per_element"),
    _number("GB/s", "gb_s", is_on_page=False),
    _share("of a copy", "of_copy"),
    _EXTRA_MEMORY,
    _number("launches", "launches"),
    _number("syncs", "host_syncs", is_on_page=False),
    _number("collectives", "collectives", is_on_page=False),
    *_ERRORS,
)
"""Columns of ``bench logprobs``, with one row for each path."""

LINEAR_COLUMNS = (
    _PATH,
    _TIME,
    *_STAGES,
    _share("of the products", "of_products"),
    _EXTRA_MEMORY,
    _share("of the logits", "of_logits", digits=1),
    _number("syncs", "host_syncs", is_on_page=False),
    *_ERRORS,
)
"""Columns of ``bench linear``, with one row for each path."""

LOSS_COLUMNS = (
    TableColumn("loss", lambda row: row["loss"]),
    TableColumn("layout", lambda row: row["how"]),
    _TIME,
    _median("CPU ms", "processor_ms"),
    _number("operations", "launches"),
    _number("syncs", "host_syncs"),
)
"""Columns of ``bench loss``, with one row for each loss and layout."""

SKEWED_COLUMNS = (TableColumn("way", lambda row: row["way"]), _TIME, _median("CPU ms", "processor_ms"))
"""Columns of the packed row with sequences of very different lengths, with one row for each wrapper."""

STEP_COLUMNS = (
    _PATH,
    _TIME,
    _median("CPU ms", "processor_ms"),
    *_STAGES,
    _number("× the decoder", "of_decoder"),
    _number("peak MB", "peak_bytes", scale=1e6),
    _error("difference of the loss", "loss"),
    _error("of the gradients", "gradient"),
)
"""Columns of ``bench step``, with one row for each path."""

LONGEST_COLUMNS = (
    _PATH,
    TableColumn("longest sequence", lambda row: f"{row['tokens']}" if row["too_long"] else f"≥ {row['tokens']}"),
    _number("too long", "too_long"),
)
"""Columns of the longest sequences of which a step fits into memory, with one row for each path."""

COLLECTIVE_COLUMNS = (
    _PATH,
    TableColumn("collectives", lambda row: str(row["calls"])),
    _number("bytes a token", "payload_bytes_per_token"),
)
"""Columns of the collectives over tensor-parallel ranks, with one row for each path."""

POOLING_COLUMNS = (
    TableColumn("way", lambda row: row["way"]),
    _median("ms", "ms"),
    TableColumn("collectives", lambda row: str(row["collectives"])),
    _number("bytes sent a rank", "sent_bytes"),
)
"""Columns of ``bench segments``, with one row for each way to pool statistics."""

GROUP_COLUMNS = (
    TableColumn("group", lambda row: row["group"]),
    TableColumn("collective", lambda row: row["collective"]),
    TableColumn("bytes", lambda row: str(row["bytes"])),
)
"""Columns of the collectives of one microbatch, with one row for each collective."""

TARGET_COLUMNS = (
    TableColumn("target", lambda row: row["name"]),
    TableColumn("bound", lambda row: row["bound"]),
    _number("measured", "found"),
    _number("by CPU time", "by_processor_time"),
)
"""Columns of the speed targets without the verdict, with one row for each target."""
