"""Log-probs of target tokens from hidden states and the output weight; only one tile of the logits exists at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.functional.entry import check_dense
from nemo_geomask.kernels import RowGradientInputs, choose, cpu
from nemo_geomask.parallel.logit_tiles import GradientSum, Tile, TileBuffer, iterate_tiles, to_product_dtype
from nemo_geomask.parallel.logprob_options import (
    LogprobKeywords,
    LogprobOptions,
    VocabShards,
    check_temperature,
    vocab_shards,
)
from nemo_geomask.parallel.softmax import check_targets, gradient_inputs, merge_shards
from nemo_geomask.segments.packed_reductions import gather_ranks
from nemo_geomask.segments.rank_comparison import as_lost_rank_error

# torch 2.13 renamed the function.
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

TILE_BYTES = {"cpu": 20 << 20, "cuda": 512 << 20}
"""Default size of a tile of logits in bytes, by device type.

On a GPU, smaller tiles would slow the matrix products down. On a CPU, larger ones would cost memory: with this size a
step, float32 copies included, needs far less than the whole matrix of logits would.
"""


class LinearKeywords(LogprobKeywords, total=False):
    """Keyword arguments of :func:`linear_logprobs`, for type checkers."""

    bias: Tensor | None
    sequence_parallel: bool
    softcap: float | None
    main_grad: Tensor | None
    tile_bytes: int | None


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[False] = ...,
    **keywords: Unpack[LinearKeywords],
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, entropy: Literal[True], **keywords: Unpack[LinearKeywords]
) -> tuple[Tensor, Tensor]: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    entropy: bool = False,
    softcap: float | None = None,
    vocab_size: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    main_grad: Tensor | None = None,
    tile_bytes: int | None = None,
    validate: bool = True,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Compute the log-softmax of the targets and, on request, the entropy, without the matrix of logits.

    .. math:: x = h W^\top + b, \qquad \log p_y = x_y/T - \log\sum_j e^{x_j/T}, \qquad H = -\sum_j p_j \log p_j

    The results and the kernels are those of :func:`vocab_parallel_logprobs`, but the logits are computed one tile at a
    time, in a buffer that all tiles share. Rows whose target is ``ignore_index`` enter no matrix product. The backward
    pass recomputes all tiles but the last, and therefore takes up to four matrix products where three would do with all
    logits in memory.

    A tile has all rows and some of the columns. The weight's gradient for these columns is then complete after one tile
    and is rounded once, while the hidden states' gradient is summed over the tiles in float32. With more rows than
    columns, a tile has all columns and some of the rows, and the two gradients change roles. If one tile holds all
    logits, nothing is summed.

    The forward pass has the two collectives of :func:`vocab_parallel_logprobs`: four numbers a token, and nine
    integers. The backward pass has one, the sum of the hidden states' gradient, if ``group`` has several ranks. Under
    ``sequence_parallel`` the hidden states are gathered before the forward pass.

    The logits have the type of ``weight``, as in a model, except that half precision becomes float32 on a CPU, which is
    slow at half precision. Besides inputs and gradients, these occupy memory: one tile, until the end of the backward
    pass; a copy of the rows that are not ignored; with several tiles, the gradient that is summed, in float32;
    and a few numbers a token.

    Args:
        hidden: [..., H], floating point: input of the output layer, with all rows on each rank of ``group``; under
            ``sequence_parallel`` [N/TP, ...], this rank's shard of the first dimension.
        weight: [V/TP, H], this rank's rows of the output weight, tied or not.
        targets: [...] int64, leading shape of the (gathered) hidden states; the same on all ranks of ``group``.
        bias: [V/TP], or None.
        group: tensor-parallel group. :func:`vocab_parallel_logprobs` documents it and the arguments not listed here.
        sequence_parallel: the ranks of ``group`` hold shards of the rows of ``hidden``, in rank order; each rank gets
            the gradient of its own shard.
        entropy: also return H; differentiable.
        softcap: c, where the model's logits are :math:`c\tanh(x/c)`.
        main_grad: [V/TP, H] float32, such as the gradient buffer of Megatron's optimizer. The weight's gradient is
            added to it, and autograd then returns no gradient of ``weight``. None: autograd returns it.
        tile_bytes: largest size in bytes of a tile's logits plus the copies of the weight that are converted to their
            type; None: :data:`TILE_BYTES` of the device.

    Returns: log-probs [...] float32, or the pair (log-probs, entropy), in nats.

    Raises:
        ShapeError: shapes or dtypes don't fit.
        ArgumentError: a temperature, softcap, ``tile_bytes`` or ``vocab_size`` is out of range; ``sequence_parallel``
            without a group.
        DataError: see :func:`vocab_parallel_logprobs`.
        RanksDisagreeError: see :func:`vocab_parallel_logprobs`.

    Source: the recomputation in tiles is that of cut cross-entropy, Wijmans et al., arXiv:2411.09009.
    """
    world = 1 if group is None else dist.get_world_size(group)
    _check_arguments(hidden, weight, targets, bias, main_grad, world if sequence_parallel else 1)
    check_temperature(temperature)
    if sequence_parallel and group is None:
        raise ArgumentError("sequence_parallel means that the ranks of a group share the rows, but group is None")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ArgumentError(f"softcap must be above 0 and finite, or None, but it is {softcap}")
    if tile_bytes is None:
        tile_bytes = TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"])
    if tile_bytes < 1:
        raise ArgumentError(f"tile_bytes must be above 0, but it is {tile_bytes}")
    shards = vocab_shards(weight.shape[0], group, shard_sizes, vocab_size)
    options = LogprobOptions(temperature, ignore_index, entropy, validate, choose(hidden, kernel))
    call = _CallArguments(shards, options, softcap, main_grad, tile_bytes, sequence_parallel and world > 1)
    # Converted to the weight's type, as the model's output layer would do.
    rows = hidden.flatten(0, -2).to(weight.dtype)
    apply: Any = _Linear.apply
    outputs: tuple[Tensor, ...] = apply(rows, weight, bias, targets, call)
    return (outputs[0], outputs[1]) if entropy else outputs[0]


def _check_arguments(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, main_grad: Tensor | None, row_shards: int
) -> None:
    named = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, "main_grad": main_grad}
    tensors = {name: value for name, value in named.items() if value is not None}
    for name, value in tensors.items():
        check_dense(name, value)
    leading = hidden.shape[:-1]
    expected = (leading[0] * row_shards, *leading[1:]) if leading else leading
    if not leading or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or targets.shape != expected:
        hint = f"; under sequence_parallel targets are {row_shards} times as long" if row_shards > 1 else ""
        raise ShapeError(
            "hidden must be [..., H], weight [V/TP, H] and targets [...] of the same leading shape, but they are "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(targets.shape)}{hint}"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point() or targets.dtype != torch.int64:
        raise ShapeError(
            "hidden and weight must be floating point and targets int64, but they are "
            f"{hidden.dtype}, {weight.dtype} and {targets.dtype}"
        )
    devices = {name: value.device for name, value in tensors.items()}
    elsewhere = [f"{name} is on {device}" for name, device in devices.items() if device != hidden.device]
    if elsewhere or hidden.device.type == "meta":
        raise ShapeError(
            f"all tensors must be on one device that holds data, but hidden is on {hidden.device}"
            f"{''.join(f', {part}' for part in elsewhere)}; move them to the device of the hidden states"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ShapeError(f"bias must be floating point [{weight.shape[0]}], but it is {bias.dtype} {list(bias.shape)}")
    if main_grad is not None and (main_grad.shape != weight.shape or main_grad.dtype != torch.float32):
        raise ShapeError(
            f"main_grad must be float32 {list(weight.shape)}, as the weight, but it is {main_grad.dtype} "
            f"{list(main_grad.shape)}"
        )


class _CallArguments(NamedTuple):
    """Arguments of a call that are the same in the forward and the backward pass."""

    shards: VocabShards
    options: LogprobOptions
    softcap: float | None
    main_grad: Tensor | None
    tile_bytes: int
    sequence_parallel: bool

    @property
    def tile_arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`iterate_tiles`."""
        valid_columns = self.shards.local_valid_columns
        return {"valid_columns": valid_columns, "tile_bytes": self.tile_bytes, "softcap": self.softcap}


class _Linear(torch.autograd.Function):
    """Autograd function of :func:`linear_logprobs`, on hidden states flattened to [rows, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, call: _CallArguments
    ) -> tuple[Tensor, ...]:
        shards, options = call.shards, call.options
        checked = check_targets(targets, shards, options)
        rows = hidden
        if call.sequence_parallel and shards.group is not None:
            checked.has_problem()  # raises if the gather below is not possible
            rows = gather_ranks(hidden, shards.group).flatten(0, 1)
        # The host has to know how many rows are counted, since that decides the shape of the tiles.
        counted, count, ids = checked.is_counted.nonzero().squeeze(1), len(checked.ids), checked.ids
        indices = None if len(counted) == count else counted
        if indices is not None:
            rows, ids = rows[indices], ids[indices]
        buffer = TileBuffer()
        statistics = _row_statistics(rows, ids, weight, bias, call, buffer)
        if indices is not None:
            statistics = statistics.new_zeros(len(statistics), count).index_copy_(1, indices, statistics)
        softmax = merge_shards(statistics, checked, shards, options)
        saved = [softmax.max_logit, softmax.sum_exp, softmax.entropy]
        if indices is not None:
            saved = [value[indices] for value in saved]
        ctx.save_for_backward(rows, weight, bias, ids, *saved, indices)
        ctx.call, ctx.count, ctx.buffer = call, count, buffer
        ctx.set_materialize_grads(False)
        outputs = (softmax.logprobs, softmax.entropy) if options.entropy else (softmax.logprobs,)
        return tuple(output.reshape(targets.shape) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, *saved = ctx.saved_tensors
        indices: Tensor | None = saved[-1]
        call: _CallArguments = ctx.call
        inputs = gradient_inputs(grads, *saved)
        if inputs is None:
            return None, None, None, None, None
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        hidden_sum = GradientSum(rows) if needs_hidden else None
        weight_sum = GradientSum(weight, call.main_grad) if needs_weight else None
        grad_bias = bias.new_zeros(bias.shape, dtype=torch.float32) if needs_bias else None
        product_rows = to_product_dtype(rows)
        for tile in iterate_tiles(product_rows, weight, bias, ctx.buffer, backward=True, **call.tile_arguments):
            gradient = _tile_gradient(tile, inputs.slice_rows(tile.rows), call)
            if hidden_sum is not None:
                has_all_columns = gradient.shape[1] == call.shards.local_valid_columns
                hidden_sum.add(tile.rows, gradient, tile.weight, only_tile=has_all_columns)
            if weight_sum is not None:
                only_tile = call.main_grad is None and len(gradient) == len(rows)
                weight_sum.add(tile.columns, gradient.T, product_rows[tile.rows], only_tile=only_tile)
            if grad_bias is not None:
                grad_bias[tile.columns] += gradient.sum(dim=0, dtype=torch.float32)
        ctx.buffer.memory = None
        grad_hidden = None if hidden_sum is None else _sum_over_ranks(hidden_sum.gradient(), indices, ctx.count, call)
        grad_weight = None if weight_sum is None or call.main_grad is not None else weight_sum.gradient()
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None


def _row_statistics(
    rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, call: _CallArguments, buffer: TileBuffer
) -> Tensor:
    """Compute the softmax statistics [4, N] of the rows [N, H] over this rank's columns, tile by tile."""
    shards, options = call.shards, call.options
    arguments: Any = {"entropy": options.entropy, **options.kernel_arguments}
    row_blocks: list[Tensor] = []  # statistics of each tile, if a tile has some rows and all columns
    merged: Tensor | None = None  # statistics over the tiles so far, if a tile has all rows and some columns
    for tile in iterate_tiles(to_product_dtype(rows), weight, bias, buffer, **call.tile_arguments):
        start = shards.start + tile.columns.start
        tile_statistics = options.kernels.row_statistics(tile.logits, ids[tile.rows], start=start, **arguments)
        if tile.rows != slice(0, len(rows)):
            row_blocks.append(tile_statistics)
        elif merged is None:
            merged = tile_statistics
        else:
            merged = options.kernels.fold(torch.stack([merged, tile_statistics]), options.inverse_temperature)
    if merged is not None:
        return merged
    if row_blocks:
        return torch.cat(row_blocks, dim=1)
    return cpu.row_statistics(rows[:, :0], ids, start=0, **arguments)


def _tile_gradient(tile: Tile, inputs: RowGradientInputs, call: _CallArguments) -> Tensor:
    """Overwrite the tile's logits with the gradient of the loss by the matrix product, before the softcap."""
    derivative = None if call.softcap is None else 1 - (tile.logits / call.softcap).square()
    call.options.kernels.row_gradients(
        tile.logits,
        inputs,
        start=call.shards.start + tile.columns.start,
        valid=tile.logits.shape[1],
        out=tile.logits,
        **call.options.kernel_arguments,
    )
    return tile.logits if derivative is None else tile.logits.mul_(derivative)


def _sum_over_ranks(gradient: Tensor, indices: Tensor | None, count: int, call: _CallArguments) -> Tensor:
    """Sum the hidden states' gradient over the ranks' columns; under sequence parallelism return this rank's rows.

    Args:
        gradient: [kept rows, H], from this rank's columns; rows whose target is ``ignore_index`` are not kept.
        indices: indices of the kept rows among all rows; None if all were kept.
        count: number of all rows.
        call: arguments of the call.
    """
    shards = call.shards
    if shards.group is not None and len(shards.sizes) > 1 and not call.sequence_parallel:
        with as_lost_rank_error():
            dist.all_reduce(gradient, group=shards.group)
    if indices is not None:
        gradient = gradient.new_zeros(count, gradient.shape[1]).index_copy_(0, indices, gradient)
    if not call.sequence_parallel:
        return gradient
    local_gradient = gradient.new_empty(count // len(shards.sizes), gradient.shape[1])
    with as_lost_rank_error():
        _reduce_scatter(local_gradient, gradient, group=shards.group)
    return local_gradient
