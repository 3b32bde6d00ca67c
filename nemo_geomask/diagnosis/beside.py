"""The tables of several runs, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_geomask.diagnosis.text import Table, as_text

__all__ = ["PageColumn", "SideBySide", "side_by_side"]


@dataclass(frozen=True)
class PageColumn:
    """Of a table in the page: the cells of one row are those of all runs that have it, or one for all."""

    title: str
    runs: list[int]
    cells: list[list[Any]]

    @property
    def kind(self) -> str:
        """Numbers stand at the right."""
        return "short" if any(isinstance(one, str) and one for row in self.cells for one in row) else "number"


@dataclass(frozen=True)
class SideBySide:
    """A table in the page, of all runs or of ``run``."""

    title: str
    columns: list[PageColumn]
    definitions: Mapping[str, str]
    run: int | None = None

    @property
    def rows(self) -> list[list[tuple[str, str]]]:
        """The text and kind of each cell."""
        count = len(self.columns[0].cells)
        return [
            [(as_text(one), column.kind) for column in self.columns for one in column.cells[line]]
            for line in range(count)
        ]


_APART = ("changes", "steps", "circle", "groups", "worst_sequences", "worst_tokens")
"""Tables whose rows have no name that runs share."""
_OF_ROWS = ("definition", "threshold", "drifting | broken")


def side_by_side(found: Sequence[tuple[int, Table]]) -> list[SideBySide]:
    """The tables of several runs, one of each, as one; a column that is the same in all of them stands once: where all
    have the same rows, or it says something of the row itself."""
    first = found[0][1]
    if len(found) == 1 or first.key in _APART:
        last = len(found) - 1
        return [
            SideBySide(
                table.title,
                [
                    PageColumn(title, [], [[row[place]] for row in table.rows])
                    for place, title in enumerate(table.columns)
                ],
                table.definitions if number == last else {},
                run if len(found) > 1 else None,
            )
            for number, (run, table) in enumerate(found)
        ]
    names = list(dict.fromkeys(row[0] for _, table in found for row in table.rows))
    values: dict[tuple[str, int], dict[int, dict[Any, Any]]] = {}  # by title and how many were of that title before
    for run, table in found:
        for place, title in enumerate(table.columns):
            again = table.columns[:place].count(title)
            values.setdefault((title, again), {})[run] = {row[0]: row[place] for row in table.rows}
    columns = []
    for (title, again), of_runs in values.items():
        cells = [[of_run.get(name, "") for of_run in of_runs.values()] for name in names]
        known = [list(dict.fromkeys(of_run[name] for of_run in of_runs.values() if name in of_run)) for name in names]
        of_rows = (title, again) == (first.columns[0], 0) or title in _OF_ROWS
        same_rows = of_rows or all(len(of_run) == len(names) for of_run in of_runs.values())
        if same_rows and len(of_runs) == len(found) and all(len(one) < 2 for one in known):
            columns.append(PageColumn(title, [], [one or [""] for one in known]))
        else:
            columns.append(PageColumn(title, list(of_runs), cells))
    definitions = {name: text for _, table in found for name, text in table.definitions.items()}
    return [SideBySide(first.title, columns, definitions)]
