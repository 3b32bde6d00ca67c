"""Comparison of numbers between ranks, and the error for a collective that fails because a rank is gone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import GeomaskError, LostRankError, RanksDisagreeError

_ODD_FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as int64; spreads positions over all bits


def checksum(values: Tensor) -> Tensor:
    """Return the sum of int64 values [N], each times an odd factor of its position, modulo 2^64: [1] int64.

    A change of one value or of their order changes the sum.
    """
    factors = (torch.arange(len(values), dtype=torch.int64, device=values.device) * _ODD_FACTOR) | 1
    return (factors * values).sum(dim=0, keepdim=True)


@functools.lru_cache(maxsize=64)
def integers_on_device(values: tuple[int, ...], device: str) -> Tensor:
    """Return the values as an int64 tensor on the device; repeated calls return a cached tensor."""
    # The cache matters because a copy from the host to a GPU makes the host wait for the device.
    return torch.tensor(values, dtype=torch.int64, device=device)


def copy_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host; return a function that returns the copy.

    The function waits for the kernels that were launched before the copy, not for those launched after it.
    """
    if values.device.type != "cuda":
        return lambda: values
    on_host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def read() -> Tensor:
        copied.synchronize()
        return on_host

    return read


def list_differences(values_by_rank: Mapping[str, Sequence[Any]]) -> str:
    """Return ``temperature is [1.0, 0.7], …``: the named values by rank that are not the same on all ranks."""
    return ", ".join(
        f"{name} is {list(values)}"
        for name, values in values_by_rank.items()
        if any(value != values[0] for value in values)
    )


class PackedShape(NamedTuple):
    """Numbers by which ranks compare their packed rows.

    Attributes:
        sequences: S, number of sequences.
        tokens: number of tokens of all ranks, padding included.
        lengths_checksum: :func:`checksum` of ``cu_seqlens``.
        shard: sp_rank·cp_size + cp_rank.
    """

    sequences: int
    tokens: int
    lengths_checksum: int
    shard: int


def compare_packings(by_rank: Sequence[PackedShape]) -> None:
    """Raise RanksDisagreeError unless the ranks hold the shards of one packed row, each shard once."""
    counts, tokens, checksums, shards = zip(*by_rank, strict=True)
    differences = list_differences({"the number of sequences": counts, "the number of tokens": tokens})
    differing_ranks = [rank for rank, value in enumerate(checksums) if value != checksums[0]]
    if differences or differing_ranks:
        lengths = f"the lengths of the sequences on ranks {differing_ranks} are not those on rank 0"
        raise RanksDisagreeError(
            f"the ranks hold different packings: by rank, {differences or lengths}; give all ranks of the groups the "
            "same cu_seqlens"
        )
    if sorted(shards) != list(range(len(shards))):
        raise RanksDisagreeError(
            f"the ranks hold the shards {list(shards)} (sp_rank·cp_size + cp_rank), but together they must be 0 to "
            f"{len(shards) - 1}, each once; give every rank its own cp_rank and sp_rank"
        )


@contextlib.contextmanager
def as_lost_rank_error() -> Iterator[None]:
    """Turn an error of the communication backend in the ``with`` block into a LostRankError that quotes it.

    Other errors pass unchanged. An error of a GPU's backend may end the process before it reaches Python.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GeomaskError) or not _is_from_backend(error):
            raise
        raise LostRankError(
            f"{str(error).strip()}\nA collective failed. Most often another rank of the group has ended or raised an "
            "error, did not make the same call within the group's timeout, or sent a tensor of another size; look for "
            "the first error in the logs of all ranks"
        ) from error


def _is_from_backend(error: RuntimeError) -> bool:
    """Return True for an error of torch.distributed or of the libraries below it."""
    # Gloo's errors have no type of their own; they begin with the path of its source file.
    return isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo/", "NCCL"))
