"""The command line: ``nemo-geomask COMMAND …``; one module a command."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

import nemo_geomask
from nemo_geomask.cli import bench, check, diagnose, doctor, lab, rehearse, run, schema, sweep, test_variant, translate
from nemo_geomask.errors import GeomaskError

__all__ = ["COMMANDS", "main"]

# Every command module has add(subparsers), which registers a parser whose `run` default does the work.
COMMANDS = (lab, run, doctor, check, diagnose, sweep, translate, test_variant, rehearse, bench, schema)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; those of the process if None.

    Returns:
        0, 1 for what a command says of itself, 2 for a mistake in the arguments, the recipe or the installation, 130
        after Ctrl-C, 141 where the reader of the output went away (``… | head -1``): what a shell says of SIGPIPE.
    """
    try:
        try:
            return _run(argv)
        finally:
            # Here, since Python's own flush at exit is too late to be caught. A process may be without output, and a
            # script of the user's may close it.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        left = [stream for stream in (sys.stdout, sys.stderr) if _reader_left(stream)]
        if not left:
            raise  # a pipe or socket of the command's own, such as one to a worker
        for stream in left:
            # What is still buffered must go somewhere at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="nemo-geomask", description=nemo_geomask.__doc__)
    parser.add_argument("--version", action="version", version=f"nemo-geomask {nemo_geomask.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    # argparse fills `key.path=value ...` from the first run of positional arguments only; those after an option come
    # back as unknown.
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        if not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides = [*arguments.overrides, *rest]
    # As with `python -m`, so that module:attribute finds a module in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        status: int = arguments.run(arguments)
    except GeomaskError as error:
        print(f"nemo-geomask: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _reader_left(stream: TextIO | None) -> bool:
    """Whether the other end of a standard stream is closed."""
    try:
        number = stream.fileno() if stream is not None else None
    except ValueError:  # closed, or no file at all
        number = None
    if number is None:
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
