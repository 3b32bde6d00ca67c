"""Supervision of a process and all its descendants: run with a time limit, and none of them left at the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from nemo_geomask.errors import EngineError

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_TICK = 0.2  # seconds between looks at the processes
# Seconds without the end of a killed process after which the others are given up. Killed processes need time to end:
# on a busy machine, thirty of them with gigabytes each took minutes.
_KILL_TIMEOUT = 120.0


def supervised(
    command: Sequence[str],
    *,
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    every_tick: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command with a time limit, and end every process that it started.

    The processes are ended when the command ends, fails or runs out of time, or when this process receives a signal.
    Daemons are included: they become children of this process when their own parents end.

    Args:
        log: file that gets its output, appended.
        every_tick: called several times a second.

    Returns:
        Its exit status; None if the time limit was reached.

    Raises:
        EngineError: a process could not be ended.
    """
    before = descendants(os.getpid())
    started: set[int] = set()
    deadline = time.monotonic() + timeout
    with _adopting(), signals_as_exceptions():
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    cwd=folder,
                    start_new_session=True,  # Ctrl-C reaches this process alone, and it ends the others
                )
            while True:
                started |= {child.pid, *descendants(child.pid)}
                every_tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(min(_TICK, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline:
                    return None
        finally:
            end_processes(started, before)


def descendants(pid: int) -> set[int]:
    """Return the process IDs of all descendants, without zombies."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            # A process may end while /proc is read.
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                below.setdefault(int(parent), []).extend([int(entry)] if state != "Z" else [])
    pids: set[int] = set()
    pending = [pid]
    while pending:
        children = below.get(pending.pop(), [])
        pids.update(children)
        pending.extend(children)
    return pids


def end_processes(started: set[int], before: set[int]) -> None:
    """Kill the processes until none remains: one may start another while it is killed."""
    deadline, fewest = time.monotonic() + _KILL_TIMEOUT, len(started) + 1
    while True:
        # Orphans are children of this process by now; children that it had before are left alone.
        new = descendants(os.getpid()) - before
        started |= {child for pid in new & started for child in descendants(pid)}
        alive = new & started | {pid for pid in new if _is_adopted(pid)}
        started |= alive
        if not _reap(started) and not alive:
            return
        if len(alive) < fewest:
            deadline, fewest = time.monotonic() + _KILL_TIMEOUT, len(alive)
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, sorted(alive or started)))
            raise EngineError(f"processes {numbers} of the rehearsal could not be ended")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_adopted(pid: int) -> bool:
    """Return True if a process is in another session, and so was not started by this process directly."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _reap(pids: set[int]) -> bool:
    """Wait for ended children; return True if one of them is still ending, as a process with many threads may."""
    is_ending = False
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            is_ending |= os.waitpid(pid, os.WNOHANG) == (0, 0)
    return is_ending


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

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Signals that are ignored, as under nohup, stay ignored.
    handlers = {each: signal.getsignal(each) for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
    for each in handlers:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
