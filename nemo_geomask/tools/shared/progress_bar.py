"""Progress with the time left, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, description: str) -> Iterable[T]:
    """Return the items; while they are taken, a bar on standard error shows how many are done and the time left.

    There is no bar if standard error is no terminal, or if rich is not installed.

    Args:
        items: what is worked on.
        total: number of items.
        description: what is done; the command's own words, since the bar is not escaped.
    """
    # Not sys.stderr, which escapes the characters that a bar is drawn with.
    stream = sys.__stderr__
    if stream is None or not stream.isatty():
        return items
    try:
        from rich import console, progress
    except ImportError:
        return items
    return progress.track(items, description, total, console=console.Console(file=stream), transient=True)


def print_time_left(done: int, total: int, seconds: float, noun: str) -> None:
    """Print to standard error how many items are done and how long the others will take; nothing if it is no terminal.

    For work whose time is measured, which a bar that is drawn from a thread of its own would disturb, and for work that
    prints results meanwhile.

    Args: done: number of items that are done, above 0. seconds: time that they took. noun: plural for the items.
    """
    if sys.stderr.isatty() and done < total:
        remaining = seconds / done * (total - done)
        print(f"{done} of {total} {noun} in {seconds:.0f} s, about {remaining:.0f} s left", file=sys.stderr, flush=True)
