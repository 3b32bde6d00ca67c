"""Reading of JSON Lines that may be damaged or hostile: each line is held to limits before and after it is parsed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import InputLimits, current_limits, limit_error, open_regular_file

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


def read_json_lines(path: Path, limits: InputLimits | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line, counted from 1, and its value; an incomplete last line is left out.

    A line is held to ``line_bytes`` and ``line_containers``, and its values to ``nesting`` and ``string_characters``.

    Raises: InputLimitError: a line exceeds a limit. DataError: the file can't be read, or a line is not JSON.
    """
    limits = limits or current_limits()
    parse = _line_parser()
    with open_log(path) as file:
        number = 0
        while line := file.readline(limits.line_bytes + 1):
            number += 1
            try:
                yield number, parse_json(line, f"{path}:{number}", limits, parse)
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


def parse_json(
    text: bytes, source: str, limits: InputLimits | None = None, parse: Callable[[bytes], Any] = json.loads
) -> Any:
    """Return the value of JSON text, held to the limits; ``source`` names the file, and the line, in errors.

    Raises: InputLimitError: a limit is exceeded. DataError: it is not JSON.
    """
    limits = limits or current_limits()
    if len(text) > limits.line_bytes:
        raise limit_error("line_bytes", source, limits)
    # Brackets in strings count as well; that is what keeps this check fast.
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > limits.line_containers:
        raise limit_error("line_containers", source, limits, brackets)
    try:
        value = parse(text)
    except RecursionError:
        raise limit_error("nesting", source, limits) from None
    except MemoryError:
        raise InputLimitError(f"{source}: the memory does not suffice to parse it; check the file") from None
    except ValueError as error:
        raise DataError(f"{source}: not JSON: {str(error)[:_MAX_EXCERPT]}") from None
    is_flat = brackets <= limits.nesting
    if not is_flat or len(text) > limits.string_characters:  # otherwise it has room for no such container or string
        _check_containers(value, source, limits, is_flat=is_flat)
    return value


def _check_containers(value: Any, source: str, limits: InputLimits, *, is_flat: bool) -> None:
    """Raise InputLimitError if lists and objects are nested too deeply, or a string in them is too long.

    If there are too few containers for the limit of nesting, lists that begin with a number, which may hold millions of
    them, are not searched.
    """
    pending = [(value, 1)]
    while pending:
        container, depth = pending.pop()
        if depth > limits.nesting:
            raise limit_error("nesting", source, limits)
        items = container.items() if isinstance(container, dict) else ((None, item) for item in _items(container))
        for key, item in items:
            text = item if isinstance(item, str) else key
            if isinstance(text, str) and len(text) > limits.string_characters:
                raise limit_error("string_characters", source, limits, len(text))
            is_numbers = is_flat and isinstance(item, list) and item and isinstance(item[0], int | float)
            if isinstance(item, dict | list) and not is_numbers:
                pending.append((item, depth + 1))


def _items(container: Any) -> list[Any]:
    return container if isinstance(container, list) else [container] if isinstance(container, str) else []
