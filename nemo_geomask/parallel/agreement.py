"""Check that all ranks of a tensor-parallel group received the same arguments; if not, raise on all of them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from nemo_geomask.errors import DataError, RanksDisagreeError, ShapeError
from nemo_geomask.parallel.logprob_options import LogprobOptions, VocabShards, check_vocab_size
from nemo_geomask.segments.packed_reductions import gather_ranks
from nemo_geomask.segments.rank_comparison import checksum, integers_on_device, list_differences


class _RankArguments(NamedTuple):
    """Arguments of a rank's call, as the int64 numbers that it sends to the other ranks.

    Attributes:
        columns: number of columns that the rank has.
        start: token id of its first column, as the rank assumes.
        total_columns: number of columns of all ranks, as the rank assumes.
        vocab_size: number of valid columns of all ranks.
        temperature_bits: the temperature, a float64, read as int64.
        ignore_index: as the caller passed it.
        flags: 1 for ``entropy``, plus 2 for ``validate``.
        rows: number of targets.
        targets_checksum: :func:`~nemo_geomask.segments.rank_comparison.checksum` of the targets.
    """

    columns: int
    start: int
    total_columns: int
    vocab_size: int
    temperature_bits: int
    ignore_index: int
    flags: int
    rows: int
    targets_checksum: int

    @property
    def options(self) -> dict[str, float | int | bool]:
        """Fields of :class:`LogprobOptions` that must be the same on all ranks, by name."""
        (temperature,) = struct.unpack("d", struct.pack("q", self.temperature_bits))
        return {
            "temperature": temperature,
            "ignore_index": self.ignore_index,
            "entropy": bool(self.flags & 1),
            "validate": bool(self.flags & 2),
        }


def gather_rank_arguments(targets: Tensor, shards: VocabShards, options: LogprobOptions) -> Tensor | None:
    """Gather the :class:`_RankArguments` of all ranks: int64 [TP, 9] in rank order; None for a single rank.

    Every call makes one all-gather of 72 bytes a rank. It is unconditional: if an argument or a cached result decided
    whether to make it, ranks could decide differently, and one would wait for another forever.
    """
    if shards.group is None or len(shards.sizes) == 1:
        return None
    (temperature_bits,) = struct.unpack("q", struct.pack("d", options.temperature))
    columns = (shards.local_columns, shards.start, sum(shards.sizes), shards.vocab_size)
    settings = (temperature_bits, options.ignore_index, options.entropy + 2 * options.validate)
    constants = integers_on_device((*columns, *settings, len(targets)), str(targets.device))
    return gather_ranks(torch.cat([constants, checksum(targets)]), shards.group)


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


def raise_other_rows(rank_arguments: Tensor | None) -> None:
    """Raise RanksDisagreeError if the ranks have different numbers of targets.

    Call this before a collective whose size depends on that number, since such a collective fails, or brings down the
    process, if the sizes differ. The host must have read :func:`has_problem`.
    """
    if rank_arguments is None:
        return
    rows = [_RankArguments(*row).rows for row in rank_arguments.tolist()]
    if len(set(rows)) > 1:
        raise RanksDisagreeError(
            f"targets must be the same on all ranks of the tensor-parallel group, but by rank there are {rows}; give "
            "all of them the same microbatch"
        )


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
    if differences := list_differences(by_name):
        raise RanksDisagreeError(
            f"the ranks of the tensor-parallel group have different settings: by rank, {differences}; give the same on "
            "all ranks"
        )
    differing = [number for number, rank in enumerate(ranks) if rank.targets_checksum != ranks[0].targets_checksum]
    if differing:
        raise RanksDisagreeError(
            f"targets must be the same on all ranks of the tensor-parallel group, but those of ranks {differing} are "
            "not rank 0's; broadcast the batch, or check how each rank draws it"
        )
