"""``bench segments``: pooling of sequence statistics over ranks, in one collective or in one for each statistic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.paths.path import Absent, import_peer
from nemo_geomask.tools.bench.resource_meters import DispatchCounter
from nemo_geomask.tools.bench.timing import Clock, Lap, interleave, quartiles
from nemo_geomask.tools.bench.traffic import count_microbatch_collectives, uneven_offsets

__all__ = ["benchmark"]

_MERGED = "one collective for all"
_SEPARATE = "one collective each"
_SCATTERED = "index_add and all-reduce, each"
_TIMEOUT = 7200.0  # seconds, enough for any --repeats


def benchmark(device: torch.device, *, tokens: int, sequences: int, repeats: int, world: int = 2) -> dict[str, Any]:
    """Measure the pooling of three statistics of sharded sequences, and count a microbatch's collectives.

    Args:
        device: if it is a GPU and there is one for each rank, the ranks run on GPUs; otherwise on the CPU with gloo.
        tokens: length of the packed row.
        sequences: number of its sequences.
        repeats: measured rounds.
        world: number of ranks over which the sequences are sharded.
    """
    nccl = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= world
    backend = "nccl" if nccl else "gloo"
    pooling = run_ranks(
        world, _measure_pooling, tokens, sequences, repeats, backend, backend=backend, timeout=_TIMEOUT
    )[0]
    result = {"world": world, "backend": backend, "tokens": tokens, "sequences": sequences, **pooling}
    try:
        import_peer("pydantic")
        result["microbatch"] = count_microbatch_collectives()
    except Absent as reason:
        result["microbatch"] = {"status": "absent", "reason": str(reason)}
    return result


def _measure_pooling(rank: int, world: int, tokens: int, sequences: int, repeats: int, backend: str) -> dict[str, Any]:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    offsets = uneven_offsets(tokens, sequences, world)
    group = dist.group.WORLD
    assert group is not None
    segments = PackedSegments(offsets, device=device, cp_rank=rank, cp_size=world, groups=(group,))
    count = segments.tokens
    values = {
        name: torch.randn(count, dtype=torch.float32, device=device) for name in ("log_ratio", "advantage", "tokens")
    }
    lengths = torch.tensor(offsets).diff() // world
    ids = torch.repeat_interleave(torch.arange(sequences), lengths).to(device)

    def scattered() -> list[Tensor]:
        totals = []
        for value in values.values():
            total = value.new_zeros(sequences).index_add_(0, ids, value)
            dist.all_reduce(total)
            totals.append(total)
        return totals

    ways: dict[str, Callable[[], list[Tensor]]] = {
        _MERGED: lambda: list(segments.pool(values).sums.values()),
        _SEPARATE: lambda: [segments.sum(value) for value in values.values()],
        _SCATTERED: scattered,
    }
    clock = Clock(device)

    def timed(way: Callable[[], list[Tensor]]) -> Callable[[int], Lap]:
        def once(turn: int) -> Lap:
            dist.barrier()
            return clock.lap(way)

        return once

    laps, failures = interleave({name: timed(way) for name, way in ways.items()}, repeats, warmup=3)
    rows: list[dict[str, Any]] = []
    expected = scattered()
    for name, way in ways.items():
        if name in failures:
            rows.append({"way": name, "status": "failed", "reason": failures[name]})
            continue
        with DispatchCounter() as counter:
            totals = way()
        error = max(float((mine - other).abs().max()) for mine, other in zip(totals, expected, strict=True))
        sent = sum(entry.sent for entry in counter.collectives)
        rows.append(
            {
                "way": name,
                "status": "measured",
                "ms": quartiles([lap.total * 1e3 for lap in laps[name]]),
                "collectives": len(counter.collectives),
                "sent_bytes": sent,
                "difference": error,
            }
        )
    return {"ways": rows}
