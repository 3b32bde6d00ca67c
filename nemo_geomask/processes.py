"""Several processes of one group on this machine: started together, ended together, and one error for all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from nemo_geomask.errors import GeomaskError

__all__ = ["PATIENCE", "RankError", "beside", "end_with_parent", "run"]

#: Seconds until a collective gives up. A process that dies is noticed at once; this is for one that hangs.
PATIENCE = 600.0
# Seconds until a process has started, or has reported its end after this one reached its own.
_START = 300.0
# Seconds in which a process that made a collective fail here says why.
_GRACE = 5.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


class RankError(GeomaskError, RuntimeError):
    """A process of a group died, hung, or met an error that is no :class:`GeomaskError`; then with its traceback."""


@dataclass(frozen=True)
class _Failure:
    """What ended a process, and when."""

    at: float
    error: GeomaskError


@dataclass(frozen=True)
class _Rank:
    """A process that this one started."""

    number: int
    process: BaseProcess
    pipe: Any

    def word(self) -> Any:
        """What it says next; a process that ends without a word has failed."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE)
            # It said nothing, so what others saw of its end can only have come later.
            return _Failure(0.0, RankError(f"rank {self.number} was ended from outside ({_ending(self.process)})"))

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass(frozen=True)
class _Group:
    """The process group that ranks make; what each of them needs to know of it."""

    world: int
    backend: str
    patience: float

    @contextlib.contextmanager
    def started(
        self, numbers: Iterable[int], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Iterator[tuple[list[_Rank], str]]:
        """Processes for these ranks and the path of the file in which all ranks meet; they end with the block."""
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            ranks: list[_Rank] = []
            try:
                with _interrupts_blocked():
                    for number in numbers:
                        ranks.append(_start(number))
                # What takes a process long are its imports. They all go on together, and a collective's patience is for
                # what the ranks do.
                _tell(ranks, (function, arguments))
                _hear(ranks, _START)
                _tell(ranks, (self, store))
                yield ranks, store
            finally:
                for rank in ranks:
                    rank.process.terminate()
                for rank in ranks:
                    rank.stop()

    def join(self, rank: int, store: str) -> None:
        """Make this process one rank of the default process group."""
        if self.backend == "nccl":
            torch.cuda.set_device(rank)
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        chosen = loopback is not None and _INTERFACE not in os.environ
        if chosen:
            os.environ[_INTERFACE] = str(loopback)
        try:
            dist.init_process_group(
                self.backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=self.world,
                timeout=timedelta(seconds=self.patience),
            )
        finally:
            if chosen:
                del os.environ[_INTERFACE]


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Children inherit what is blocked: Ctrl-C, which the terminal sends to all, is for their parent to handle."""
    # Starting its helper, multiprocessing would unblock what is blocked here.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(number: int) -> _Rank:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_main, args=(there, number), name=f"rank {number}", daemon=True)
    process.start()
    there.close()
    return _Rank(number, process, here)


def run(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout: float = PATIENCE
) -> list[Any]:
    """What ``function(rank, world, *arguments)`` returned on each rank of a new default process group, in rank order.

    This process is none of the ranks. However the call ends, an interrupt included, the ranks have ended too.

    Args:
        world: number of processes.
        function: picklable, so a function of a module or a ``functools.partial`` of one; what it returns too, and
            without tensors, whose memory would end with their process.
        arguments: picklable.
        backend: ``gloo``, or ``nccl`` with one GPU a rank.
        timeout: seconds until the ranks are ended; any one collective gives up after half of it and says where.

    Raises:
        GeomaskError: of the rank that failed first, as it was raised there.
        RankError: the first rank to fail raised something else, died, or did not finish in time.
    """
    group = _Group(world, backend, timeout / 2)
    with group.started(range(world), function, arguments) as (ranks, _):
        return _hear(ranks, timeout)


@contextlib.contextmanager
def beside(world: int, function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Make this process the first of ``world`` ranks; the others run ``function(rank, world, *arguments)`` meanwhile.

    The block and ``function`` must take part in the same collectives. An error on any rank ends all of them; the one
    that came first is raised here, once. An interrupt (Ctrl-C) reaches this process alone, so that it can still write
    what there is. However the block ends, the other processes end with it.

    Args:
        world: number of processes, at least two.
        function: picklable.
        arguments: picklable.

    Raises:
        GeomaskError: of another rank, as it was raised there.
        RankError: another rank raised something else, or died.
    """
    group = _Group(world, "gloo", PATIENCE)
    # Left in reverse: the others are ended before this process lets go of its connections, and none fails for that.
    with contextlib.ExitStack() as stack, group.started(range(1, world), function, arguments) as (others, store):
        try:
            group.join(0, store)
            stack.callback(dist.destroy_process_group)
            yield
            _hear(others, _START)
        except Exception as error:
            cause = _cause(error, others)
            if cause is error:
                raise
            raise cause from None


def _main(pipe: Any, rank: int) -> None:
    """A started process: take orders, say that they arrived, meet the others, work, answer, wait for the end."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        function, arguments = pipe.recv()
        pipe.send(None)
        group, store = pipe.recv()
        torch.set_num_threads(max(1, torch.get_num_threads() // group.world))
        group.join(rank, store)
        pipe.send(function(rank, group.world, *arguments))
        # Until all are done: a rank that leaves breaks the connections of those still at work.
        with contextlib.suppress(EOFError):
            pipe.recv()
    except BaseException as error:
        # Said before this process lets go of its connections and others fail for it.
        known = error if isinstance(error, GeomaskError) else RankError(f"rank {rank}:\n{traceback.format_exc()}")
        with contextlib.suppress(OSError):
            pipe.send(_Failure(time.monotonic(), known))


def end_with_parent() -> None:
    """End this process when its parent does, in a thread: one that was killed ends nobody."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tell(ranks: Sequence[_Rank], message: Any) -> None:
    for rank in ranks:
        # One that is gone is found out by whoever listens.
        with contextlib.suppress(BrokenPipeError):
            rank.pipe.send(message)


def _hear(ranks: Sequence[_Rank], seconds: float) -> list[Any]:
    """The next word of each rank. A failure is raised, the first of several."""
    words: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while silent := [rank for rank in ranks if rank.number not in words]:
        ready = connection.wait([rank.pipe for rank in silent], timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            names = ", ".join(str(rank.number) for rank in silent)
            raise RankError(f"rank {names} was not heard of for {seconds:.0f} seconds")
        words |= {rank.number: rank.word() for rank in silent if rank.pipe in ready}
        failures = [word for word in words.values() if isinstance(word, _Failure)]
        if failures:
            failures += _failures([rank for rank in ranks if rank.number not in words])
            raise _first(failures)
    return [words[rank.number] for rank in ranks]


def _failures(ranks: Sequence[_Rank]) -> list[_Failure]:
    """What else ended about now."""
    time.sleep(_GRACE / 20)
    return [word for rank in ranks if rank.pipe.poll() and isinstance(word := rank.word(), _Failure)]


def _first(failures: Sequence[_Failure]) -> GeomaskError:
    return min(failures, key=lambda failure: failure.at).error


def _cause(error: Exception, others: Sequence[_Rank]) -> Exception:
    """The error that came first, where ``error`` may be a collective that failed because another rank was gone."""
    if isinstance(error, GeomaskError) or not isinstance(error, RuntimeError):
        return error
    connection.wait([rank.pipe for rank in others], timeout=_GRACE)
    failures = _failures(others)
    return _first(failures) if failures else error


def _ending(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name
