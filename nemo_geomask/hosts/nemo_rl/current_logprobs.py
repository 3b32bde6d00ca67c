"""``curr`` and entropies of a recorded step: worker processes keep them until the driver collects them.

Only the loss, which runs in the workers, has these values. Their rows are identified by a fingerprint of the tokens,
because NeMo-RL shards, packs and reorders a batch, and its data plane accepts no column of another package. Rows with
equal tokens therefore have the same fingerprint and get the same values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.data_keys import TOKEN_MASK
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.records.flight import COLUMN_BATCH_KEYS, CURR_KNOWN_KEY

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger("nemo_geomask")
FINGERPRINTS = "geomask_fingerprints"
"""Key of the rows' fingerprints [B] int64 in a microbatch."""
ENTROPY = "geomask_entropy"
"""Key of the entropies that the loss's log-prob back end puts into a microbatch."""
_RECORD_KEYS = {"curr": COLUMN_BATCH_KEYS["curr"], "entropy": COLUMN_BATCH_KEYS["entropy"]}


class _Microbatch(NamedTuple):
    """Log-probs of one call of the loss, on the host."""

    fingerprints: Tensor  # [S]
    is_trained: Tensor  # [S, T-1] or [N] bool
    values: dict[str, Tensor]  # curr, entropy: as is_trained
    layout: tuple[Tensor, Tensor] | None = None  # if packed: [S+1] offsets of sequences, [N] column of each token


_kept: dict[int, list[_Microbatch]] = {}  # by step; of one step at a time


class KeptSequence(NamedTuple):
    """Log-probs of one sequence as a worker kept them.

    Attributes:
        fingerprint: of the row.
        columns: columns of the tokens that trained.
        values: ``curr`` and ``entropy`` of those tokens.
    """

    fingerprint: int
    columns: np.ndarray[Any, Any]
    values: dict[str, np.ndarray[Any, Any]]


class KeepingLoss(PolicyLoss):
    """A loss that keeps the current policy's log-probs of each call in its process."""

    step: int

    def __call__(self, next_token_logprobs: Tensor, data: Any, *counts: Any, **named: Any) -> Any:
        """Compute the loss, see :meth:`~nemo_geomask.losses.PolicyLoss.__call__`."""
        result = super().__call__(next_token_logprobs, data, *counts, **named)
        add_fingerprints(self, data)
        self._keep(next_token_logprobs, data, lambda: data[TOKEN_MASK][:, 1:] * data["sample_mask"].unsqueeze(1))
        return result

    def packed(self, logprobs: Tensor, data: Any, segments: Any, *counts: Any, **named: Any) -> Any:
        """Compute the loss, see :meth:`~nemo_geomask.losses.PolicyLoss.packed`; ``data`` must have fingerprints."""
        result = super().packed(logprobs, data, segments, *counts, **named)
        self._keep(logprobs, data, lambda: data[TOKEN_MASK] * segments.spread(data["sample_mask"]), segments)
        return result

    def _keep(
        self, curr: Tensor, data: Mapping[str, Any], make_mask: Callable[[], Tensor], segments: Any = None
    ) -> None:
        if FINGERPRINTS not in data:
            return
        with _errors_logged():
            if self.step not in _kept:
                _kept.clear()
            values = {"curr": curr.detach(), **({"entropy": data[ENTROPY]} if ENTROPY in data else {})}
            layout = None
            if segments is not None:
                columns = segments.token_index - segments.spread(segments.cu_seqlens[:-1]) + 1
                layout = _to_host(segments.tensors[0]), _to_host(columns)
            host_values = {name: _to_host(value.float()) for name, value in values.items()}
            microbatch = _Microbatch(_to_host(data[FINGERPRINTS]), _to_host(make_mask() != 0), host_values, layout)
            _kept.setdefault(self.step, []).append(microbatch)


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Log errors instead of raising them, because a record without ``curr`` must not fail a step."""
    try:
        yield
    except Exception as error:
        _log_error_once(type(error).__name__)


@functools.cache
def _log_error_once(error_type: str) -> None:
    _log.exception("records: without curr: %s", error_type)


def _to_host(value: Tensor) -> Tensor:
    # Copies into pinned memory without waiting. A tensor that is on the host already is copied too, because the trainer
    # goes on to use it.
    return value.to("cpu", non_blocking=True, copy=True)


def keep_logprobs(loss: Any, step: int) -> Any:
    """Return a copy of one of this package's losses that keeps the log-probs of its calls, under this step number."""
    if not isinstance(loss, PolicyLoss):
        return type(loss)(keep_logprobs(loss.loss, step))
    keeping_loss = copy.copy(loss)
    keeping_loss.__class__ = KeepingLoss
    assert isinstance(keeping_loss, KeepingLoss)
    keeping_loss.step = step
    return keeping_loss


def add_fingerprints(loss: Any, data: Any) -> None:
    """Add the rows' fingerprints to a microbatch if ``loss`` keeps its log-probs."""
    if not isinstance(loss, KeepingLoss) or FINGERPRINTS in data:
        return
    with _errors_logged():
        ids, lengths = data["input_ids"], data["input_lengths"]
        if hasattr(ids, "full_tensor"):  # NeMo-RL's DTensor workers shard them over context-parallel ranks
            ids = ids.full_tensor()[:, torch.argsort(data["seq_index"])]
        data[FINGERPRINTS] = fingerprints(ids, lengths)


def fingerprints(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return [B] int64 that identify rows of token ids [B, T], whatever their padding.

    Σ_t (id_t + 1) · odd(t) modulo 2^64, where odd(t) is an odd pseudo-random number. The result is the same on every
    device.
    """
    position = torch.arange(ids.shape[1], device=ids.device)
    odd = position * -7046029254386353131  # the constants are splitmix64's
    odd = (odd ^ (odd >> 30)) * -4658895280553007687
    odd = (odd ^ (odd >> 27)) | 1
    inside = position < lengths.to(ids.device).unsqueeze(1)
    return torch.where(inside, (ids.to(torch.int64) + 1) * odd, 0).sum(dim=1)


def take_kept(actor: object, step: int, requested: Tensor | None = None) -> list[KeptSequence]:
    """Remove and return what this process has kept of a step.

    Args:
        actor: the worker in whose process this runs; not used.
        step: number of the step.
        requested: fingerprints of the rows to return; None: all.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    sequences = []
    for microbatch in _kept.pop(step, []):
        is_requested = torch.ones_like(microbatch.fingerprints, dtype=torch.bool)
        if requested is not None:
            is_requested = torch.isin(microbatch.fingerprints, requested)
        for row in is_requested.nonzero().squeeze(1).tolist():
            layout = microbatch.layout
            index = row if layout is None else slice(*layout[0][row : row + 2].tolist())
            trained = microbatch.is_trained[index].numpy().nonzero()[0]
            if len(trained):
                columns = trained + 1 if layout is None else layout[1][index].numpy()[trained]
                values = {name: value[index].numpy()[trained] for name, value in microbatch.values.items()}
                sequences.append(KeptSequence(int(microbatch.fingerprints[row]), columns, values))
    return sequences


def collect_from_workers(policy: Any, step: int, requested: Tensor | None) -> list[Any]:
    """Queue a call in each of a policy's workers that returns what it has kept; returns Ray's references.

    Args:
        policy: NeMo-RL's.
        step: number of the step.
        requested: fingerprints of the rows to return; None: all.
    """
    group = policy.worker_group
    sharding, workers = getattr(group, "sharding_annotations", None), getattr(group, "workers", ())
    references = []
    for index, worker in enumerate(workers):
        # All ranks of a tensor-parallel group keep the same. The first returns it; the others only discard it.
        is_first = sharding is None or not sharding.get_worker_coords(index).get("tensor_parallel", 0)
        rows = requested if is_first else torch.empty(0, dtype=torch.int64, device="cpu")
        reference = worker.__ray_call__.remote(take_kept, step, rows)
        if is_first:
            references.append(reference)
    return references


def merge_kept(answers: Iterable[list[KeptSequence]], ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Merge what workers have kept into tensors [B, T] by a record's keys; no key if there is nothing.

    Values are NaN at tokens that did not train; :data:`~nemo_geomask.records.flight.CURR_KNOWN_KEY` is the mask of
    those that did.

    Args:
        answers: one from each worker.
        ids: [B, T], token ids of the batch.
        lengths: [B], lengths of its rows.
    """
    rows: dict[int, list[int]] = {}
    for row, fingerprint in enumerate(fingerprints(ids, lengths).tolist()):
        rows.setdefault(fingerprint, []).append(row)
    merged: dict[str, Tensor] = {}
    for sequence in (sequence for answer in answers for sequence in answer):
        trained = merged.setdefault(CURR_KNOWN_KEY, torch.zeros_like(ids, dtype=torch.bool))
        inside = sequence.columns < ids.shape[1]
        columns = torch.from_numpy(sequence.columns[inside])
        for row in rows.get(sequence.fingerprint, ()):
            # Context-parallel ranks have different columns of a sequence. If a column comes twice, the first value
            # counts.
            is_new = ~trained[row, columns]
            for name, values in sequence.values.items():
                target = merged.setdefault(_RECORD_KEYS[name], torch.full_like(ids, torch.nan, dtype=torch.float32))
                target[row, columns[is_new]] = torch.from_numpy(values[inside])[is_new]
            trained[row, columns] = True
    return merged
