"""Position of a process on the tensor-, context- and data-parallel axes of a run, and collectives over the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from nemo_geomask.parallel.local_processes import COLLECTIVE_TIMEOUT, lead_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """Position of a process on one axis of parallelism."""

    rank: int = 0  # this process's rank on the axis
    size: int = 1  # number of ranks on the axis
    group: dist.ProcessGroup | None = None  # the processes that differ only in this rank; None if the size is 1


@dataclass(frozen=True)
class Ranks:
    """Position of a process on all axes; ``Ranks()`` for a run of one process.

    Values that must be equal on all ranks are computed by one collective over all ranks, so that they are bit-identical
    and the ranks cannot diverge.
    """

    tp: Axis = Axis()  # tensor-parallel axis; each rank has a shard of the vocabulary
    cp: Axis = Axis()  # context-parallel axis; each rank has a shard of every sequence
    dp: Axis = Axis()  # data-parallel axis; each rank has other microbatches of the same optimiser step

    @classmethod
    def of(cls, *, tp: int, cp: int, dp: int) -> Ranks:
        """Return this process's position in the default process group of tp·cp·dp processes.

        All processes must call it, because it creates process groups. As in Megatron, tensor-parallel ranks are
        adjacent, then context-parallel ranks.
        """
        strides = (1, tp, tp * cp)
        return cls(*(_build_axis(size, stride) for size, stride in zip((tp, cp, dp), strides, strict=True)))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp.size * self.cp.size * self.dp.size

    @property
    def is_first(self) -> bool:
        """True for the process that samples and writes files."""
        return not (self.tp.rank or self.cp.rank or self.dp.rank)

    def compute_on_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first rank only, and return its value on all ranks."""
        if self.world_size == 1:
            return make()
        box: list[Any] = [make() if self.is_first else None]
        dist.broadcast_object_list(box, src=0)
        value: T = box[0]
        return value

    def sum_shards(self, shard: Tensor) -> Tensor:
        """Sum the shards of a tensor over context- and data-parallel ranks; tensor-parallel ranks pass equal shards."""
        return self._all_reduce([torch.zeros_like(shard) if self.tp.rank else shard])[0]

    def sum_gradients(self, parameters: Iterable[Parameter], sharded: Parameter) -> None:
        """Sum the gradients over ranks, so that every rank has those of the complete step.

        Context- and data-parallel ranks back-propagate different tokens, so their gradients add up. Tensor-parallel
        ranks hold equal gradients, which count once, except for ``sharded``, of which each rank has different rows.
        """
        if self.world_size == 1:
            return
        weights = list(parameters)
        # A data-parallel rank that had no microbatch has no gradient.
        gradients = [
            torch.zeros_like(weight) if weight.grad is None or (self.tp.rank and weight is not sharded) else weight.grad
            for weight in weights
        ]
        for weight, gradient in zip(weights, self._all_reduce(gradients), strict=True):
            weight.grad = gradient

    def gather_data_parallel(self, items: list[T]) -> list[T]:
        """Gather the lists of all data-parallel ranks into one, in rank order."""
        if self.dp.group is None:
            return items
        lists: list[Any] = [None] * self.dp.size
        dist.all_gather_object(lists, items, group=self.dp.group)
        return [item for part in lists for item in part]

    def _all_reduce(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.world_size == 1:
            return list(parts)
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat)
        summed = torch.split(flat, [part.numel() for part in parts])
        return [total.reshape(part.shape) for total, part in zip(summed, parts, strict=True)]


@contextlib.contextmanager
def start_ranks(work: Callable[[Ranks], None], *, tp: int, cp: int, dp: int) -> Iterator[Ranks]:
    """Start tp·cp·dp ranks; this process is the first, and the others run ``work``, which is pickled, beside the block.

    Yields: this process's position.

    Raises:
        GeomaskError: an error of this type that another rank raised.
        RankError: another rank died, or raised another exception.
    """
    if tp * cp * dp == 1:
        yield Ranks()
        return
    build_ranks = functools.partial(Ranks.of, tp=tp, cp=cp, dp=dp)
    with lead_ranks(tp * cp * dp, _run_rank, work, build_ranks):
        yield build_ranks()


def _run_rank(rank: int, world_size: int, work: Callable[[Ranks], None], build_ranks: Callable[[], Ranks]) -> None:
    work(build_ranks())


def _build_axis(size: int, stride: int) -> Axis:
    if size == 1:
        return Axis()
    rank = dist.get_rank()
    group_of_rank = None
    for start in range(dist.get_world_size()):
        if start // stride % size == 0:
            # All processes must take part in creating a group, members or not.
            group = dist.new_group(
                [start + index * stride for index in range(size)], timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)
            )
            group_of_rank = group if start == rank - rank // stride % size * stride else group_of_rank
    return Axis(rank // stride % size, size, group_of_rank)
