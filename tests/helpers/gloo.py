"""Real processes over gloo: run a function on every rank and bring the results, or the error, back."""

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist


def _main(rank, world, path, function, arguments, results, patience):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=patience)
        )
        results.put((rank, True, function(rank, world, *arguments)))
        if patience == PATIENCE:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


PATIENCE = 60.0  # seconds until a collective gives up


def run(world, function, *arguments, timeout=120.0, patience=PATIENCE, awaited=None):
    """What ``function(rank, world, *arguments)`` returned on each rank, in rank order.

    ``function`` and ``arguments`` must be picklable, the results plain or NumPy data. An error on any rank is raised
    here with its traceback; ranks that don't finish in time are killed and named. Where ranks are lost on purpose,
    ``awaited`` are those whose results come back, and ``patience`` is the process group's timeout in seconds.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        processes = [
            context.Process(target=_main, args=(rank, world, path, function, arguments, results, patience), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found, deadline = {}, time.monotonic() + timeout
        awaited = set(range(world)) if awaited is None else set(awaited)
        try:
            while set(found) != awaited:
                try:
                    rank, fine, value = results.get(timeout=max(deadline - time.monotonic(), 0.01))
                except queue.Empty:
                    missing = sorted(awaited - set(found))
                    raise TimeoutError(f"ranks {missing} of {world} did not finish in {timeout} s") from None
                if not fine:
                    raise RuntimeError(f"rank {rank} of {world}:\n{value}")
                found[rank] = value
        finally:
            for process in processes:
                process.join(timeout=5 if len(found) == world else 0)
                if process.is_alive():
                    process.kill()
    return [found[rank] for rank in sorted(awaited)]
