"""Processes end together: one error for all of them, an interrupt for the first alone, nobody left behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_geomask.errors import DataError
from nemo_geomask.parallel.local_processes import RankError, lead_ranks, run_ranks

pytestmark = pytest.mark.slow


def meet(rank, world):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return float(total)


def known(rank, world):
    meet(rank, world)
    if rank == 1:
        raise DataError("what a user should read")
    meet(rank, world)


def unforeseen(rank, world):
    meet(rank, world)
    if rank == 1:
        raise KeyError("a mistake in the code")
    meet(rank, world)


def killed(rank, world):
    meet(rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet(rank, world)


def killed_as_seen_late(rank, world):
    """The end of rank 1 is seen after the error of rank 0, as on a busy machine."""
    meet(rank, world)
    if rank == 0:
        raise RuntimeError("Connection reset by peer")
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank, world):
    meet(rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    meet(rank, world)


def left_alone(rank, world):
    if rank == 0:
        meet(rank, world)
    else:
        time.sleep(1000)


def asleep(rank, world):
    time.sleep(1000)


def unpicklable(rank, world):
    return lambda: rank


def places(rank, world, *more):
    return rank, world, dist.get_rank(), dist.get_world_size(), meet(rank, world), more


def nobody_is_left():
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()


FAILURES = [
    # Rank 2 fails too, for want of rank 1.
    (3, known, DataError, "^what a user should read$"),
    (2, unforeseen, RankError, r"(?s)^rank 1:\nTraceback.*KeyError: 'a mistake in the code'"),
    (2, killed, RankError, r"^rank 1 was ended from outside \(SIGKILL\)$"),
    (2, killed_as_seen_late, RankError, r"^rank 1 was ended from outside \(SIGKILL\)$"),
]


def test_results_come_in_rank_order():
    assert run_ranks(3, places, "a", 1) == [(rank, 3, rank, 3, 6.0, ("a", 1)) for rank in range(3)]
    nobody_is_left()


@pytest.mark.parametrize(("world", "work", "error", "message"), FAILURES)
def test_the_first_error_ends_all_ranks(world, work, error, message):
    with pytest.raises(error, match=message):
        run_ranks(world, work)
    nobody_is_left()


@pytest.mark.long
def test_a_stopped_rank_is_not_taken_for_one_that_was_killed():
    """It takes SIGKILL to end it, half a minute after the error of the rank that waited for it."""
    with pytest.raises(RankError, match=r"(?s)^rank 0:.*Timed out waiting"):
        run_ranks(2, stopped, timeout=20.0)
    nobody_is_left()


def test_an_end_that_is_reported_late_is_an_error(monkeypatch):
    wait = multiprocessing.connection.wait

    def late(objects, timeout=None):  # the forkserver has written the exit code, but not yet closed the pipe
        return [] if timeout == 0 and not isinstance(objects, list) else wait(list(objects), timeout)

    monkeypatch.setattr(multiprocessing.connection, "wait", late)
    with pytest.raises(RankError, match=r"(?s)^rank 0:\nTraceback.*unpicklable.*lambda"):
        run_ranks(1, unpicklable)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankError, match=r"(?s)^rank 0:\nTraceback.*unpicklable.*lambda"):
        run_ranks(1, unpicklable)
    nobody_is_left()


@pytest.mark.parametrize(
    ("world", "work", "timeout", "message"),
    [
        pytest.param(2, left_alone, 20, r"(?s)^rank 0:\nTraceback.*in meet", marks=pytest.mark.long),
        (1, asleep, 2, "^rank 0 did not finish within 2 seconds$"),
    ],
)
def test_ranks_that_hang_are_ended(world, work, timeout, message):
    with pytest.raises(RankError, match=message):
        run_ranks(world, work, timeout=timeout)
    nobody_is_left()


@pytest.mark.parametrize(("world", "work", "error", "message"), FAILURES)
def test_the_first_error_is_raised_once_beside_the_others(world, work, error, message):
    with pytest.raises(error, match=message), lead_ranks(world, work):
        work(0, world)
    nobody_is_left()


def test_an_error_of_the_first_rank_ends_the_others():
    def alone():
        assert meet(0, 2) == 3.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), lead_ranks(2, meet):
        alone()
    nobody_is_left()


def waits(rank, world, folder):
    Path(folder, f"{rank}").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(1000)


def alive(pid):
    """Whether a process runs; one that has ended may wait for somebody to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(reached):
    deadline = time.monotonic() + 300
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("sign", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(tmp_path, sign):
    code = (
        "if __name__ == '__main__':\n"
        "    from nemo_geomask.parallel.local_processes import run_ranks\n"
        "    from tests.parallel.test_local_processes import waits\n"
        f"    run_ranks(2, waits, {str(tmp_path)!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's background job ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
        ranks = [path.read_text() for path in tmp_path.iterdir()]
        # As a terminal does it, to every process of the group; or out of memory, to one.
        (os.killpg if sign == signal.SIGINT else os.kill)(process.pid, sign)
        # The pipe ends with the last process that holds it.
        _, complaints = process.communicate(timeout=300)
        assert complaints.count(b"Traceback") == (sign == signal.SIGINT)
        assert not any(map(alive, ranks))
    finally:
        process.kill()
