"""A function on several processes of one group."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from nemo_geomask.errors import GeomaskError

__all__ = ["run"]

_PATIENCE = timedelta(seconds=120)


def run(world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """What ``function(*arguments)`` returned on each rank of a new default process group, in rank order.

    Args:
        world: processes.
        function: at the top level of a module; its result must fit into JSON.
        arguments: picklable.
        backend: ``gloo``, or ``nccl`` with one GPU a rank.

    Raises:
        GeomaskError: a rank failed; the message carries its traceback.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            spawn(_main, (world, folder, backend, function, arguments), nprocs=world)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise GeomaskError(f"a rank of {world} failed: {error}") from error
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _main(
    rank: int, world: int, folder: str, backend: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_PATIENCE
    )
    found = function(*arguments)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
