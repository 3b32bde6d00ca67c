"""Commands of the package run in processes of their own, with a limit of memory, and one of time that ends what hangs.

``python -m tests.helpers.limited_commands MODULE…`` imports modules once. For each line of JSON on standard input, a
list of arguments, it forks a process that runs the command, and prints a line of JSON with the outcome.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["LimitedCommands", "Outcome", "limited_commands"]

MAX_ADDRESS_SPACE = 3 * 2**30
"""Bytes of virtual memory; a process that reserves more gets a MemoryError."""
MAX_WALL_SECONDS = 100
"""Time after which a process that waits for something is killed."""


class Outcome(NamedTuple):
    """Outcome of a command.

    Attributes:
        status: exit status; negative: the signal that ended it.
        output: standard output and standard error.
        peak_bytes: largest resident memory.
    """

    status: int
    output: str
    peak_bytes: int


class LimitedCommands:
    """Runs commands in the processes of a forking server."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, *arguments: object) -> Outcome:
        """Run ``nemo-geomask ARGUMENTS`` and return its outcome."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([str(argument) for argument in arguments]), file=self._server.stdin, flush=True)
        return Outcome(*json.loads(self._server.stdout.readline()))


@contextlib.contextmanager
def limited_commands(modules: Sequence[str]) -> Iterator[LimitedCommands]:
    """Start the server with some modules imported, and end it."""
    command = [sys.executable, "-m", __name__, *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield LimitedCommands(server)
        finally:
            assert server.stdin is not None
            server.stdin.close()


def _run_limited(arguments: list[str], output: int) -> None:
    """Run a command in this process, which is a fork, and end the process."""
    from nemo_geomask.cli import main

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    signal.alarm(MAX_WALL_SECONDS)
    status = 70  # of an exception that main lets through; no command has it
    try:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _serve(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                _run_limited(json.loads(line), output.fileno())
            _, status, usage = os.wait4(child, 0)
            output.seek(0)
            text = output.read(100_000).decode(errors="replace")
        outcome = Outcome(os.waitstatus_to_exitcode(status), text, usage.ru_maxrss * 1024)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
