"""Computation of the logits one tile at a time in shared memory, and gradients summed over the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_HALF_PRECISION = (torch.bfloat16, torch.float16)
_SIDE_MULTIPLE = 256  # matrix units are at their fastest on tiles whose sides are multiples of this


class Tile(NamedTuple):
    """Logits of some rows and some columns of a shard.

    Attributes:
        rows: slice of the tile's R rows among all rows.
        columns: slice of the tile's C columns among the shard's columns.
        weight: [C, H], rows of the output weight that belong to these columns, in the type of the matrix products.
        logits: [R, C], in the buffer that all tiles share.
    """

    rows: slice
    columns: slice
    weight: Tensor
    logits: Tensor


class TileBuffer:
    """The memory that all tiles share, and which tile's logits are in it.

    The backward pass begins with the tile that the forward pass computed last, whose logits are still in memory.

    Attributes:
        memory: 1-d, in the type of the matrix products; None before the first tile.
        start: first row or column (in the direction that is divided into tiles) of the tile whose logits are in memory;
            None if they were overwritten.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.start: int | None = None


def to_product_dtype(rows: Tensor) -> Tensor:
    """Return the rows in the type of the matrix products: half precision becomes float32 on a CPU.

    A CPU without matrix units for half precision is ten to a hundred times slower with it.
    """
    return rows.float() if rows.device.type == "cpu" and rows.dtype in _HALF_PRECISION else rows


def iterate_tiles(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    buffer: TileBuffer,
    *,
    valid_columns: int,
    tile_bytes: int,
    softcap: float | None,
    backward: bool = False,
) -> Iterator[Tile]:
    """Yield the logits of all rows and all valid columns, one tile after another in the buffer's memory.

    Args:
        rows: [N, H], hidden states from :func:`to_product_dtype`.
        weight: [V/TP, H].
        bias: [V/TP], or None.
        buffer: the same for the forward and the backward pass of a call.
        valid_columns: number of columns that take part.
        tile_bytes: largest size in bytes of a tile's logits plus the copies of the weight that are converted for them.
        softcap: c, if the logits are c·tanh(x/c); None for plain logits x.
        backward: iterate from the last tile to the first, and let the caller overwrite the logits.
    """
    count = len(rows)
    if not count or not valid_columns:
        return
    # The longer side of the matrix of logits is divided into steps. A tile has all of the shorter side.
    by_columns = count <= valid_columns
    fixed, divided = (count, valid_columns) if by_columns else (valid_columns, count)
    # Each column has a converted copy of its row of the weight. The copies of the last tile still exist while those of
    # the next tile are made, hence the factor of 2.
    converted_weight = 2 * rows.shape[1] if by_columns and weight.dtype != rows.dtype else 0
    # The length of the fixed side is rounded up to a power of two, so that batches of other lengths seldom change the
    # step.
    max_step = tile_bytes // (rows.dtype.itemsize * ((1 << (fixed - 1).bit_length()) + converted_weight))
    step = min(divided, max(max_step // _SIDE_MULTIPLE * _SIDE_MULTIPLE, min(max_step, _SIDE_MULTIPLE), 1))
    if buffer.memory is None:
        buffer.memory, buffer.start = torch.empty(fixed * step, dtype=rows.dtype, device=rows.device), None
    starts = range(0, divided, step)
    for start in reversed(starts) if backward else starts:
        in_step, in_fixed = slice(start, min(start + step, divided)), slice(0, fixed)
        tile_rows, tile_columns = (in_fixed, in_step) if by_columns else (in_step, in_fixed)
        tile_weight = weight[tile_columns].to(rows.dtype)
        logits = buffer.memory[: fixed * (in_step.stop - start)].view(-1, len(tile_weight))
        if buffer.start != start:
            torch.mm(rows[tile_rows], tile_weight.T, out=logits)
            if bias is not None:
                logits += bias[tile_columns]
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
        buffer.start = None if backward else start
        yield Tile(tile_rows, tile_columns, tile_weight, logits)


class GradientSum:
    """Sum of matrix products over the tiles, in float32: the gradient of the weight or of the hidden states.

    If a single tile determines each slice of the gradient, nothing is summed, and the type is that of ``parameter``.

    Args:
        parameter: the tensor whose gradient is summed.
        total: float32 tensor to add to; None: a new one, allocated when the first tile is added.
    """

    def __init__(self, parameter: Tensor, total: Tensor | None = None) -> None:
        self._parameter, self._total = parameter, total

    def add(self, rows: slice, a: Tensor, b: Tensor, *, only_tile: bool) -> None:
        """Add ``a @ b`` to the slice ``rows`` of the gradient.

        ``only_tile``: the slice is still 0, and no other tile adds to it.
        """
        if self._total is None:
            dtype = self._parameter.dtype if only_tile else torch.float32
            self._total = self._parameter.new_zeros(self._parameter.shape, dtype=dtype)
        total = self._total[rows]
        if only_tile and a.dtype == total.dtype:
            torch.mm(a, b, out=total)
        elif only_tile:
            total.copy_(a @ b)
        elif a.dtype == torch.float32:
            total.addmm_(a, b)
        elif a.device.type == "cuda":
            _add_product_on_gpu(total, a, b)
        else:
            total += a @ b

    def gradient(self) -> Tensor:
        """Return the gradient in the type of the parameter."""
        return torch.zeros_like(self._parameter) if self._total is None else self._total.to(self._parameter.dtype)


def _add_product_on_gpu(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b``, of half precision, to the float32 ``total``, without rounding the product."""
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
