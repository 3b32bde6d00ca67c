"""What the ranks of a tensor-parallel group tell each other: their statistics, and beside them what each was given."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, DataError, RanksDisagreeError, ShapeError
from nemo_geomask.kernels import Kernels
from nemo_geomask.segments.across import gathered

__all__ = ["Keywords", "Options", "Shards", "asked", "check_vocab_size", "exchanged", "refuse", "wrong"]


class Shards(NamedTuple):
    """How a rank takes the vocabulary to be sharded.

    Attributes:
        sizes: columns of each rank.
        rank: this one.
        group: of the ranks; None for one.
        vocab_size: valid columns among all, as given.
        width: this rank's columns, padding included.
    """

    sizes: list[int]
    rank: int
    group: dist.ProcessGroup | None
    vocab_size: int
    width: int

    @property
    def valid(self) -> int:
        """Valid columns among all that there are."""
        return min(self.vocab_size, sum(self.sizes))

    @property
    def start(self) -> int:
        """Number of this rank's first column."""
        return sum(self.sizes[: self.rank])

    @property
    def own_valid(self) -> int:
        """Valid columns among this rank's."""
        return min(max(self.valid - self.start, 0), self.width)


class Keywords(TypedDict, total=False):
    """What log-probs are asked with, of logits or of hidden states, see
    :func:`nemo_geomask.parallel.vocab.vocab_parallel_logprobs`; for its type alone."""

    group: dist.ProcessGroup | None
    temperature: float
    vocab_size: int | None
    shard_sizes: Sequence[int] | None
    ignore_index: int
    validate: bool
    kernel: str


class Options(NamedTuple):
    """How log-probs are to be computed; the first four have to be the same on all ranks."""

    temperature: float
    ignore_index: int
    entropy: bool
    validate: bool
    kernels: Kernels

    @property
    def inverse_temperature(self) -> float:
        """1/T."""
        return 1.0 / self.temperature

    @property
    def of_rows(self) -> dict[str, Any]:
        """What the kernels are told of every row."""
        return {"ignore_index": self.ignore_index, "inverse_temperature": self.inverse_temperature}


class _Note(NamedTuple):
    """What a rank says of itself, in integers, beside its statistics."""

    width: int
    start: int
    total: int
    vocab_size: int
    temperature: int
    ignore_index: int
    entropy: int
    validate: int
    targets: int

    @property
    def settings(self) -> tuple[float, int, bool, bool]:
        """Of :class:`Options`, as they were given."""
        (temperature,) = struct.unpack("d", struct.pack("q", self.temperature))
        return temperature, self.ignore_index, bool(self.entropy), bool(self.validate)


_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64


def exchanged(statistics: Tensor, targets: Tensor, shards: Shards, options: Options) -> tuple[Tensor, Tensor | None]:
    """The statistics of all ranks, and what each was given: one all-gather, whose size depends on N alone.

    Args:
        statistics: [k, N] float32, this rank's.
        targets: [N] int64; a checksum of them travels if ``options.validate``.
        shards: how this rank takes the vocabulary to be sharded.
        options: what it was called with.

    Returns: [TP, k, N] in rank order, and for :func:`refuse` int64 notes [TP, 9]; None with one rank.
    """
    if shards.group is None or len(shards.sizes) == 1:
        return statistics.unsqueeze(0), None
    mine = torch.cat([statistics.reshape(-1), _note(targets, shards, options)])
    everyone = gathered(mine, shards.group)
    count = statistics.numel()
    notes = everyone[:, count:].to(torch.int16).view(torch.int64)
    return everyone[:, :count].view(-1, *statistics.shape), notes


def _note(targets: Tensor, shards: Shards, options: Options) -> Tensor:
    """A :class:`_Note` in pieces of 16 bits, which float32 holds exactly."""
    (temperature,) = struct.unpack("q", struct.pack("d", options.temperature))
    place = (shards.width, shards.start, sum(shards.sizes), shards.vocab_size)
    given = (temperature, options.ignore_index, int(options.entropy), int(options.validate))
    known = _constants((*place, *given), str(targets.device))
    # An odd factor a position: another target, or two in another order, is another sum modulo 2^64.
    summed = targets if options.validate else targets[:0]
    factors = torch.arange(len(summed), dtype=torch.int64, device=targets.device) * _ODD | 1
    checksum = (factors * summed).sum(dim=0, keepdim=True)
    return torch.cat([known, checksum]).view(torch.int16).to(torch.float32)


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[int, ...], device: str) -> Tensor:
    # Cached, since a copy from the host would wait for the device.
    return torch.tensor(values, dtype=torch.int64, device=device)


def asked(flag: Tensor) -> Callable[[], bool]:
    """Have a flag [] copied to the host, and return what reads it: that waits for what was launched before the copy,
    not for what has been since."""
    if flag.device.type != "cuda":
        return functools.partial(bool, flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        copied.synchronize()
        return bool(host)

    return read


def wrong(stray: Tensor, notes: Tensor | None) -> Tensor:
    """Whether :func:`refuse` has something to refuse, bool []; the same on all ranks, if there are notes of several."""
    found = stray.any()
    if notes is None:
        return found
    widths, starts, totals, sizes = notes[:, :4].unbind(1)
    misfit = (starts != widths.cumsum(0) - widths) | (totals != widths.sum()) | (sizes < 1) | (sizes > totals)
    return found | misfit.any() | (notes[:, 2:] != notes[0, 2:]).any()


def refuse(targets: Tensor, stray: Tensor, notes: Tensor | None, shards: Shards, ignore_index: int) -> NoReturn:
    """Say what :func:`wrong` has found: on all ranks, which hold the same notes.

    Args:
        targets: [N] int64.
        stray: [N], those in no shard.
        notes: from :func:`exchanged`.
        shards: how this rank takes the vocabulary to be sharded.
        ignore_index: for the message.

    Raises: ShapeError: the ranks' columns aren't those that they assume. ArgumentError: ``vocab_size`` is out of range.
    RanksDisagreeError: other settings, or other targets. DataError: a target is in no shard.
    """
    if notes is not None:
        _refuse_disagreement([_Note(*note) for note in notes.tolist()], shards)
    numbers = targets[stray]
    raise DataError(
        f"{numbers.numel()} targets are in no vocabulary shard, the first is {int(numbers[0])}; targets must be "
        f"below the vocabulary size ({shards.valid}), or ignore_index ({ignore_index})"
    )


def _refuse_disagreement(notes: Sequence[_Note], shards: Shards) -> None:
    widths = [note.width for note in notes]
    starts = list(itertools.accumulate(widths, initial=0))
    claims = {(note.start - start, note.total, note.vocab_size) for note, start in zip(notes, starts, strict=False)}
    if claims != {(0, sum(widths), notes[0].vocab_size)}:
        raise ShapeError(
            f"the ranks hold {widths} columns, but rank {shards.rank} assumes {shards.sizes}, of which "
            f"{shards.vocab_size} valid; give the same vocab_size and shard_sizes={widths} on all ranks"
        )
    check_vocab_size(shards)
    settings = zip(*(note.settings for note in notes), strict=True)
    by_name = zip(Options._fields, settings, strict=False)
    found = [f"{name} is {list(values)}" for name, values in by_name if len(set(values)) > 1]
    if found:
        raise RanksDisagreeError(
            f"the ranks of the tensor-parallel group have different settings: by rank, {', '.join(found)}; give the "
            "same on all ranks"
        )
    others = [rank for rank, note in enumerate(notes) if note.targets != notes[0].targets]
    if others:
        raise RanksDisagreeError(
            f"targets must be the same on all ranks of the tensor-parallel group, but those of ranks {others} are not "
            "rank 0's; broadcast the batch, or check how each rank draws it"
        )


def check_vocab_size(shards: Shards) -> None:
    """Raise ArgumentError unless 1 ≤ ``vocab_size`` ≤ the columns of all shards."""
    columns = sum(shards.sizes)
    if not 0 < shards.vocab_size <= columns:
        raise ArgumentError(
            f"vocab_size must be from 1 to the {columns} columns that the ranks hold, but it is {shards.vocab_size}"
        )
