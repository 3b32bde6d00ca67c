"""Check that all ranks of a tensor-parallel group received the same arguments; if not, raise on all of them."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from nemo_geomask.errors import DataError, RanksDisagreeError, ShapeError
from nemo_geomask.parallel.logprob_options import LogprobOptions, VocabShards, check_vocab_size
from nemo_geomask.segments.packed_reductions import gather_ranks

__all__ = ["copy_flag_to_host", "gather_rank_arguments", "has_problem", "raise_problem"]


class _RankArguments(NamedTuple):
    """Arguments of a rank's call, as the int64 numbers that it sends to the other ranks.

    Attributes:
        columns: number of columns that the rank has.
        start: token id of its first column, as the rank assumes.
        total_columns: number of columns of all ranks, as the rank assumes.
        vocab_size: number of valid columns of all ranks.
        temperature_bits: the temperature, a float64, read as int64.
        ignore_index: as the caller passed it.
        entropy: 0 or 1.
        validate: 0 or 1.
        targets_checksum: sum of the targets weighted by position, modulo 2^64.
    """

    columns: int
    start: int
    total_columns: int
    vocab_size: int
    temperature_bits: int
    ignore_index: int
    entropy: int
    validate: int
    targets_checksum: int

    @property
    def options(self) -> dict[str, float | int | bool]:
        """Fields of :class:`LogprobOptions` that must be the same on all ranks, by name."""
        (temperature,) = struct.unpack("d", struct.pack("q", self.temperature_bits))
        return {
            "temperature": temperature,
            "ignore_index": self.ignore_index,
            "entropy": bool(self.entropy),
            "validate": bool(self.validate),
        }


_ODD_FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as int64; spreads positions over all bits


def gather_rank_arguments(targets: Tensor, shards: VocabShards, options: LogprobOptions) -> Tensor | None:
    """Gather the :class:`_RankArguments` of all ranks: int64 [TP, 9] in rank order; None for a single rank.

    Every call makes one all-gather of 72 bytes a rank. It is unconditional: if an argument or a cached result decided
    whether to make it, ranks could decide differently, and one would wait for another forever.
    """
    if shards.group is None or len(shards.sizes) == 1:
        return None
    (temperature_bits,) = struct.unpack("q", struct.pack("d", options.temperature))
    columns = (shards.local_columns, shards.start, sum(shards.sizes), shards.vocab_size)
    settings = (temperature_bits, options.ignore_index, int(options.entropy), int(options.validate))
    constants = _device_constants((*columns, *settings), str(targets.device))
    # Each position has its own odd factor. Changing a target or the order of targets thus changes the sum modulo 2^64.
    factors = (torch.arange(len(targets), dtype=torch.int64, device=targets.device) * _ODD_FACTOR) | 1
    checksum = (factors * targets).sum(dim=0, keepdim=True)
    return gather_ranks(torch.cat([constants, checksum]), shards.group)


@functools.lru_cache(maxsize=64)
def _device_constants(values: tuple[int, ...], device: str) -> Tensor:
    """Return the values as an int64 tensor on the device; repeated calls return a cached tensor."""
    # The cache matters because a copy from the host to a GPU makes the host wait for the device.
    return torch.tensor(values, dtype=torch.int64, device=device)


def has_problem(is_stray: Tensor, rank_arguments: Tensor | None) -> Tensor:
    """Return a bool [] on the device: True if :func:`raise_problem` has an error to raise; the same on all ranks.

    Args:
        is_stray: [N] bool, True for targets that are in no shard.
        rank_arguments: from :func:`gather_rank_arguments`.
    """
    if rank_arguments is None:
        return is_stray.any()
    columns, starts, totals, vocab_sizes = rank_arguments[:, :4].unbind(1)
    misfits = (starts != columns.cumsum(0) - columns) | (totals != columns.sum())
    out_of_range = (vocab_sizes < 1) | (vocab_sizes > totals)
    differs = (rank_arguments[:, 3:] != rank_arguments[0, 3:]).any()
    return is_stray.any() | misfits.any() | out_of_range.any() | differs


def copy_flag_to_host(flag: Tensor) -> Callable[[], bool]:
    """Start to copy a bool [] to the host; return a function that reads it.

    Reading waits for the kernels that were launched before the copy, not for those launched after it. On a GPU the
    log-prob functions wait for nothing else, except that :func:`~nemo_geomask.parallel.linear.linear_logprobs` also
    waits for its number of rows. ``tests/gpu/test_gpu_kernels.py`` and ``tests/gpu/test_gpu_linear.py`` check this.
    """
    if flag.device.type != "cuda":
        return functools.partial(bool, flag)
    on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
    on_host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        copied.synchronize()
        return bool(on_host)

    return read


def raise_problem(
    targets: Tensor, is_stray: Tensor, rank_arguments: Tensor | None, shards: VocabShards, ignore_index: int
) -> NoReturn:
    """Raise the error that :func:`has_problem` has detected; all ranks raise the same error.

    Args:
        targets: [N] int64.
        is_stray: [N] bool, True for targets that are in no shard.
        rank_arguments: from :func:`gather_rank_arguments`.
        shards: the vocabulary's shards, as this rank assumes them.
        ignore_index: for the message.

    Raises:
        ShapeError: a rank assumes other numbers of columns than the ranks have.
        ArgumentError: ``vocab_size`` is out of range.
        RanksDisagreeError: the ranks have different options or different targets.
        DataError: a target is in no shard.
    """
    if rank_arguments is not None:
        _raise_disagreement([_RankArguments(*row) for row in rank_arguments.tolist()], shards)
    stray_targets = targets[is_stray]
    raise DataError(
        f"{stray_targets.numel()} targets are in no vocabulary shard, the first is {int(stray_targets[0])}; targets "
        f"must be below the vocabulary size ({shards.valid_columns}), or ignore_index ({ignore_index})"
    )


def _raise_disagreement(ranks: Sequence[_RankArguments], shards: VocabShards) -> None:
    """Raise the first error in the ranks' arguments; return if they agree."""
    columns = [rank.columns for rank in ranks]
    starts = itertools.accumulate(columns[:-1], initial=0)
    expected = [(start, sum(columns), ranks[0].vocab_size) for start in starts]
    if [(rank.start, rank.total_columns, rank.vocab_size) for rank in ranks] != expected:
        raise ShapeError(
            f"the ranks hold {columns} columns, but rank {shards.rank} assumes {shards.sizes}, of which "
            f"{shards.vocab_size} valid; give the same vocab_size and shard_sizes={columns} on all ranks"
        )
    check_vocab_size(shards)
    by_name = {name: [rank.options[name] for rank in ranks] for name in ranks[0].options}
    differences = [f"{name} is {values}" for name, values in by_name.items() if len(set(values)) > 1]
    if differences:
        raise RanksDisagreeError(
            f"the ranks of the tensor-parallel group have different settings: by rank, {', '.join(differences)}; give "
            "the same on all ranks"
        )
    differing = [number for number, rank in enumerate(ranks) if rank.targets_checksum != ranks[0].targets_checksum]
    if differing:
        raise RanksDisagreeError(
            f"targets must be the same on all ranks of the tensor-parallel group, but those of ranks {differing} are "
            "not rank 0's; broadcast the batch, or check how each rank draws it"
        )
