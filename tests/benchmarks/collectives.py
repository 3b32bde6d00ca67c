"""Collectives of a run and their bytes, and ``segments``: pooling of sequence statistics over ranks."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.logprob_paths import LogprobCase, draw, gradients
from nemo_geomask.tools.bench.meters import one_thread
from nemo_geomask.tools.bench.peers import Absent, Setting
from nemo_geomask.tools.bench.results import Column, Row, figure, format_rows
from nemo_geomask.tools.bench.timing import Clock, Lap, compare, describe_error

_TP = 2
_LOGITS = (600, 0, 2048, _TP)  # three of NeMo-RL's chunks of 256 rows
_LINEAR = LogprobCase(tokens=2048, hidden=64, vocab=2048, tp=_TP)
_POOLED = {"tokens": 65_536, "sequences": 32}
_TIMEOUT = 7200.0  # seconds, enough for any number of rounds

# Collectives by their name in the dispatcher: the name in the results, the position of the argument that holds this
# rank's data, and how many times that data is sent by a rank in a ring of n ranks.
_COLLECTIVES: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "allreduce_": ("all-reduce", 0, lambda n: 2 * (n - 1) / n),
    "allgather_": ("all-gather", 1, lambda n: n - 1),
    "_allgather_base_": ("all-gather", 1, lambda n: n - 1),
}
COLLECTIVE_COLUMNS: tuple[Column, ...] = (
    ("path", lambda row: row["path"]),
    figure("collectives", "calls", form="{}"),
    figure("bytes a token", "payload_bytes_per_token"),
)
POOLING_COLUMNS: tuple[Column, ...] = (
    ("way", lambda row: row["way"]),
    figure("ms", "ms", "median"),
    figure("collectives", "collectives", form="{}"),
    figure("bytes sent a rank", "sent_bytes"),
)


class CollectiveCounter(TorchDispatchMode):
    """List the collectives of this thread, backward passes included: name, bytes contributed, bytes sent in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            # The bytes that a collective sends are unknown if it is not listed.
            operation, position, times = _COLLECTIVES.get(name, (name, 0, lambda n: math.nan))
            (group,) = (group for value in args if (group := _process_group(value)) is not None)
            payload = sum(value.nbytes for value in tree_leaves(args[position]) if isinstance(value, Tensor))
            self.collectives.append((operation, payload, times(group.size()) * payload))
        return func(*args, **(kwargs or {}))


def _process_group(value: Any) -> Any:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return torch._C._distributed_c10d.ProcessGroup.unbox(value)
    except RuntimeError:  # another object, such as the reduction
        return None


def _count(run: Callable[[], object]) -> dict[str, Any]:
    """Return the number and the bytes of a run's collectives."""
    with one_thread(), CollectiveCounter() as counter:
        run()
    return {
        "calls": len(counter.collectives),
        "payload_bytes": sum(payload for _, payload, _ in counter.collectives),
        "sent_bytes": sum(sent for *_, sent in counter.collectives),
        "each": [[operation, payload] for operation, payload, _ in counter.collectives],
    }


def uneven_offsets(tokens: int, sequences: int, cp: int) -> list[int]:
    """Return the offsets of sequences with different lengths, multiples of 2·``cp``, that together fill ``tokens``."""
    shares = 0.5 + torch.rand(sequences, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    ends = (shares.cumsum(0) / shares.sum() * (tokens // (2 * cp))).round().long() * 2 * cp
    return [0, *ends.tolist()]


def count_path_collectives(kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Count the collectives of paths, forward and backward, over two tensor-parallel ranks on a CPU.

    Each rank has all hidden states, so their gradient is to be summed over ranks. A path of ``linear`` that leaves this
    sum to its caller has fewer bytes here, but the model's layers then send the rest.

    Args:
        kind: ``logprobs``, for paths from logits, or ``linear``, for those from hidden states.
        names: names of the paths; those that do not run on a CPU are left out.
    """
    sizes = {"tokens": _LOGITS[0]} if kind == "logprobs" else {"tokens": _LINEAR.tokens, "hidden": _LINEAR.hidden}
    return {**sizes, "tp": _TP, "paths": run_ranks(_TP, _count_paths, kind, list(names))[0]}


def _count_paths(rank: int, world: int, kind: str, names: Sequence[str]) -> dict[str, Any]:
    from tests.benchmarks import linear, logits

    setting = Setting(torch.device("cpu"), group=dist.group.WORLD)
    logit_case = logits.LogitCase(*_LOGITS)
    inputs, hidden_sample = logits.Inputs(logit_case, setting.device), draw(_LINEAR, setting.device, 0)

    def run_once(name: str) -> None:
        if kind == "linear":
            gradients(linear.PATHS[name](hidden_sample, _LINEAR, setting), hidden_sample)
        else:
            sample = inputs.take(0, copy=True)
            logits.PATHS[name].run(sample, logit_case, setting).gradient(sample)

    result: dict[str, Any] = {}
    for name in names:
        try:
            totals = _count(functools.partial(run_once, name))
        except Absent:
            continue
        except Exception as error:  # a failing peer is reported
            result[name] = {"error": describe_error(error)}
            continue
        tokens = (_LINEAR if kind == "linear" else logit_case).tokens
        result[name] = {**totals, "payload_bytes_per_token": totals["payload_bytes"] / tokens}
    return result


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Measure the pooling of three statistics of sharded sequences over two ranks, on GPUs if there is one for each."""
    world = 2
    nccl = setting.device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= world
    backend = "nccl" if nccl else "gloo"
    ways = run_ranks(world, _measure_pooling, options.repeats, backend, backend=backend, timeout=_TIMEOUT)[0]
    title = "3 statistics of {sequences} sequences, {tokens} tokens".format(**_POOLED)
    print(format_rows(f"{title} over {world} ranks ({backend})", POOLING_COLUMNS, ways))
    return {"world": world, "backend": backend, **_POOLED, "ways": ways}


def _measure_pooling(rank: int, world: int, repeats: int, backend: str) -> list[Row]:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    sequences, offsets = _POOLED["sequences"], uneven_offsets(_POOLED["tokens"], _POOLED["sequences"], world)
    segments = PackedSegments(offsets, device=device, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    shape = {"dtype": torch.float32, "device": device}
    values = {name: torch.randn(segments.tokens, **shape) for name in ("log_ratio", "advantage", "tokens")}
    lengths = torch.tensor(offsets).diff() // world
    ids = torch.repeat_interleave(torch.arange(sequences), lengths).to(device)

    def scattered() -> list[Tensor]:
        totals = [value.new_zeros(sequences).index_add_(0, ids, value) for value in values.values()]
        for total in totals:
            dist.all_reduce(total)
        return totals

    ways: dict[str, Callable[[], list[Tensor]]] = {
        "one collective for all": lambda: list(segments.pool(values).sums.values()),
        "one collective each": lambda: [segments.sum(value) for value in values.values()],
        "index_add and all-reduce, each": scattered,
    }
    clock = Clock(device)

    def timed(way: Callable[[], list[Tensor]], turn: int) -> Lap:
        dist.barrier()
        return clock.lap(way)

    rows = compare({name: functools.partial(timed, way) for name, way in ways.items()}, repeats, warmup=3)
    expected = scattered()
    for name, row in rows.items():
        totals = _count(ways[name])
        row |= {"collectives": totals["calls"], "sent_bytes": totals["sent_bytes"]}
        pairs = zip(ways[name](), expected, strict=True)
        row["difference"] = max(float((mine - other).abs().max()) for mine, other in pairs)
    return [{"way": name, **row} for name, row in rows.items()]
