"""Tables as plain text; on a terminal, rich draws them if it is installed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

ABSENT = "–"
"""Text of a cell without a value."""


def format_cell(value: Any) -> str:
    """Return the text of a value in a table: four digits of a float, :data:`ABSENT` for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left_aligned: Collection[int] = (0,), indent: int = 0
) -> str:
    """Return a table as text, with columns as wide as their widest cell and two spaces between them.

    Use it for text that is returned, logged or written to a file; :func:`print_table` writes to the terminal.

    Args:
        columns: the header.
        rows: one cell for every column; cells that are not text are formatted by :func:`format_cell`.
        left_aligned: indices of the columns that are aligned to the left; all others are aligned to the right.
        indent: spaces in front of each line.
    """
    lines = [list(columns), *([format_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.ljust(width) if index in left_aligned else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, left_aligned: Collection[int] = (0,)
) -> None:
    """Print a table under its title, preceded by an empty line.

    On a terminal, rich draws the table if rich is installed: it folds long cells, which a narrow terminal would break.
    To a file or a pipe, the text of :func:`format_table` is written. For a table without rows, only the title is
    printed.

    Args: title: the line above the table; the others are those of :func:`format_table`.
    """
    if not rows:
        print(f"\n{title}")
        return
    try:
        modules = [importlib.import_module(f"rich.{name}") for name in ("table", "console", "text")]
    except ImportError:
        modules = []
    if not modules or not sys.stdout.isatty():
        print(f"\n{title}\n{format_table(columns, rows, left_aligned=left_aligned, indent=2)}")
        return
    table_module, console_module, text_module = modules
    table = table_module.Table(title=title, title_justify="left")
    # Text is printed as it is. In a str, such as generated tokens, rich would interpret its markup.
    for index, name in enumerate(columns):
        table.add_column(text_module.Text(name), justify="left" if index in left_aligned else "right", overflow="fold")
    for row in rows:
        table.add_row(*(text_module.Text(format_cell(cell)) for cell in row))
    # Without styles: the stream of a command shows escape sequences as text.
    console_module.Console(color_system=None).print(table)


def count_with_noun(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
