"""Reading of JSON Lines that may be damaged or hostile: each line is held to limits before it is parsed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import check_limit, current_limits, limit_error, open_regular_file

_MAX_EXCERPT = 200
"""Length of what an error quotes of another error, which may quote the file."""


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading.

    Raises: InputLimitError: it is a FIFO, a device or a socket. DataError: it can't be opened.
    """
    try:
        return open_regular_file(path)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line, counted from 1, and its value; an incomplete last line is left out.

    Raises: InputLimitError: a line exceeds a limit. DataError: the file can't be read, or a line is not JSON.
    """
    parse = _line_parser()
    with open_log(path) as file:
        number = 0
        while line := file.readline(current_limits().line_bytes + 1):
            number += 1
            try:
                yield number, _parse_line(line, f"{path}:{number}", parse)
            except InputLimitError:
                raise
            except DataError:
                if not line.endswith(b"\n"):
                    return  # the run is still writing this line
                raise


def _line_parser() -> Callable[[bytes], Any]:
    """Return a parser of JSON: orjson if it is installed, with the standard library's parser as a fallback."""
    try:
        fast_parse = importlib.import_module("orjson").loads
    except ImportError:
        return json.loads

    def parse(line: bytes) -> Any:
        try:
            return fast_parse(line)
        except ValueError:  # the line may hold NaN or Infinity, which only the standard library accepts
            return json.loads(line)

    return parse


def _parse_line(text: bytes, source: str, parse: Callable[[bytes], Any]) -> Any:
    """Return the value of a line of JSON, which errors name by ``source``."""
    check_limit("line_bytes", len(text), source)
    # Brackets in strings count as well; that is what keeps this check fast.
    check_limit("line_containers", text.count(b"[") + text.count(b"{"), source)
    try:
        return parse(text)
    except RecursionError:
        raise limit_error("nesting", source) from None
    except MemoryError:
        raise InputLimitError(f"{source}: the memory does not suffice to parse it; check the file") from None
    except ValueError as error:
        raise DataError(f"{source}: not JSON: {str(error)[:_MAX_EXCERPT]}") from None
