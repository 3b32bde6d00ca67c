"""What crosses ranks, counted from a run: collectives and bytes a token or a microbatch, through each group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_geomask.bench import linear
from nemo_geomask.bench.clock import why
from nemo_geomask.bench.inputs import Case, Inputs
from nemo_geomask.bench.meters import Collective, Tally
from nemo_geomask.bench.paths import PATHS, Absent, Path, Setting, Unfit
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.processes import run
from nemo_geomask.segments import PackedSegments

__all__ = ["LAYOUT", "logprobs", "microbatch", "total", "uneven", "without_logits"]

_TP = 2
_CASE = Case(tokens=600, vocab=2048, tp=_TP)  # three chunks of NeMo-RL's
_LINEAR = linear.LinearCase(tokens=2048, hidden=64, vocab=2048, tp=_TP)
LAYOUT = {"tokens": 512, "sequences": 8, "vocab": 1000, "tp": 2, "cp": 2}
_LOSS = {
    "name": "gspo",
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}],
}


def uneven(tokens: int, sequences: int, cp: int) -> list[int]:
    """Offsets of sequences of different lengths, each a multiple of 2·``cp``, that fill ``tokens``."""
    draw = torch.Generator().manual_seed(0)
    unit = 2 * cp
    shares = 0.5 + torch.rand(sequences, dtype=torch.float32, generator=draw)
    ends = (shares.cumsum(0) / shares.sum() * (tokens // unit)).round().long() * unit
    return [0, *ends.tolist()]


def total(collectives: Sequence[Collective]) -> dict[str, Any]:
    """Calls, bytes handed in and bytes sent, and each collective with its payload."""
    return {
        "calls": len(collectives),
        "payload_bytes": sum(entry.payload for entry in collectives),
        "sent_bytes": sum(entry.sent for entry in collectives),
        "each": [[entry.kind, entry.payload] for entry in collectives],
    }


def logprobs(names: Sequence[str]) -> dict[str, Any]:
    """Collectives of the log-prob paths that run on a CPU, forward and backward, over two tensor-parallel ranks.

    Args:
        names: of the paths.
    """
    found: Mapping[str, Any] = run(_TP, _logprobs, list(names))[0]
    return {"tokens": _CASE.tokens, "tp": _TP, "paths": found}


def _logprobs(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    setting = Setting(torch.device("cpu"), group=dist.group.WORLD)
    sample = Inputs(_CASE, setting.device).take(0)

    def once(path: Path) -> None:
        start = path.open(_CASE, setting)
        start(sample._replace(logits=sample.logits.detach().clone().requires_grad_())).gradient(sample.g, None)

    return _counted({path.name: functools.partial(once, path) for path in PATHS if path.name in names}, _CASE.tokens)


def without_logits(names: Sequence[str]) -> dict[str, Any]:
    """The same of paths from hidden states, of :data:`nemo_geomask.bench.linear.PATHS`.

    Their hidden states are whole on each rank, so that the gradient of these crosses ranks; a path that leaves that to
    its caller has fewer bytes here, and the model's own layers move the rest.
    """
    found: Mapping[str, Any] = run(_TP, _without_logits, list(names))[0]
    return {"tokens": _LINEAR.tokens, "hidden": _LINEAR.hidden, "tp": _TP, "paths": found}


def _without_logits(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    setting = Setting(torch.device("cpu"), group=dist.group.WORLD)
    sample = linear.draw(_LINEAR, setting.device, 0)

    def once(path: Callable[..., Any]) -> None:
        linear.gradients(path(sample, _LINEAR, setting), sample)

    alone = ("torch", "verl FusedLinear")  # know of no other rank
    paths = {name: path for name, path in linear.PATHS.items() if name in names and not name.startswith(alone)}
    return _counted({name: functools.partial(once, path) for name, path in paths.items()}, _LINEAR.tokens)


def _counted(paths: Mapping[str, Callable[[], None]], tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, once in paths.items():
        try:
            with Tally() as tally:
                once()
        except (Absent, Unfit):
            continue
        except Exception as error:  # a peer's error is a result
            result[name] = {"error": why(error)}
            continue
        counted = total(tally.collectives)
        result[name] = {**counted, "payload_bytes_per_token": counted["payload_bytes"] / tokens}
    return result


def microbatch() -> dict[str, Any]:
    """Bytes through each process group in one microbatch: logits, log-probs, GSPO, backward, on TP × CP ranks."""
    return {**LAYOUT, "loss": _LOSS, "groups": run(LAYOUT["tp"] * LAYOUT["cp"], _microbatch)[0]}


def _microbatch(rank: int, world: int) -> dict[str, Any]:
    from nemo_geomask.losses import build_loss

    tp, cp, sequences = LAYOUT["tp"], LAYOUT["cp"], LAYOUT["sequences"]
    by_tp: list[Any] = [dist.new_group(list(range(c * tp, (c + 1) * tp))) for c in range(cp)]
    by_cp: list[Any] = [dist.new_group(list(range(t, tp * cp, tp))) for t in range(tp)]
    tp_rank, cp_rank = rank % tp, rank // tp
    tp_group, cp_group = by_tp[cp_rank], by_cp[tp_rank]
    offsets = uneven(LAYOUT["tokens"], sequences, cp)
    segments = PackedSegments(offsets, cp_rank=cp_rank, cp_size=cp, groups=(cp_group,))
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYOUT["tokens"], LAYOUT["vocab"], dtype=torch.float32, generator=draw)
    targets = torch.randint(0, LAYOUT["vocab"], (LAYOUT["tokens"],), generator=draw)
    index, width = segments.token_index, LAYOUT["vocab"] // tp
    shard = logits[index, tp_rank * width : (tp_rank + 1) * width].bfloat16().requires_grad_()
    loss_fn = build_loss(_LOSS)
    with Tally() as tally:
        found = vocab_parallel_logprobs(shard, targets[index], group=tp_group)
        near = dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"), found.detach())
        ones = torch.ones(len(index), dtype=torch.float32)
        data = {**near, "advantages": ones, "token_mask": ones, "sample_mask": ones[:sequences]}
        loss, _ = loss_fn.packed(found, data, segments, sequences, LAYOUT["tokens"])
        torch.autograd.grad(loss, shard)
    groups = {"tensor-parallel": tp_group.group_name, "context-parallel": cp_group.group_name}
    return {kind: total([entry for entry in tally.collectives if entry.group == name]) for kind, name in groups.items()}
