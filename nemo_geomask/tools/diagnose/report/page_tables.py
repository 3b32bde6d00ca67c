"""Tables of the page: the tables of several runs, merged so that the runs' columns stand side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_geomask.tools.diagnose.report.report_tables import Table
from nemo_geomask.tools.shared.terminal_tables import format_cell


@dataclass(frozen=True)
class PageColumn:
    """Column of a table in the page: in each row, a cell for each of the runs that have it, or one that all share."""

    title: str
    runs: list[int]
    cells: list[list[Any]]

    @property
    def css_class(self) -> str:
        """Class of the cells: ``text`` for sentences, ``short`` for names, ``number`` for numbers at the right."""
        if self.title in _TEXT_COLUMNS:
            return "text"
        return "short" if any(isinstance(cell, str) and cell for row in self.cells for cell in row) else "number"


@dataclass(frozen=True)
class PageTable:
    """Table in the page; ``run`` is the index of its run if the table shows only one of several runs, or else None."""

    title: str
    columns: list[PageColumn]
    definitions: Mapping[str, str]
    run: int | None = None

    @property
    def rows(self) -> list[list[tuple[str, str]]]:
        """Text and CSS class of each cell."""
        return [
            [(format_cell(cell), column.css_class) for column in self.columns for cell in column.cells[index]]
            for index in range(len(self.columns[0].cells))
        ]

    @property
    def cell_columns(self) -> list[tuple[str, int | None]]:
        """Title of each cell's column, and the index of its run; None if all runs share the column."""
        shared: list[int | None] = [None]
        return [(column.title, run) for column in self.columns for run in (column.runs or shared)]


_UNMERGED = ("causes", "changes", "steps", "circle", "groups", "worst_sequences", "worst_tokens")
"""Keys of tables that are not merged, because their rows differ from run to run, or merged they are too wide."""
_ROW_COLUMNS = ("definition", "threshold", "drifting | broken")
"""Titles of columns that depend on the row and not on the run."""
_TEXT_COLUMNS = ("definition", "which is")
"""Titles of columns that hold sentences."""


def merge_tables(tables: Sequence[tuple[int, Table]]) -> list[PageTable]:
    """Merge the tables of several runs that have the same key into one; rows are matched by their first cell.

    A column is shown only once if its cells are the same in all runs, and either it depends only on the row or all runs
    have all rows. Tables whose rows cannot be matched are not merged. Each table comes with the index of its run.
    """
    if len(tables) == 1:
        return [_page_table(tables[0][1])]
    if tables[0][1].key in _UNMERGED:
        # The definitions are the same for all runs and stand below the last table.
        return [
            _page_table(replace(table, definitions={}) if index < len(tables) - 1 else table, run)
            for index, (run, table) in enumerate(tables)
        ]
    first_table = tables[0][1]
    row_names = list(dict.fromkeys(row[0] for _, table in tables for row in table.rows))
    # Keys: the title with the number of earlier columns that have the same title; the run; the row.
    cells_by_column: dict[tuple[str, int], dict[int, dict[Any, Any]]] = {}
    for run, table in tables:
        for index, title in enumerate(table.columns):
            key = title, table.columns[:index].count(title)
            cells_by_column.setdefault(key, {})[run] = {row[0]: row[index] for row in table.rows}
    columns = []
    for (title, repetition), cells_by_run in cells_by_column.items():
        distinct = [
            list(dict.fromkeys(cells[name] for cells in cells_by_run.values() if name in cells)) for name in row_names
        ]
        describes_row = (title, repetition) == (first_table.columns[0], 0) or title in _ROW_COLUMNS
        has_all_rows = all(len(cells) == len(row_names) for cells in cells_by_run.values())
        is_shared = len(cells_by_run) == len(tables) and all(len(cells) < 2 for cells in distinct)
        if is_shared and (describes_row or has_all_rows):
            columns.append(PageColumn(title, [], [cells or [""] for cells in distinct]))
        else:
            rows = [[cells.get(name, "") for cells in cells_by_run.values()] for name in row_names]
            columns.append(PageColumn(title, list(cells_by_run), rows))
    # Long texts follow the values: to the right of them, the values of the last run would be out of sight.
    columns.sort(key=lambda column: column.title in _TEXT_COLUMNS)
    definitions = {name: text for _, table in tables for name, text in table.definitions.items()}
    return [PageTable(first_table.title, columns, definitions)]


def _page_table(table: Table, run: int | None = None) -> PageTable:
    columns = [PageColumn(title, [], [[row[index]] for row in table.rows]) for index, title in enumerate(table.columns)]
    return PageTable(table.title, columns, table.definitions, run)
