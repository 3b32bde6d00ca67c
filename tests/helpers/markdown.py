"""Markdown tables, and replacement of the text between two markers of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nemo_geomask.errors import ArgumentError


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a ``|`` within a cell is escaped."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines[1:])])


def replace_marked_text(text: str, mark: str, replacement: str, *, page: str) -> str:
    """Return ``text`` with new content between ``<!-- mark: begin -->`` and ``<!-- mark: end -->``.

    Args:
        text: the page's text.
        mark: name in the two markers.
        replacement: the lines to put between them.
        page: the page's name, for the error.

    Raises:
        ArgumentError: a marker is missing.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ArgumentError(f"{page}: '{begin}' … '{end}' is missing; add both markers where the text belongs")
    return f"{before}{begin}\n{replacement}\n{end}{after}"
