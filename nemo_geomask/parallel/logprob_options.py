"""Arguments of the log-prob functions, and the vocabulary shards that these arguments describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch.distributed as dist

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.kernels import Kernels


class LogprobKeywords(TypedDict, total=False):
    """Keyword arguments that both log-prob functions take, for type checkers.

    :func:`nemo_geomask.parallel.vocab.vocab_parallel_logprobs` documents them.
    """

    group: dist.ProcessGroup | None
    temperature: float
    vocab_size: int | None
    shard_sizes: Sequence[int] | None
    ignore_index: int
    validate: bool
    kernel: str


class LogprobOptions(NamedTuple):
    """Settings of a log-prob computation; all but the kernels must be the same on all ranks."""

    temperature: float
    ignore_index: int
    entropy: bool
    validate: bool
    kernels: Kernels

    @property
    def inverse_temperature(self) -> float:
        """1/T, factor on the logits."""
        return 1.0 / self.temperature

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """Keyword arguments that the forward and the backward kernels have in common."""
        return {"ignore_index": self.ignore_index, "inverse_temperature": self.inverse_temperature}


class VocabShards(NamedTuple):
    """The shards of the vocabulary, as this rank assumes them.

    Attributes:
        sizes: number of columns of each rank.
        rank: this rank.
        group: process group of the ranks; None for a single rank.
        vocab_size: number of valid columns in all shards, as the caller gave it.
        local_columns: number of columns that this rank has, padding included.
    """

    sizes: list[int]
    rank: int
    group: dist.ProcessGroup | None
    vocab_size: int
    local_columns: int

    @property
    def valid_columns(self) -> int:
        """Number of valid columns in all shards, at most the number of columns."""
        return min(self.vocab_size, sum(self.sizes))

    @property
    def start(self) -> int:
        """Token id of this rank's first column."""
        return sum(self.sizes[: self.rank])

    @property
    def local_valid_columns(self) -> int:
        """Number of valid columns in this rank's shard."""
        return min(max(self.valid_columns - self.start, 0), self.local_columns)


def vocab_shards(
    local_columns: int, group: dist.ProcessGroup | None, shard_sizes: Sequence[int] | None, vocab_size: int | None
) -> VocabShards:
    """Derive the shards from the arguments of one rank.

    Raises:
        ShapeError: ``shard_sizes`` don't fit.
        ArgumentError: ``vocab_size`` is out of range.
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    sizes = [local_columns] * world if shard_sizes is None else list(shard_sizes)
    # With several ranks, this rank's number of columns is not compared here: ``parallel.agreement`` does that after an
    # exchange between the ranks, so that all of them raise the same error.
    if len(sizes) != world or (world == 1 and sizes != [local_columns]):
        raise ShapeError(
            f"shard_sizes {sizes} must have one entry for each of the {world} ranks of the group, and rank {rank}'s "
            f"must be its {local_columns} columns"
        )
    shards = VocabShards(sizes, rank, group, sum(sizes) if vocab_size is None else vocab_size, local_columns)
    if world == 1:
        check_vocab_size(shards)
    return shards


def check_vocab_size(shards: VocabShards) -> None:
    """Raise ArgumentError unless 1 ≤ ``vocab_size`` ≤ the number of columns in all shards."""
    columns = sum(shards.sizes)
    if not 0 < shards.vocab_size <= columns:
        raise ArgumentError(
            f"vocab_size must be from 1 to the {columns} columns that the ranks hold, but it is {shards.vocab_size}"
        )


def check_temperature(temperature: float) -> None:
    """Raise ArgumentError unless the temperature T is 0 < T < ∞."""
    if not 0 < temperature < math.inf:
        raise ArgumentError(f"temperature must be above 0 and finite, but it is {temperature}")
