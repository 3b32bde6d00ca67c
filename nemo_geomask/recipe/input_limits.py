"""Limits of what is read from files that other people wrote, and readers that hold to them.

A reader stops at a limit before the memory or time is spent, and raises :class:`InputLimitError`, which names the
limit. The limits are those of :func:`current_limits`; a command's ``--limit NAME=VALUE`` or :func:`use_limits` raises
them. The defaults are seven times what NeMo-RL's own recipes need, or more.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.optional import require


def _limit(default: int, excess: str) -> Any:
    """Return a field with its default, and the words of its error, in which the limit takes the place of {}."""
    return field(default=default, metadata={"excess": excess})


@dataclass(frozen=True)
class InputLimits:
    """Limits of a file that is read, and of what it expands to; the words of an error say what each one counts."""

    file_bytes: int = _limit(4_000_000, "the file has more than {} bytes")
    files: int = _limit(100, "defaults: lead to more than {} files")
    nesting: int = _limit(100, "mappings and lists are nested more than {} deep")
    nodes: int = _limit(20_000, "there are more than {} values once aliases and references are expanded")
    merged_settings: int = _limit(50_000, "merging the settings of all files and overrides takes more than {} of them")
    string_characters: int = _limit(1_000_000, "a value has more than {} characters")
    total_characters: int = _limit(4_000_000, "references or full names of settings have more than {} characters")
    references: int = _limit(2_000, "more than {} references would have to be resolved")
    reference_characters: int = _limit(50_000, "resolving the references takes the parsing of more than {} characters")
    number_digits: int = _limit(1000, "an integer has more than {} digits")
    line_bytes: int = _limit(2**26, "the line has more than {} bytes")
    line_containers: int = _limit(100_000, "the line has more than {} objects and lists")
    metrics_bytes: int = _limit(2**27, "the file has more than {} bytes")
    metric_values: int = _limit(4_000_000, "the file has more than {} numbers")  # a line counts as four more
    record_bytes: int = _limit(2**31, "the file has more than {} bytes")
    footer_bytes: int = _limit(2**21, "the metadata have more than {} bytes")
    record_tokens: int = _limit(2**26, "the file claims more than {} tokens or sequences")
    row_group_tokens: int = _limit(2**24, "a row group claims more than {} tokens or sequences")
    tokens_per_byte: int = _limit(16, "the file claims more than {} tokens for each of its bytes")


_EXCESS = {limit.name: limit.metadata["excess"] for limit in fields(InputLimits)}
_in_effect: list[InputLimits] = [InputLimits()]

# Digits of a number in YAML: 0xff, 1_000, and base 60 as in 1:30.
_NUMBER = re.compile(r"[-+]?(?:0[xob][0-9a-fA-F_]+|[0-9_:]+(?:\.[0-9_]*)?)")
_FILE_TYPES = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def current_limits() -> InputLimits:
    """Return the limits in effect in this process."""
    return _in_effect[-1]


@contextmanager
def use_limits(limits: InputLimits) -> Iterator[None]:
    """Put limits into effect for the whole process within the context, threads included."""
    _in_effect.append(limits)
    try:
        yield
    finally:
        _in_effect.pop()


def parse_limits(words: Sequence[str]) -> InputLimits:
    """Return the current limits with those of ``NAME=VALUE`` words replaced.

    Raises: ConfigError: a word has another form, an unknown name, or a value that is no whole number above 0.
    """
    values: dict[str, int] = {}
    for word in words:
        name, _, text = word.partition("=")
        number = text.replace("_", "")
        if name not in _EXCESS:
            raise ConfigError(f"--limit {word}: there is no limit '{name}'; choose from {', '.join(_EXCESS)}")
        if not (number.isascii() and number.isdecimal() and len(number) <= 18 and int(number) > 0):
            raise ConfigError(f"--limit {word}: '{text}' is not a whole number above 0; write for example {name}=50000")
        values[name] = int(number)
    return replace(current_limits(), **values)


def check_limit(name: str, amount: int, source: object) -> None:
    """Raise InputLimitError if an amount, as far as it has been counted, exceeds a limit.

    Args:
        name: field of :class:`InputLimits`.
        amount: the amount.
        source: the file, and the key if it is known, for the error.
    """
    if amount > getattr(current_limits(), name):
        raise limit_error(name, source, amount)


def limit_error(name: str, source: object, amount: int | None = None, excess: str | None = None) -> InputLimitError:
    """Return the error of an exceeded limit; ``excess`` are its words if they are not those of the field."""
    words = (excess or _EXCESS[name]).format(f"{getattr(current_limits(), name):,}")
    in_file = "" if amount is None else f" ({amount:,} or more here)"
    return InputLimitError(
        f"{source}: {words}{in_file}, which is over the limit {name}; if the file is right, raise it with "
        f"--limit {name}=NUMBER"
    )


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; never wait for the writer of a FIFO.

    Raises:
        InputLimitError: it is a FIFO, a device or a socket.
        OSError: as of ``open``; a folder is an ``IsADirectoryError``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)
        file_type = next((name for is_type, name in _FILE_TYPES if is_type(mode)), "no file")
        raise InputLimitError(f"{path}: is {file_type}, not a regular file; write its content to a file first")
    return open(descriptor, "rb")  # raises for a folder, and closes the descriptor


def read_text(path: str | Path) -> str:
    """Return the text of a regular file in UTF-8, with ``\\n`` as the end of each line.

    Raises:
        InputLimitError: it is no regular file, or larger than ``file_bytes``.
        OSError, UnicodeDecodeError: as of ``Path.read_text``. A name that no file can have is a ``FileNotFoundError``.
    """
    if "\0" in str(path):
        raise FileNotFoundError(2, "a name can't hold a null character", str(path))
    with open_regular_file(path) as file:
        content = file.read(current_limits().file_bytes + 1)
        check_limit("file_bytes", len(content), path)
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_source(path: Path) -> str:
    """Return the text of a module of NeMo-RL, as :func:`read_text`; empty if it can't be opened.

    Raises: InputLimitError: as of :func:`read_text`. ConfigError: it is not UTF-8.
    """
    try:
        return read_text(path)
    except OSError:
        return ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no Python source: {error}") from None


def parse_python(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """Return ``ast.parse(text, mode=mode)``.

    Raises: SyntaxError: Python can't parse the text, for whatever reason: its nesting and null characters, too.
    """
    try:
        return ast.parse(text, mode=mode)
    except (RecursionError, MemoryError, ValueError) as error:
        raise SyntaxError(str(error) or type(error).__name__) from None


def check_yaml(text: str, source: object, *, nodes: int = 0) -> int:
    """Hold YAML text to the limits, its aliases expanded, without building its values.

    Args:
        text: YAML of one or several documents.
        source: name of the file, for the error.
        nodes: number of nodes of other files, which count, too.

    Returns: ``nodes`` with those of this text.
    Raises: InputLimitError: a limit is exceeded. yaml.YAMLError: the text is not valid YAML.
    """
    yaml = require("yaml", "reading YAML needs", "recipes")
    open_anchors: list[tuple[str | None, int]] = []  # anchor of each open collection, nodes before it
    sizes: dict[str, int] = {}  # nodes below each anchor
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            match event:
                case yaml.AliasEvent():
                    if any(anchor == event.anchor for anchor, _ in open_anchors):  # it contains itself
                        raise limit_error("nesting", _line(source, event))
                    nodes += sizes.get(event.anchor, 1)  # the loader refuses an unknown one
                case yaml.CollectionStartEvent():
                    open_anchors.append((event.anchor, nodes))
                    nodes += 1
                    check_limit("nesting", len(open_anchors), _line(source, event))
                case yaml.CollectionEndEvent():
                    anchor, nodes_before = open_anchors.pop()
                    if anchor is not None:
                        sizes[anchor] = nodes - nodes_before
                case yaml.ScalarEvent():
                    nodes += 1
                    if event.anchor is not None:
                        sizes[event.anchor] = 1
                    _check_scalar(event, _line(source, event))
            check_limit("nodes", nodes, _line(source, event))
    except yaml.YAMLError as error:
        if "maximum nesting depth" in str(error):  # libyaml's own limit, 1000
            raise limit_error("nesting", source) from None
        raise
    except RecursionError:  # PyYAML without libyaml
        raise limit_error("nesting", source) from None
    return nodes


def _line(source: object, event: Any) -> str:
    return f"{source}:{event.start_mark.line + 1}"


def _check_scalar(event: Any, source: str) -> None:
    check_limit("string_characters", len(event.value), source)
    if (not event.style or event.tag) and _NUMBER.fullmatch(event.value):
        check_limit("number_digits", len(event.value), source)


def load_yaml(text: str, source: object) -> Any:
    """Return the values of YAML text of one document, by PyYAML's safe loader.

    Raises: InputLimitError: a limit is exceeded. ConfigError: it is not valid YAML. Both name ``source``.
    """
    yaml = require("yaml", "reading YAML needs", "recipes")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def parse(content: str) -> Any:
        check_yaml(content, source)  # before values are built, since aliases expand
        return yaml.load(content, Loader=loader)

    return parse_text(parse, text, source, format_name="YAML")


def parse_text(parse: Callable[[str], Any], text: str, source: object, *, format_name: str) -> Any:
    """Return ``parse(text)``, held to the limits of nesting, values, strings and numbers.

    Args:
        parse: a parser of text that builds plain mappings, lists and values, such as ``tomllib.loads``.
        text: the text.
        source: name of the file, for errors.
        format_name: name of the format, for errors.

    Raises: InputLimitError: a limit is exceeded. ConfigError: the parser refuses the text, by any exception.
    """
    try:
        value = parse(text)
    except InputLimitError:
        raise
    except RecursionError:
        raise limit_error("nesting", source) from None
    except MemoryError:
        raise InputLimitError(f"{source}: the memory does not suffice to read it as {format_name}") from None
    except Exception as error:  # parsers let errors of int(), datetime and dict through
        if "integer string conversion" in str(error):  # Python's own limit, 4300 digits
            raise limit_error("number_digits", source) from None
        raise ConfigError(f"{source}: not valid {format_name}: {' '.join(str(error).split())}") from None
    check_values(value, source)
    return value


def check_values(value: Any, source: object) -> None:
    """Raise InputLimitError if plain mappings, lists and values exceed a limit; shared ones count at each place.

    Args:
        value: mappings, lists, tuples and values.
        source: name of the file, for the error.
    """
    nodes = 0
    pending: list[Iterator[Any]] = [iter((value,))]
    while pending:
        for item in pending[-1]:
            nodes += 1
            check_limit("nodes", nodes, source)
            if isinstance(item, Mapping | list | tuple | set | frozenset):
                check_limit("nesting", len(pending), source)
                content = itertools.chain.from_iterable(item.items()) if isinstance(item, Mapping) else item
                pending.append(iter(content))
                break
            if isinstance(item, str | bytes):
                check_limit("string_characters", len(item), source)
            elif isinstance(item, int):
                check_limit("number_digits", int(item.bit_length() / 3.33), source)  # bits of a decimal digit
        else:
            pending.pop()
