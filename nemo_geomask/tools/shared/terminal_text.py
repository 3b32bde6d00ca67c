"""Text of others made safe for terminals and pages: control characters are shown as escapes, such as ``\\x1b``.

A folder name, a recipe's key or a token may contain characters that recolour or overwrite the lines around them
(ESC and the C1 controls), reverse their order (bidirectional overrides), or begin a line that looks like ours.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def escape_line(text: str) -> str:
    """Return text in which control and format characters, line breaks included, are Python escapes.

    Escaped is what ``str.isprintable`` rejects, other than spaces such as U+00A0: categories Cc, Cf, Cs, Co, Cn, Zl
    and Zp of Unicode.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape_character, text))


def escape_lines(text: str, indent: str = "  ") -> str:
    """Return :func:`escape_line` of each line, with all lines after the first indented, so that none forges ours."""
    return f"\n{indent}".join(map(escape_line, text.split("\n")))


def escape_json(text: str) -> str:
    """Return JSON text in which all characters that :func:`escape_line` escapes, but ``\\n``, are JSON's own escapes.

    The text stands for the same values as before.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        character if character == "\n" or _is_harmless(character) else _json_escape(character) for character in text
    )


def _is_harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape_character(character: str) -> str:
    return character if _is_harmless(character) else repr(character)[1:-1]


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index]:02x}{units[index + 1]:02x}" for index in range(0, len(units), 2))


class EscapingStream:
    """Text stream that escapes the control characters in what is written to it, except line breaks and tabs.

    It is the last guard of what a command prints. Whoever prints a text of others in a line of its own escapes it
    before, by :func:`escape_line`: here, a line break within a name can't be told from the command's own.

    Args:
        raw_stream: the stream that is written to; other attributes and methods are its own.
    """

    def __init__(self, raw_stream: TextIO) -> None:
        self.raw_stream = raw_stream

    def write(self, text: str) -> int:
        """Write text; return its length before it was escaped."""
        self.raw_stream.write("".join(item if item in "\n\t" else _escape_character(item) for item in text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what is written to standard output and standard error within the context."""
    streams = sys.stdout, sys.stderr
    wrappers: Any = [None if stream is None else EscapingStream(stream) for stream in streams]
    sys.stdout, sys.stderr = wrappers
    try:
        yield
    finally:
        # Code within the context may have put another stream in place, and that one stays.
        if sys.stdout is wrappers[0]:
            sys.stdout = streams[0]
        if sys.stderr is wrappers[1]:
            sys.stderr = streams[1]
