"""The command line: ``nemo-geomask COMMAND …``; one module a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import nemo_geomask
from nemo_geomask.cli import bench, check, doctor, lab, run, schema
from nemo_geomask.errors import GeomaskError

__all__ = ["main"]

# Every command module has add(subparsers), which registers a parser whose `run` default does the work.
_COMMANDS = (lab, run, doctor, check, bench, schema)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; those of the process if None.

    Returns:
        0, 2 for a mistake in the arguments, the recipe or the installation, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="nemo-geomask", description=nemo_geomask.__doc__)
    parser.add_argument("--version", action="version", version=f"nemo-geomask {nemo_geomask.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(subparsers)
    # argparse fills `key.path=value ...` from the first run of positional arguments only; those after an option come
    # back as unknown.
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        if not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides += rest
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
