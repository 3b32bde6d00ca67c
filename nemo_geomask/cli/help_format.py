"""Help texts of the commands: wrapped at 80 columns, with a table of exit statuses."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping

COMMON_EXIT_STATUS = {
    130: "interrupted by Ctrl-C",
    141: "the reader of the output went away, as in `… | head -1`",
}
"""Statuses that every command can end with, beside its own."""
_WIDTH = 80
_COMMAND = "  nemo-geomask "


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that fills paragraphs and tables to the terminal's width, at most 80 columns.

    A line that is indented by two spaces begins a row of a table, whose text begins behind two more spaces, or is a
    command. A command is continued behind a backslash, so that it can be copied.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_WIDTH, shutil.get_terminal_size().columns) - 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for block in _blocks(text) for line in _wrap(block, width - len(indent)))


def with_exit_status(epilog: str | None, exit_status: Mapping[int, str]) -> str:
    """Return an epilog with the table of a command's exit statuses before its examples."""
    table = "\n".join(["exit status", *(f"  {status}  {meaning}" for status, meaning in exit_status.items())])
    before, heading, examples = (epilog or "").partition("examples")
    return "\n\n".join(part.strip("\n") for part in (before, table, heading + examples) if part.strip()) + "\n"


def _blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, rows of tables and commands, each as one line, and empty lines."""
    block = ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if block and line.strip() and not line.startswith(_COMMAND) and indent == _hanging_indent(block):
            block += " " + line.strip()
            continue
        if block:
            yield block
        block = line
        if not line.strip():
            yield ""
            block = ""
    if block:
        yield block


def _hanging_indent(block: str) -> int:
    """Return the column at which the text of a block continues."""
    if block.startswith(_COMMAND):
        return 6
    row = re.match(r" +\S+ {2,}", block)
    return row.end() if row else len(block) - len(block.lstrip())


def _wrap(block: str, width: int) -> list[str]:
    hanging = " " * _hanging_indent(block)
    is_command = block.startswith(_COMMAND)
    if is_command:  # an option and its value stay together
        block = re.sub(r"(--[\w-]+) (?!-)", "\\1\0", block)
    lines = textwrap.wrap(
        block,
        width - 2 if is_command and len(block) > width else width,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if not is_command:
        return lines or [""]
    return [line.replace("\0", " ") + " \\" * (line is not lines[-1]) for line in lines]
