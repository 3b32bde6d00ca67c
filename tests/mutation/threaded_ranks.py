"""Plugin of pytest with which ranks are threads of the test's process, so that mutation testing reaches their code.

mutmut sees what a test executes in its own process only, and starting processes would take seconds for each change. The
collectives are those of torch's own tests: they exchange tensors between threads. That ranks which are processes agree
over gloo is for the test suite; here the same tests judge the arithmetic.

Of the tests marked slow, those take part whose names begin with an entry of ``MUTATION_SLOW_TESTS``.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.mutation.score import SLOW_TESTS

_SECONDS = 120.0


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", timeout: float = _SECONDS
) -> list[Any]:
    """Run a function on each rank, as :func:`nemo_geomask.parallel.local_processes.run_ranks`, in a thread of its own.

    Raises: the error of the first rank to fail, or RuntimeError if a rank does not end.
    """
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    _install_threaded_pg()
    store = dist.HashStore()
    task = pickle.dumps((function, arguments))  # each rank has objects of its own, as a process has
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            call, values = pickle.loads(task)
            results[rank] = call(rank, world, *values)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(min(timeout, _SECONDS))
    finally:
        _uninstall_threaded_pg()
        isolate(False)
        ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    if len(results) < world:
        raise RuntimeError(f"ranks {sorted(set(range(world)) - set(results))} have not ended")
    return [results[rank] for rank in range(world)]


def pytest_configure(config: Any) -> None:
    """Replace the function before the tests import it."""
    from nemo_geomask.parallel import local_processes

    local_processes.run_ranks = run_ranks


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out the slow tests that are not named."""
    named = tuple(filter(None, os.environ.get(SLOW_TESTS, "").split(",")))
    kept = [item for item in items if not item.get_closest_marker("slow") or item.name.startswith(named)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
