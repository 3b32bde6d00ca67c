"""Argument types that several commands use."""

from __future__ import annotations

import argparse
import math

ACCEPT_HELP = (
    "go on, at your own risk, although this API of NeMo-RL differs from the tested versions; its name is the one that "
    "the error prints (repeatable)"
)
"""Help of ``--accept``, which several commands have."""


def positive_number(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def positive_integer(text: str) -> int:
    """Parse a whole number above 0, for argparse."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--limit``, which raises or lowers a limit of :class:`~nemo_geomask.recipe.input_limits.InputLimits`."""
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a limit of what is read, such as nodes=50000; errors name the limit (repeatable)",
    )


def all_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)
