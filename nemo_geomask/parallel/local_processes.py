"""Run a function on all ranks of a process group whose ranks are processes on this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, parent_process, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from nemo_geomask.errors import GeomaskError, LostRankError

COLLECTIVE_TIMEOUT = 600.0
"""Seconds after which a collective fails. This limit is for ranks that hang; one that dies is noticed at once."""
_START_SECONDS = 300.0  # for the imports of all processes, and for the other ranks to finish after rank 0
_GRACE_SECONDS = 5.0  # after the first rank has failed, for the one that made it fail to end or to write its error


class RankError(GeomaskError, RuntimeError):
    """A rank died, hung, or raised an error that is no :class:`GeomaskError`; the message has its traceback."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    timeout: float = COLLECTIVE_TIMEOUT,
) -> list[Any]:
    """Run ``function(rank, world, *arguments)`` on each rank of a new default process group.

    The calling process is not one of the ranks. When the call ends, even by an interrupt, all ranks have ended.

    Args:
        world: number of processes.
        function: picklable, such as a module-level function or a ``functools.partial`` of one; returns something
            picklable.
        arguments: picklable.
        backend: ``gloo``, or ``nccl`` with one GPU a rank.
        timeout: seconds that the ranks have after their imports. A collective fails after half of this time, with an
            error that shows where it was called.

    Returns: what the function returned on each rank, in rank order.

    Raises:
        GeomaskError: the first rank to fail raised it.
        RankError: the first rank to fail raised another error, died, or did not finish in time.
    """
    with _start(range(world), world, backend, timeout / 2, (function, arguments)) as ranks:
        if not ranks.join(timeout):
            late = [str(rank) for rank in ranks.numbers if not (ranks.folder / f"{rank}.result").exists()]
            raise RankError(f"rank {', '.join(late)} did not finish within {timeout:.0f} seconds")
        return [pickle.loads((ranks.folder / f"{rank}.result").read_bytes()) for rank in ranks.numbers]


@contextlib.contextmanager
def lead_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Make this process rank 0 of ``world``; the others run ``function(rank, world, *arguments)`` meanwhile.

    The ``with`` block and ``function`` must take part in the same collectives. An error on any rank ends all ranks; the
    first error is raised here. An interrupt (Ctrl-C) reaches this process alone, so that it can still write its partial
    results. When the block ends, for whatever reason, the other processes are ended too.

    Raises:
        GeomaskError: another rank raised it.
        RankError: another rank raised an error that is no GeomaskError, or died.
    """
    try:
        with _start(range(1, world), world, "gloo", COLLECTIVE_TIMEOUT, (function, arguments)) as ranks:
            try:
                _join_group(0, world, "gloo", COLLECTIVE_TIMEOUT, ranks.folder)
                yield
                (ranks.folder / "0.result").touch()
                if not ranks.join(_START_SECONDS):
                    raise RankError(f"the other ranks have not finished {_START_SECONDS:.0f} seconds after rank 0")
            except RuntimeError as error:
                # This is most often a collective that failed because another rank failed. Then ``join`` raises the
                # other rank's error.
                if not isinstance(error, GeomaskError) or isinstance(error, LostRankError):
                    ranks.join(_GRACE_SECONDS)
                raise
    finally:
        # Only after the other processes have ended, since losing the connections would make them fail.
        if dist.is_initialized():
            dist.destroy_process_group()


class _StartedRanks(NamedTuple):
    """Started processes, and the folder with their files.

    The files are ``task``, the pickled function and arguments; ``RANK.started``, once a rank has done its imports;
    ``RANK.result``, what the function returned there; ``RANK.error``, the exception of a rank that failed; and
    ``error``, a link to that of the first rank to fail.
    """

    numbers: range
    folder: Path
    processes: ProcessContext

    def join(self, seconds: float) -> bool:
        """Return True once all ranks have succeeded, False after ``seconds``; raise the error that came first."""
        deadline = time.monotonic() + seconds
        processes = self.processes.processes
        while True:
            running = [process.sentinel for process in processes if process.is_alive()]
            if any(process.exitcode for process in processes):
                break
            if not running:
                return True
            if time.monotonic() >= deadline:
                return False
            connection.wait(running, max(deadline - time.monotonic(), 0.0))
        # The end of a process that was killed is often reported after that of a rank that failed because of it.
        grace = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            process.join(max(grace - time.monotonic(), 0.0))
        ended = {index for index, process in enumerate(processes) if not process.is_alive()}
        try:
            # Repeated, because the end of a process whose exit code has been read is reported a moment later.
            while not self.processes.join(_GRACE_SECONDS):
                pass
        except ProcessException as failure:
            raise self._first_error(failure.error_index, ended) from None
        return True

    def _first_error(self, failed: int, ended: set[int]) -> GeomaskError:
        """Return the error that came first.

        ``ProcessContext.join`` has reported one failed process and ended the others, by SIGTERM, and by SIGKILL those
        that are stopped. A rank that raised has exit code 1. Any other code is that of a rank that was ended from
        outside. In that case the other ranks raised only because that one was gone.

        Args:
            failed: index of the process that ``ProcessContext.join`` reported.
            ended: indices of the processes that had ended by themselves before.
        """
        for index, process in enumerate(self.processes.processes):
            code = process.exitcode
            if code not in (0, 1) and (index == failed or (index in ended and code != -signal.SIGTERM)):
                ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return RankError(f"rank {self.numbers[index]} was ended from outside ({ending})")
        error: GeomaskError = pickle.loads((self.folder / "error").read_bytes())
        return error


@contextlib.contextmanager
def _start(ranks: range, world: int, backend: str, collective_timeout: float, task: Any) -> Iterator[_StartedRanks]:
    """Start processes for these ranks and wait for their imports; end the processes when the ``with`` block ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps(task))
        # A terminal sends Ctrl-C to all processes, but only this one shall handle it. The signal is therefore blocked
        # while the server starts that forks the ranks, which inherit that. The resource tracker is started before,
        # because its start would unblock the signal.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            arguments = (ranks, world, backend, collective_timeout, folder)
            processes = start_processes(  # type: ignore[no-untyped-call]
                _run_rank, arguments, len(ranks), join=False, daemon=True, start_method="forkserver"
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        started = _StartedRanks(ranks, folder, processes)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while len(list(folder.glob("*.started"))) < len(ranks) and not started.join(0.05):
                if time.monotonic() > deadline:
                    raise RankError(f"the ranks have not started within {_START_SECONDS:.0f} seconds")
            yield started
        finally:
            for process in processes.processes:
                process.kill()
                process.join()


def _run_rank(index: int, ranks: range, world: int, backend: str, collective_timeout: float, folder: Path) -> None:
    """Run the task as one of the started processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not inherited if the server was started elsewhere
    threading.Thread(target=end_with_parent, daemon=True).start()
    rank = ranks[index]
    try:
        function, arguments = pickle.loads((folder / "task").read_bytes())
        (folder / f"{rank}.started").touch()
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
        _join_group(rank, world, backend, collective_timeout, folder)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(rank, world, *arguments)))
        # A rank that exits breaks the connections of the ranks that are still at work, so it waits for all of them.
        while len(list(folder.glob("*.result"))) < world:
            time.sleep(0.01)
        dist.destroy_process_group()
        exit_code = 0
    except BaseException as error:
        # Until this process exits its connections stay open, so ranks that fail because it is gone fail later. The
        # first rank to fail thus creates the link. Creating a link is atomic, even if this process is ended meanwhile.
        raised = error if isinstance(error, GeomaskError) else RankError(f"rank {rank}:\n{traceback.format_exc()}")
        (folder / f"{rank}.error").write_bytes(pickle.dumps(raised))
        with contextlib.suppress(FileExistsError):
            (folder / "error").symlink_to(folder / f"{rank}.error")
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of the backend may still be running, and can abort an interpreter that shuts down.
    os._exit(exit_code)


def _join_group(rank: int, world: int, backend: str, collective_timeout: float, folder: Path) -> None:
    """Make this process a rank of the default process group, whose ranks meet by a file in ``folder``."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # Gloo would otherwise use the address of the host's name, which some machines can't resolve or reach.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=collective_timeout)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timeout)


def end_with_parent() -> None:
    """Wait until the parent process ends, for whatever reason, then end this process; run it in a daemon thread."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
