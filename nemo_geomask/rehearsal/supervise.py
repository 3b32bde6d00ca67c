"""A process with all that it starts, however far away: run within a time, and nothing of it left."""

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

__all__ = ["descendants", "ended_by_signals", "supervised"]

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_TICK = 0.2
# Seconds that killed processes have to be gone.
_GRACE = 15.0


def supervised(
    command: Sequence[str],
    *,
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    every_tick: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command, and end whatever it started when it ends, fails, takes too long or this process is told to end.

    Daemons are found as well: they become children of this process when their own parents end.

    Args:
        command: with its arguments.
        log: file that gets its output, appended.
        timeout: seconds.
        environment: its variables; this process's if None.
        folder: where it runs.
        every_tick: called several times a second.

    Returns:
        Its exit status; None where the time was over.

    Raises:
        EngineError: something could not be ended.
    """
    before = descendants(os.getpid())
    started: set[int] = set()
    deadline = time.monotonic() + timeout
    with _adopting(), ended_by_signals():
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    cwd=folder,
                    start_new_session=True,  # Ctrl-C comes to this process alone, which ends the others
                )
            while True:
                started |= {child.pid, *descendants(child.pid)}
                every_tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(min(_TICK, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline:
                    return None
        finally:
            _end(started, before)


def descendants(pid: int) -> set[int]:
    """Process numbers of all processes below one, those that have ended and were not waited for aside."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            # One may end while the others are read.
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                below.setdefault(int(parent), []).extend([int(entry)] if state != "Z" else [])
    found: set[int] = set()
    left = [pid]
    while left:
        children = below.get(left.pop(), [])
        found.update(children)
        left.extend(children)
    return found


def _end(started: set[int], before: set[int]) -> None:
    """Kill until none is left: one may start another while it is killed."""
    deadline = time.monotonic() + _GRACE
    while True:
        # Whatever has no parent any more is a child of this process by now; what it had before is not concerned.
        here = descendants(os.getpid()) - before
        started |= {grand for pid in here & started for grand in descendants(pid)}
        left = here & started | {pid for pid in here if _adopted(pid)}
        started |= left
        if not _reap(started) and not left:
            return
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, sorted(left or started)))
            raise EngineError(f"processes {numbers} of the rehearsal could not be ended")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _adopted(pid: int) -> bool:
    """Whether a process in another session than this one's, and so no helper of this process's own, came to it."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _reap(pids: set[int]) -> bool:
    """Whether one of this process's children among them is still there: one of many threads ends by and by."""
    there = False
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            there |= os.waitpid(pid, os.WNOHANG) == (0, 0)
    return there


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Processes below this one that lose their parents become its children, and are found."""
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
def ended_by_signals() -> Iterator[None]:
    """What would end this process at once, such as a CI's time limit, ends it after all others."""
    signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in kept:
            signal.signal(each, signal.SIG_IGN)  # a second one would end the ending
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored, as under nohup, stays so.
    kept = {each: signal.getsignal(each) for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
    for each in kept:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
