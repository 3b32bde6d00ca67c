"""Several processes on this machine, over gloo: started together, ended together, and one error for all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from nemo_geomask.errors import GeomaskError
from nemo_geomask.lab.ranks import Ranks

__all__ = ["RankError", "company"]

# Until a collective gives up. A process that dies is noticed at once; this is for one that hangs.
_PATIENCE = timedelta(minutes=10)
# Seconds until a process has started, or has reported its end after the others reached theirs.
_START = 300.0
# Seconds in which a process that made a collective fail here says why.
_GRACE = 5.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


class RankError(GeomaskError, RuntimeError):
    """A process of a run died, or met an error that is no :class:`GeomaskError`; the message holds its traceback."""


@dataclass(frozen=True)
class _Failure:
    """What ended a process, and when."""

    at: float
    error: GeomaskError


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Any

    def report(self, seconds: float) -> _Failure | None:
        """The process's next word: None where all is well."""
        if not self.pipe.poll(seconds):
            return _Failure(time.monotonic(), RankError(f"rank {self.rank} was not heard of for {seconds:.0f} seconds"))
        try:
            word: _Failure | None = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE)
            # It said nothing, so what others saw of its end can only have come later.
            return _Failure(0.0, RankError(f"rank {self.rank} was ended from outside ({_ending(self.process)})"))
        return word

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def company(work: Callable[[Ranks], None], *, tp: int, cp: int, dp: int) -> Iterator[Ranks]:
    """Make this process the first of tp·cp·dp ranks; the others run ``work`` beside the block.

    The block and ``work`` must take part in the same collectives. An error on any rank ends all of them; the one that
    came first is raised here, once. An interrupt (Ctrl-C) reaches this process alone, so that it can still write what
    there is. However the block ends, the other processes end with it.

    Args:
        work: picklable, so a function of a module or a ``functools.partial`` of one.
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.

    Yields:
        This process's places.

    Raises:
        GeomaskError: of another rank, as it was raised there.
        RankError: another rank died, or raised something else.
    """
    if tp * cp * dp == 1:
        yield Ranks()
        return
    sizes = {"tp": tp, "cp": cp, "dp": dp}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = os.path.join(folder, "store")
        workers = _start(tp * cp * dp)
        try:
            for worker in workers:
                with contextlib.suppress(BrokenPipeError):
                    worker.pipe.send((worker.rank, sizes, store, work))
            _await(workers)
            ranks = _join(0, sizes, store)
            stack.callback(dist.destroy_process_group)
            yield ranks
            _await(workers)
        except Exception as error:
            cause = _cause(error, workers)
            if cause is error:
                raise
            raise cause from None
        finally:
            for worker in workers:
                worker.stop()


def _start(world: int) -> list[_Worker]:
    context = get_context("spawn")
    workers = []
    # Starting its helper, multiprocessing would unblock what is blocked below.
    resource_tracker.ensure_running()
    # Children inherit what is blocked: Ctrl-C, which the terminal sends to all, is for the first rank to handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(1, world):
            here, there = context.Pipe()
            process = context.Process(target=_main, args=(there,), name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            workers.append(_Worker(rank, process, here))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return workers


def _main(pipe: Any) -> None:
    """One of the other ranks: take orders, say that they arrived, work, say that it is done, wait for the end."""
    rank = None
    try:
        rank, sizes, store, work = pipe.recv()
        pipe.send(None)
        work(_join(rank, sizes, store))
        pipe.send(None)
        # Until the first rank is done too: a rank that leaves breaks the connections of those still at work.
        with contextlib.suppress(EOFError):
            pipe.recv()
    except Exception as error:
        # Said before this process lets go of its connections and others fail for it.
        known = error if isinstance(error, GeomaskError) else RankError(f"rank {rank}:\n{traceback.format_exc()}")
        with contextlib.suppress(OSError):
            pipe.send(_Failure(time.monotonic(), known))


def _join(rank: int, sizes: dict[str, int], store: str) -> Ranks:
    world = sizes["tp"] * sizes["cp"] * sizes["dp"]
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    chosen = loopback is not None and _INTERFACE not in os.environ
    if chosen:
        os.environ[_INTERFACE] = str(loopback)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_PATIENCE)
        return Ranks.of(**sizes, timeout=_PATIENCE)
    finally:
        if chosen:
            del os.environ[_INTERFACE]


def _await(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        failure = worker.report(_START)
        if failure is not None:
            raise failure.error


def _cause(error: Exception, workers: Sequence[_Worker]) -> Exception:
    """The error that came first, where ``error`` may be a collective that failed because another rank was gone."""
    if isinstance(error, GeomaskError) or not isinstance(error, RuntimeError):
        return error
    if connection.wait([worker.pipe for worker in workers], timeout=_GRACE):
        # Time for the others to arrive, so that the first of them can be told.
        time.sleep(_GRACE / 20)
    failures = [failure for worker in workers if worker.pipe.poll() and (failure := worker.report(0)) is not None]
    return min(failures, key=lambda failure: failure.at).error if failures else error


def _ending(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name
