"""Progress with the time left, on a terminal and only for work that takes longer than a moment."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")
_DELAY = 2.0  # seconds after which the bar appears


def track(
    items: Iterable[T], total: int, description: str, *, delay: float = _DELAY, stream: TextIO | None = None
) -> Iterator[T]:
    """Yield the items; meanwhile, show how many are done, the time that passed and the time that is left.

    The bar is drawn on standard error and removed at the end. There is none if standard error is no terminal, if rich
    is not installed, or before ``delay`` seconds have passed.

    Args:
        items: what is worked on.
        total: number of items.
        description: what is done; the command's own words, since the bar is not escaped.
        delay: seconds before the bar appears.
        stream: terminal to draw on; None: standard error.
    """
    # Not sys.stderr, which escapes the characters that a bar is drawn with.
    stream = sys.__stderr__ if stream is None else stream
    bar = _create_bar(stream) if stream is not None and stream.isatty() else None
    if bar is None:
        yield from items
        return
    task, is_shown, begin = bar.add_task(description, total=total), False, time.monotonic()
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(task, completed=done)
            if not is_shown and time.monotonic() - begin >= delay:
                bar.start()
                is_shown = True
    finally:
        if is_shown:
            bar.stop()


def print_time_left(done: int, total: int, seconds: float, noun: str) -> None:
    """Print to standard error how many items are done and how long the others will take; nothing if it is no terminal.

    For work whose time is measured, which a bar that is drawn from a thread of its own would disturb, and for work that
    prints results meanwhile.

    Args:
        done: number of items that are done, above 0.
        total: number of items; nothing is printed once all are done.
        seconds: time that they took.
        noun: plural for the items.
    """
    if sys.stderr.isatty() and done < total:
        remaining = seconds / done * (total - done)
        print(f"{done} of {total} {noun} in {seconds:.0f} s, about {remaining:.0f} s left", file=sys.stderr, flush=True)


def _create_bar(stream: TextIO):  # type: ignore[no-untyped-def]  # rich is not always installed
    try:
        progress, console = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(file=stream),
        transient=True,
    )
