"""Counts of a run's collectives, and of their bytes for each token, or for a microbatch in each process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.linear_cases import LinearCase, draw, gradients
from nemo_geomask.tools.bench.logprob_cases import LogprobCase, RandomInputs
from nemo_geomask.tools.bench.paths import PATHS, Absent, LogprobPath, NotApplicable, Setting, linear_paths
from nemo_geomask.tools.bench.resource_meters import Collective, DispatchCounter
from nemo_geomask.tools.bench.timing import describe_error

__all__ = [
    "LAYOUT",
    "count_linear_collectives",
    "count_logprob_collectives",
    "count_microbatch_collectives",
    "sum_collectives",
    "uneven_offsets",
]

_TP = 2
_CASE = LogprobCase(tokens=600, vocab=2048, tp=_TP)  # three of NeMo-RL's chunks of 256 rows
_LINEAR = LinearCase(tokens=2048, hidden=64, vocab=2048, tp=_TP)
LAYOUT = {"tokens": 512, "sequences": 8, "vocab": 1000, "tp": 2, "cp": 2}
_LOSS = {
    "name": "gspo",
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}],
}


def uneven_offsets(tokens: int, sequences: int, cp: int) -> list[int]:
    """Return the offsets of sequences with different lengths, multiples of 2·``cp``, that together fill ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    unit = 2 * cp
    shares = 0.5 + torch.rand(sequences, dtype=torch.float32, generator=generator)
    ends = (shares.cumsum(0) / shares.sum() * (tokens // unit)).round().long() * unit
    return [0, *ends.tolist()]


def sum_collectives(collectives: Sequence[Collective]) -> dict[str, Any]:
    """Return the number of calls, the bytes contributed, the bytes sent, and each collective with its payload."""
    return {
        "calls": len(collectives),
        "payload_bytes": sum(entry.payload for entry in collectives),
        "sent_bytes": sum(entry.sent for entry in collectives),
        "each": [[entry.operation, entry.payload] for entry in collectives],
    }


def count_logprob_collectives(names: Sequence[str]) -> dict[str, Any]:
    """Count the collectives of log-prob paths, forward and backward, over two tensor-parallel ranks on a CPU.

    Args:
        names: names of the paths; those that do not run on a CPU are left out.
    """
    counts: Mapping[str, Any] = run_ranks(_TP, _count_with_logits, list(names))[0]
    return {"tokens": _CASE.tokens, "tp": _TP, "paths": counts}


def _count_with_logits(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    setting = Setting(torch.device("cpu"), group=dist.group.WORLD)
    sample = RandomInputs(_CASE, setting.device).take(0)

    def run_once(path: LogprobPath) -> None:
        forward = path.prepare(_CASE, setting)
        forward(sample._replace(logits=sample.logits.detach().clone().requires_grad_())).gradient(sample.g, None)

    return _count_collectives(
        {path.name: functools.partial(run_once, path) for path in PATHS if path.name in names}, _CASE.tokens
    )


def count_linear_collectives(names: Sequence[str]) -> dict[str, Any]:
    """Count the collectives of paths from hidden states, :mod:`nemo_geomask.tools.bench.paths.linear_paths`.

    Each rank has all hidden states, so their gradient has to be summed over ranks. A path that leaves this sum to its
    caller has fewer bytes here, but the model's layers then send the rest.
    """
    counts: Mapping[str, Any] = run_ranks(_TP, _count_without_logits, list(names))[0]
    return {"tokens": _LINEAR.tokens, "hidden": _LINEAR.hidden, "tp": _TP, "paths": counts}


def _count_without_logits(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    setting = Setting(torch.device("cpu"), group=dist.group.WORLD)
    sample = draw(_LINEAR, setting.device, 0)

    def run_once(path: Callable[..., Any]) -> None:
        gradients(path(sample, _LINEAR, setting), sample)

    single_rank = ("torch", "verl FusedLinear")  # prefixes of paths without tensor parallelism
    paths = {
        name: path for name, path in linear_paths.PATHS.items() if name in names and not name.startswith(single_rank)
    }
    return _count_collectives({name: functools.partial(run_once, path) for name, path in paths.items()}, _LINEAR.tokens)


def _count_collectives(runs: Mapping[str, Callable[[], None]], tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, run_once in runs.items():
        try:
            with DispatchCounter() as counter:
                run_once()
        except (Absent, NotApplicable):
            continue
        except Exception as error:  # a failing peer is reported
            result[name] = {"error": describe_error(error)}
            continue
        totals = sum_collectives(counter.collectives)
        result[name] = {**totals, "payload_bytes_per_token": totals["payload_bytes"] / tokens}
    return result


def count_microbatch_collectives() -> dict[str, Any]:
    """Count the bytes of each process group in one microbatch of GSPO from logits, with its backward pass."""
    return {**LAYOUT, "loss": _LOSS, "groups": run_ranks(LAYOUT["tp"] * LAYOUT["cp"], _count_of_microbatch)[0]}


def _count_of_microbatch(rank: int, world: int) -> dict[str, Any]:
    from nemo_geomask.losses import build_loss

    tp, cp, sequences = LAYOUT["tp"], LAYOUT["cp"], LAYOUT["sequences"]
    by_tp: list[Any] = [dist.new_group(list(range(c * tp, (c + 1) * tp))) for c in range(cp)]
    by_cp: list[Any] = [dist.new_group(list(range(t, tp * cp, tp))) for t in range(tp)]
    tp_rank, cp_rank = rank % tp, rank // tp
    tp_group, cp_group = by_tp[cp_rank], by_cp[tp_rank]
    offsets = uneven_offsets(LAYOUT["tokens"], sequences, cp)
    segments = PackedSegments(offsets, cp_rank=cp_rank, cp_size=cp, groups=(cp_group,))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYOUT["tokens"], LAYOUT["vocab"], dtype=torch.float32, generator=generator)
    targets = torch.randint(0, LAYOUT["vocab"], (LAYOUT["tokens"],), generator=generator)
    index, width = segments.token_index, LAYOUT["vocab"] // tp
    shard = logits[index, tp_rank * width : (tp_rank + 1) * width].bfloat16().requires_grad_()
    loss_fn = build_loss(_LOSS)
    with DispatchCounter() as counter:
        logprobs = vocab_parallel_logprobs(shard, targets[index], group=tp_group)
        detached = dict.fromkeys((PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_POLICY_LOGPROBS), logprobs.detach())
        mask = torch.ones(len(index), dtype=torch.float32)
        data = {**detached, "advantages": mask, TOKEN_MASK: mask, "sample_mask": mask[:sequences]}
        loss, _ = loss_fn.packed(logprobs, data, segments, sequences, LAYOUT["tokens"])
        torch.autograd.grad(loss, shard)
    groups = {"tensor-parallel": tp_group.group_name, "context-parallel": cp_group.group_name}
    return {
        label: sum_collectives([entry for entry in counter.collectives if entry.group == name])
        for label, name in groups.items()
    }
