"""This process among those of a run: its place on the tensor-, context- and data-parallel axes."""

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

from nemo_geomask.processes import PATIENCE, beside

__all__ = ["Axis", "Ranks", "company"]

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism.

    Attributes:
        rank: this process's place.
        size: number of places.
        group: the processes that differ in this place alone; None where there is one place.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Ranks:
    """A process's places; a run of one process has ``Ranks()``.

    What ranks are to hold alike reaches them by one collective over all of them, so that it has the same bits
    everywhere and ranks can't drift apart.

    Attributes:
        tp: tensor-parallel: shards of the vocabulary.
        cp: context-parallel: shares of every sequence.
        dp: data-parallel: different microbatches of the same optimiser step.
    """

    tp: Axis = Axis()
    cp: Axis = Axis()
    dp: Axis = Axis()

    @classmethod
    def of(cls, *, tp: int, cp: int, dp: int) -> Ranks:
        """Places in the default process group of tp·cp·dp processes, which all of them must ask for together.

        Tensor-parallel ranks are neighbours, then context-parallel ones, as Megatron places them.
        """
        strides = (1, tp, tp * cp)
        return cls(*(_axis(size, stride) for size, stride in zip((tp, cp, dp), strides, strict=True)))

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp.size * self.cp.size * self.dp.size

    @property
    def first(self) -> bool:
        """Whether this is the process that samples and writes."""
        return not (self.tp.rank or self.cp.rank or self.dp.rank)

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the first rank, on all ranks; the others don't call it."""
        if self.world == 1:
            return make()
        box: list[Any] = [make() if self.first else None]
        dist.broadcast_object_list(box, src=0)
        made: T = box[0]
        return made

    def assemble(self, part: Tensor) -> Tensor:
        """The sum over context- and data-parallel ranks of a tensor that tensor-parallel ranks hold alike."""
        return self._total([torch.zeros_like(part) if self.tp.rank else part])[0]

    def sum_gradients(self, parameters: Iterable[Parameter], sharded: Parameter) -> None:
        """Make every rank's gradients those of the whole step.

        Context- and data-parallel ranks back-propagated different tokens, so their gradients add up. Tensor-parallel
        ranks hold equal gradients, which count once, except for ``sharded``, of which each has its own rows.
        """
        if self.world == 1:
            return
        weights = list(parameters)
        # A data-parallel rank that had no microbatch has no gradient.
        own = [
            torch.zeros_like(weight) if weight.grad is None or (self.tp.rank and weight is not sharded) else weight.grad
            for weight in weights
        ]
        for weight, gradient in zip(weights, self._total(own), strict=True):
            weight.grad = gradient

    def from_data_parallel(self, items: list[T]) -> list[T]:
        """The items of all data-parallel ranks, in rank order."""
        if self.dp.group is None:
            return items
        lists: list[Any] = [None] * self.dp.size
        dist.all_gather_object(lists, items, group=self.dp.group)
        return [item for part in lists for item in part]

    def _total(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.world == 1:
            return list(parts)
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat)
        summed = torch.split(flat, [part.numel() for part in parts])
        return [total.reshape(part.shape) for total, part in zip(summed, parts, strict=True)]


@contextlib.contextmanager
def company(work: Callable[[Ranks], None], *, tp: int, cp: int, dp: int) -> Iterator[Ranks]:
    """Make this process the first of tp·cp·dp ranks; the others run ``work`` beside the block.

    How they start and end: see :func:`nemo_geomask.processes.beside`.

    Args:
        work: picklable.
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.

    Yields:
        This process's places.

    Raises:
        GeomaskError: of another rank, as it was raised there.
        RankError: another rank died, or raised something else.
    """
    if tp * cp * dp == 1:
        yield Ranks()
        return
    places = functools.partial(Ranks.of, tp=tp, cp=cp, dp=dp)
    with beside(tp * cp * dp, _work, work, places):
        yield places()


def _work(rank: int, world: int, work: Callable[[Ranks], None], places: Callable[[], Ranks]) -> None:
    work(places())


def _axis(size: int, stride: int) -> Axis:
    if size == 1:
        return Axis()
    rank = dist.get_rank()
    mine = None
    for start in range(dist.get_world_size()):
        if start // stride % size == 0:
            # Every process has to take part in making every group.
            group = dist.new_group(
                [start + place * stride for place in range(size)], timeout=timedelta(seconds=PATIENCE)
            )
            mine = group if start == rank - rank // stride % size * stride else mine
    return Axis(rank // stride % size, size, mine)
