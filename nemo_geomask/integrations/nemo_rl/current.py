"""``curr`` and entropies of a recorded step: kept in the workers, whose loss sees them, until the driver asks.

A row is known by what it holds, since NeMo-RL shards, packs and reorders a batch, and its data plane takes no column
of ours. Rows of the very same tokens are one to this.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_geomask.losses import PolicyLoss
from nemo_geomask.records.flight import KEYS, TRAINED

__all__ = ["ENTROPY", "KeepingLoss", "Kept", "ask", "handed_over", "joined", "keeping", "mark", "marks"]

_log = logging.getLogger("nemo_geomask")
MARK = "geomask_mark"
ENTROPY = "geomask_entropy"
_NAMES = {"curr": KEYS["curr"], "entropy": KEYS["entropy"]}
_kept: dict[int, list[_Microbatch]] = {}  # of one step


class _Microbatch(NamedTuple):
    marks: Tensor  # [S]
    trains: Tensor  # [S, T-1] or [N] bool
    values: dict[str, Tensor]  # likewise
    place: tuple[Tensor, Tensor] | None = None  # of packed ones: [S+1] where sequences start, [N] column of each token


class Kept(NamedTuple):
    """Of one sequence: its mark, the columns of its tokens that trained, their values by column of a record."""

    mark: int
    columns: np.ndarray[Any, Any]
    values: dict[str, np.ndarray[Any, Any]]


class KeepingLoss(PolicyLoss):
    """A loss whose process keeps the log-probs of the current policy that it is called with."""

    step: int

    def __call__(self, next_token_logprobs: Tensor, data: Any, *counts: Any, **named: Any) -> Any:
        """See :meth:`~nemo_geomask.losses.PolicyLoss.__call__`."""
        found = super().__call__(next_token_logprobs, data, *counts, **named)
        mark(self, data)
        self._keep(next_token_logprobs, data, lambda: data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1))
        return found

    def packed(self, logprobs: Tensor, data: Any, segments: Any, *counts: Any, **named: Any) -> Any:
        """See :meth:`~nemo_geomask.losses.PolicyLoss.packed`; ``data`` is of rows that were marked."""
        found = super().packed(logprobs, data, segments, *counts, **named)
        self._keep(logprobs, data, lambda: data["token_mask"] * segments.spread(data["sample_mask"]), segments)
        return found

    def _keep(self, curr: Tensor, data: Mapping[str, Any], weight: Callable[[], Tensor], segments: Any = None) -> None:
        if MARK not in data:
            return
        with _harmless():
            if self.step not in _kept:
                _kept.clear()
            values = {"curr": curr.detach(), **({"entropy": data[ENTROPY]} if ENTROPY in data else {})}
            place = None
            if segments is not None:
                column = segments.token_index - segments.spread(segments.cu_seqlens[:-1]) + 1
                place = _to_host(segments.tensors[0]), _to_host(column)
            on_host = {name: _to_host(value.float()) for name, value in values.items()}
            part = _Microbatch(_to_host(data[MARK]), _to_host(weight() != 0), on_host, place)
            _kept.setdefault(self.step, []).append(part)


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Log what goes wrong inside, once a kind: it costs the records' ``curr``, and no step."""
    try:
        yield
    except Exception as error:
        _complain(type(error).__name__)


@functools.cache
def _complain(kind: str) -> None:
    _log.exception("records: without curr: %s", kind)


def _to_host(value: Tensor) -> Tensor:
    # Into pinned memory; nobody waits for it here. What is there already goes on being the trainer's.
    return value.to("cpu", non_blocking=True, copy=True)


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
    if not isinstance(loss, KeepingLoss) or MARK in data:
        return
    with _harmless():
        ids, lengths = data["input_ids"], data["input_lengths"]
        if hasattr(ids, "full_tensor"):  # in NeMo-RL's DTensor workers, over context-parallel ranks
            ids = ids.full_tensor()[:, torch.argsort(data["seq_index"])]
        data[MARK] = marks(ids, lengths)


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
            known = part.trains[here].numpy().nonzero()[0]
            if len(known):
                columns = known + 1 if part.place is None else part.place[1][here].numpy()[known]
                values = {name: value[here].numpy()[known] for name, value in part.values.items()}
                found.append(Kept(int(part.marks[index]), columns, values))
    return found


def ask(policy: Any, step: int, wanted: Tensor | None) -> list[Any]:
    """Ask a policy's workers for what they have kept, behind whatever they were told before; Ray's references."""
    group = policy.worker_group
    sharding, workers = getattr(group, "sharding_annotations", None), getattr(group, "workers", ())
    answers = []
    for index, worker in enumerate(workers):
        # The ranks of a tensor-parallel group have the same: one says it, and the others keep it no longer.
        says = sharding is None or not sharding.get_worker_coords(index).get("tensor_parallel", 0)
        answer = worker.__ray_call__.remote(handed_over, step, wanted if says else torch.empty(0, dtype=torch.int64))
        if says:
            answers.append(answer)
    return answers


def joined(answers: Iterable[list[Kept]], ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """By key of a batch [B, T], what workers have handed over; no key where none has any.

    NaN at tokens that did not train; :data:`~nemo_geomask.records.flight.TRAINED` says which did.
    """
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(marks(ids, lengths).tolist()):
        rows.setdefault(number, []).append(row)
    found: dict[str, Tensor] = {}
    for kept in (one for answer in answers for one in answer):
        trained = found.setdefault(TRAINED, torch.zeros(ids.shape, dtype=torch.bool))
        inside = kept.columns < ids.shape[1]
        columns = torch.from_numpy(kept.columns[inside])
        for row in rows.get(kept.mark, ()):
            # Ranks that share a sequence have each their part of it; of one that comes again, the first counts.
            new = ~trained[row, columns]
            for name, values in kept.values.items():
                into = found.setdefault(_NAMES[name], torch.full(ids.shape, torch.nan))
                into[row, columns[new]] = torch.from_numpy(values[inside])[new]
            trained[row, columns] = True
    return found
