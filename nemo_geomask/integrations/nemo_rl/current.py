"""``curr`` and entropies of a recorded step: kept in the workers, whose loss sees them, until the driver asks.

A row is known by what it holds, since NeMo-RL shards, packs and reorders a batch, and its data plane takes no column
of ours. Rows of the very same tokens are one to this.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.losses import PolicyLoss
from nemo_geomask.records.flight import KEYS

__all__ = ["ENTROPY", "KeepingLoss", "Kept", "ask", "handed_over", "joined", "keeping", "mark", "marks"]

_log = logging.getLogger("nemo_geomask")
MARK = "geomask_mark"
ENTROPY = "geomask_entropy"
_NAMES = {"curr": KEYS["curr"], "entropy": KEYS["entropy"]}
_kept: dict[int, list[_Microbatch]] = {}  # of one step


class _Microbatch(NamedTuple):
    marks: Tensor  # [S]
    values: dict[str, Tensor]  # [S, T-1] or [N], NaN where a token does not train
    place: tuple[Tensor, Tensor] | None = None  # of packed ones: [S+1] where sequences start, [N] column of each token


class Kept(NamedTuple):
    """Of one sequence: its mark, its column where the values begin, the values by column of a record."""

    mark: int
    first: int
    values: dict[str, np.ndarray[Any, Any]]


class KeepingLoss(PolicyLoss):
    """A loss whose process keeps the log-probs of the current policy that it is called with."""

    step: int

    def __call__(self, next_token_logprobs: Tensor, data: Any, *counts: Any, **named: Any) -> Any:
        """See :meth:`~nemo_geomask.losses.PolicyLoss.__call__`."""
        found = super().__call__(next_token_logprobs, data, *counts, **named)
        mark(self, data)
        trains = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool().unsqueeze(1)
        self._keep(next_token_logprobs, trains, data)
        return found

    def packed(self, logprobs: Tensor, data: Any, segments: Any, *counts: Any, **named: Any) -> Any:
        """See :meth:`~nemo_geomask.losses.PolicyLoss.packed`; ``data`` is of rows that were marked."""
        found = super().packed(logprobs, data, segments, *counts, **named)
        trains = data["token_mask"].bool() & segments.spread(data["sample_mask"]).bool()
        column = segments.token_index - segments.spread(segments.cu_seqlens[:-1]) + 1
        self._keep(logprobs, trains, data, (segments.tensors[0], column))
        return found

    def _keep(
        self, curr: Tensor, trains: Tensor, data: Mapping[str, Any], place: tuple[Tensor, Tensor] | None = None
    ) -> None:
        if self.step not in _kept:
            _kept.clear()
        found = {"curr": curr.detach(), **({"entropy": data[ENTROPY]} if ENTROPY in data else {})}
        values = {
            name: _to_host(torch.where(trains.to(value.device), value.float(), torch.nan))
            for name, value in found.items()
        }
        place = None if place is None else (_to_host(place[0]), _to_host(place[1]))
        _kept.setdefault(self.step, []).append(_Microbatch(_to_host(data[MARK]), values, place))


def _to_host(value: Tensor) -> Tensor:
    # Into pinned memory; nobody waits for it here.
    return value.to("cpu", non_blocking=True)


def keeping(loss: Any, step: int) -> Any:
    """``loss``, ours, keeping what it is called with in a step of this number."""
    if not isinstance(loss, PolicyLoss):
        return type(loss)(keeping(loss.loss, step))
    kept = copy.copy(loss)
    kept.__class__ = KeepingLoss
    assert isinstance(kept, KeepingLoss)
    kept.step = step
    return kept


def mark(loss: Any, data: Any) -> None:
    """Mark the rows of a microbatch, if ``loss`` keeps what it is called with."""
    if isinstance(loss, KeepingLoss) and MARK not in data:
        ids = data["input_ids"]
        if hasattr(ids, "full_tensor"):  # in NeMo-RL's DTensor workers, over context-parallel ranks
            ids = ids.full_tensor()[:, torch.argsort(data["seq_index"])]
        data[MARK] = marks(ids, data["input_lengths"])


def marks(ids: Tensor, lengths: Tensor) -> Tensor:
    """[B] int64 that tell rows [B, T] of token ids apart, whatever their padding: Σ (id + 1) · odd number of its place.

    Arithmetic modulo 2^64, the same on every device.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    odd = place * -7046029254386353131  # splitmix64's constants
    odd = (odd ^ (odd >> 30)) * -4658895280553007687
    odd = (odd ^ (odd >> 27)) | 1
    inside = place < lengths.to(ids.device).unsqueeze(1)
    return torch.where(inside, (ids.to(torch.int64) + 1) * odd, 0).sum(dim=1)


def handed_over(_: Any, step: int, wanted: Tensor | None = None) -> list[Kept]:
    """What this process has kept of a step, and keeps no longer.

    Args:
        step: its number.
        wanted: marks of the rows that are asked for; None: all.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    found = []
    for part in _kept.pop(step, []):
        chosen = torch.ones_like(part.marks, dtype=torch.bool) if wanted is None else torch.isin(part.marks, wanted)
        for index in chosen.nonzero().squeeze(1).tolist():
            here = index if part.place is None else slice(*part.place[0][index : index + 2].tolist())
            values = {name: value[here].numpy() for name, value in part.values.items()}
            known = np.flatnonzero(~np.isnan(values["curr"]))
            if not len(known):
                continue
            columns = known + 1 if part.place is None else part.place[1][here].numpy()[known]
            first, last = int(columns.min()), int(columns.max())
            dense = {}
            for name, value in values.items():
                dense[name] = np.full(last - first + 1, np.nan, np.float32)
                dense[name][columns - first] = value[known]
            found.append(Kept(int(part.marks[index]), first, dense))
    return found


def ask(policy: Any, step: int, wanted: Tensor | None) -> list[Any]:
    """Ask a policy's workers for what they have kept, behind whatever they were told before; Ray's references."""
    group = policy.worker_group
    sharding, workers = getattr(group, "sharding_annotations", None), getattr(group, "workers", ())
    # The ranks of a tensor-parallel group have the same.
    asked = [
        worker
        for index, worker in enumerate(workers)
        if sharding is None or not sharding.get_worker_coords(index).get("tensor_parallel", 0)
    ]
    return [worker.__ray_call__.remote(handed_over, step, wanted) for worker in asked]


def joined(answers: Iterable[list[Kept]], ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """By key of a batch [B, T], what workers have handed over; NaN where none has it, no key where none has any."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(marks(ids, lengths).tolist()):
        rows.setdefault(number, []).append(row)
    found: dict[str, Tensor] = {}
    for kept in (one for answer in answers for one in answer):
        for name, values in kept.values.items():
            into = found.setdefault(_NAMES[name], torch.full(ids.shape, torch.nan))
            end = min(kept.first + len(values), ids.shape[1])
            for row in rows.get(kept.mark, ()):
                there = into[row, kept.first : end]
                # Ranks that share a sequence have each their part of it; of one that comes again, the first counts.
                there.copy_(torch.where(there.isnan(), torch.from_numpy(values[: end - kept.first].copy()), there))
    return found
