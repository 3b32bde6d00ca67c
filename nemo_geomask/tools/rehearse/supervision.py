"""Supervision of a process and all its descendants: none of them is left at the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from nemo_geomask.errors import EngineError

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_TICK = 0.2  # seconds between two ticks
# Seconds without the end of a killed process after which the others are given up. Killed processes need time to end:
# on a busy machine, thirty of them with gigabytes each took minutes.
_KILL_TIMEOUT = 120.0


@contextlib.contextmanager
def supervised(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and end it with every process that it started when the block ends.

    A signal that ends this process ends them first. Daemons are included: they become children of this process when
    their own parents end.

    Args:
        log: file that gets its output, appended.

    Raises:
        EngineError: a process could not be ended.
    """
    before = descendants_in_other_sessions()
    with _adopting(), signals_as_exceptions():
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    cwd=folder,
                    start_new_session=True,  # Ctrl-C reaches this process alone, and it ends the others
                )
            yield process
        finally:
            end_processes(before)


def wait_for(
    process: subprocess.Popen[bytes], timeout: float, every_tick: Callable[[], None] = lambda: None
) -> int | None:
    """Return the exit status of a process; None if the time limit was reached.

    Args:
        every_tick: called several times a second.
    """
    deadline = time.monotonic() + timeout
    while True:
        every_tick()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_TICK, max(0.0, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            return None


def descendants_in_other_sessions() -> set[int]:
    """Return the IDs of this process's descendants, zombies included, that are in another session than this process.

    What :func:`supervised` starts is in a session of its own, and no process can join another session.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            # A process may end while /proc is read.
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append((int(entry), int(fields[3])))
    own_session, pids, pending = os.getsid(0), set(), [os.getpid()]
    while pending:
        for pid, session in children.get(pending.pop(), []):
            pending.append(pid)
            if session != own_session:
                pids.add(pid)
    return pids


def end_processes(before: set[int]) -> None:
    """Kill the descendants in other sessions until none remains: one may start another while it is killed.

    Those that this process had before are left alone.
    """
    deadline, fewest = 0.0, 0
    while pids := descendants_in_other_sessions() - before:
        if not fewest or len(pids) < fewest:
            deadline, fewest = time.monotonic() + _KILL_TIMEOUT, len(pids)
        if time.monotonic() > deadline:
            raise EngineError(f"processes {', '.join(map(str, sorted(pids)))} of the rehearsal could not be ended")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # a child's child, so far
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make orphaned descendants children of this process, within the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    was = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise EngineError("this system does not let a process adopt others' children; a rehearsal needs Linux")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, was.value)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn signals that end this process into exceptions, so that its descendants are ended first."""
    signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # Signals that are ignored, as under nohup, stay ignored.
    handlers = {each: signal.getsignal(each) for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
    for each in handlers:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
