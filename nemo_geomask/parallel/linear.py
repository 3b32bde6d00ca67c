"""Log-probs of target tokens from hidden states and the output weight: the logits exist one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.kernels import choose, cpu
from nemo_geomask.parallel.agreement import Keywords, Options, Shards
from nemo_geomask.parallel.softmax import check_temperature, goals_of, incoming, shards_of, softmax
from nemo_geomask.segments.across import gathered

__all__ = ["TILE_BYTES", "linear_logprobs"]

TILE_BYTES = {"cpu": 20 << 20, "cuda": 512 << 20}
"""Default size of the tile of logits: on a GPU what keeps the matrix products at their speed, on a CPU what leaves
the step's memory a small part of the logits', copies in float32 included."""
_HALF = (torch.bfloat16, torch.float16)
_MULTIPLE = 256  # of a tile's sides, which matrix units like


class LinearKeywords(Keywords, total=False):
    """Those of :func:`linear_logprobs`."""

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
    r"""Log-softmax of the targets, and on request the entropy, without the matrix of logits.

    .. math:: x = h W^\top + b, \qquad \log p_y = x_y/T - \log\sum_j e^{x_j/T}, \qquad H = -\sum_j p_j \log p_j

    What :func:`vocab_parallel_logprobs` computes of the logits, with the same kernels, from one tile of them at a time
    in a buffer that all tiles share. Rows that don't train never enter a matrix product. The backward pass makes each
    tile but the last again: up to four matrix products instead of three. A tile takes all rows and some columns, so
    that a part of the weight's gradient is finished at once and rounded once, and the hidden states' gradient is summed
    in float32; with more rows than columns it is the other way round. One tile that is enough for all needs no sum.

    One collective forward, of four numbers a token; one backward, of the hidden states' gradient, if ``group`` has
    several ranks. Under ``sequence_parallel`` the hidden states are gathered before.

    Logits have the type of ``weight``, as those of a model do; on a CPU, which is slow at half precision, float32.
    Beyond inputs and gradients it holds one tile, from the forward pass to the end of the backward pass, the trained
    rows of the hidden states, the smaller of the two gradients of several tiles in float32, a few numbers a token.

    Args:
        hidden: [..., H], floating point: input of the output layer, whole on each rank of ``group``; under
            ``sequence_parallel`` [N/TP, ...], this rank's share of the first dimension.
        weight: [V/TP, H], this rank's rows of the output weight, tied or not.
        targets: [...] int64, leading shape of the (gathered) hidden states; the same on all ranks of ``group``.
        bias: [V/TP], or None.
        group, temperature, vocab_size, shard_sizes, ignore_index, validate, kernel: see
            :func:`vocab_parallel_logprobs`.
        sequence_parallel: the ranks of ``group`` hold shares of the rows, in rank order; so is the gradient.
        entropy: also return H; differentiable.
        softcap: c, where the model's logits are :math:`c\tanh(x/c)`.
        main_grad: [V/TP, H] float32 to add the weight's gradient to, as Megatron's optimizer keeps one; the weight
            gets none through autograd then.
        tile_bytes: of the logits that exist at a time, and of what is converted for them; None: :data:`TILE_BYTES` of
            the device.

    Returns: log-probs [...] float32, or the pair (log-probs, entropy), in nats.
    Raises:
        ShapeError: shapes or dtypes don't fit.
        ArgumentError: a temperature, softcap, ``tile_bytes`` or ``vocab_size`` out of range; ``sequence_parallel``
            without a group.
        DataError, RanksDisagreeError: see :func:`vocab_parallel_logprobs`.

    Source: the recomputation in tiles is that of cut cross-entropy, Wijmans et al., arXiv:2411.09009.
    """
    world = 1 if group is None else dist.get_world_size(group)
    _check(hidden, weight, targets, bias, main_grad, world if sequence_parallel else 1)
    check_temperature(temperature)
    if sequence_parallel and group is None:
        raise ArgumentError("sequence_parallel says that the ranks of a group share the rows, but group is None")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ArgumentError(f"softcap must be above 0 and finite, or None, but it is {softcap}")
    budget = TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"]) if tile_bytes is None else tile_bytes
    if budget < 1:
        raise ArgumentError(f"tile_bytes must be above 0, but it is {tile_bytes}")
    shards = shards_of(weight.shape[0], group, shard_sizes, vocab_size)
    options = Options(temperature, ignore_index, entropy, validate, choose(hidden, kernel))
    head = _Head(shards, options, softcap, main_grad, budget, sequence_parallel and world > 1)
    # In the weight's type, as the output layer would take them.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
    apply: Any = _Linear.apply
    result: tuple[Tensor, ...] = apply(rows, weight, bias, targets, head)
    return (result[0], result[1]) if entropy else result[0]


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, main_grad: Tensor | None, shares: int
) -> None:
    leading = hidden.shape[:-1]
    whole = (leading[0] * shares, *leading[1:]) if leading else leading
    if not leading or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or tuple(targets.shape) != tuple(whole):
        given = f"; under sequence_parallel targets are {shares} times as long" if shares > 1 else ""
        raise ShapeError(
            "hidden must be [..., H], weight [V/TP, H] and targets [...] of the same leading shape, but they are "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(targets.shape)}{given}"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point() or targets.dtype != torch.int64:
        raise ShapeError(
            "hidden and weight must be floating point and targets int64, but they are "
            f"{hidden.dtype}, {weight.dtype} and {targets.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ShapeError(f"bias must be floating point [{weight.shape[0]}], but it is {bias.dtype} {list(bias.shape)}")
    if main_grad is not None and (main_grad.shape != weight.shape or main_grad.dtype != torch.float32):
        raise ShapeError(
            f"main_grad must be float32 {list(weight.shape)}, as the weight, but it is {main_grad.dtype} "
            f"{list(main_grad.shape)}"
        )


class _Head(NamedTuple):
    shards: Shards
    options: Options
    softcap: float | None
    main_grad: Tensor | None
    budget: int
    sequence_parallel: bool


class _Tile(NamedTuple):
    rows: slice
    columns: slice
    weight: Tensor  # of these columns, in the products' type
    logits: Tensor  # in the buffer that all tiles share


class _Buffer:
    """Memory of a tile, and the start of the tile whose logits are in it: the last of the forward pass needs no other
    product in the backward pass."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.holds: int | None = None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
    ) -> tuple[Tensor, ...]:
        shards, options = head.shards, head.options
        goals = goals_of(targets, shards, options)
        rows = hidden
        if head.sequence_parallel and shards.group is not None:
            rows = gathered(hidden, shards.group).view(-1, hidden.shape[-1])
        # Their number decides the tiles' shape: the host has to know it.
        kept = goals.counted.nonzero().squeeze(1)
        count = len(goals.ids)
        whole = len(kept) == count
        rows, own = (rows, goals.ids) if whole else (rows[kept], goals.ids[kept])
        found: Tensor | None = None
        parts = []
        buffer = _Buffer()
        asked: Any = {"entropy": options.entropy, **options.of_rows}
        for tile in _tiles(_for_products(rows), weight, bias, head, buffer):
            start = shards.start + tile.columns.start
            part = options.kernels.row_statistics(tile.logits, own[tile.rows], start=start, **asked)
            if tile.rows != slice(0, len(rows)):
                parts.append(part)
            elif found is None:
                found = part
            else:
                found = options.kernels.fold(torch.stack([found, part]), options.inverse_temperature)
        if found is None:
            found = torch.cat(parts, dim=1) if parts else cpu.row_statistics(rows[:, :0], own, start=0, **asked)
        statistics = found if whole else found.new_zeros(len(found), count).index_copy_(1, kept, found)
        over_all = softmax(statistics, goals, shards, options)
        mine = (over_all.peak, over_all.mass, over_all.entropy)
        known = (own, *mine, None) if whole else (own, *(value[kept] for value in mine), kept)
        ctx.save_for_backward(rows, weight, bias, *known)
        ctx.head, ctx.count, ctx.buffer = head, count, buffer
        ctx.set_materialize_grads(False)
        results = [over_all.logprobs, over_all.entropy][: 1 + options.entropy]
        return tuple(result.reshape(targets.shape) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, *known = ctx.saved_tensors
        head: _Head = ctx.head
        options = head.options
        given = incoming(grads, *known)
        if given is None:
            return None, None, None, None, None
        wanted = ctx.needs_input_grad
        into_rows = _Sum(rows) if wanted[0] else None
        into_weight = _Sum(weight, head.main_grad) if wanted[1] else None
        of_bias = bias.new_zeros(bias.shape, dtype=torch.float32) if wanted[2] else None
        factors = _for_products(rows)
        for tile in _tiles(factors, weight, bias, head, ctx.buffer, backward=True):
            slope = None if head.softcap is None else 1 - (tile.logits / head.softcap).square()
            options.kernels.row_gradients(
                tile.logits,
                given.part(tile.rows),
                start=head.shards.start + tile.columns.start,
                valid=tile.logits.shape[1],
                out=tile.logits,
                **options.of_rows,
            )
            gradient = tile.logits if slope is None else tile.logits.mul_(slope)
            if into_rows is not None:
                into_rows.add(tile.rows, gradient, tile.weight, once=gradient.shape[1] == head.shards.own_valid)
            if into_weight is not None:
                once = head.main_grad is None and len(gradient) == len(rows)
                into_weight.add(tile.columns, gradient.T, factors[tile.rows], once=once)
            if of_bias is not None:
                of_bias[tile.columns] += gradient.sum(dim=0, dtype=torch.float32)
        ctx.buffer.memory = None
        of_rows = None if into_rows is None else _over_ranks(into_rows.result(), known[-1], ctx.count, head)
        of_weight = None if into_weight is None or head.main_grad is not None else into_weight.result()
        return of_rows, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None, None


def _for_products(rows: Tensor) -> Tensor:
    # A CPU without matrix units for half precision takes ten to a hundred times as long for it.
    return rows.float() if rows.device.type == "cpu" and rows.dtype in _HALF else rows


def _tiles(
    rows: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, buffer: _Buffer, *, backward: bool = False
) -> Iterator[_Tile]:
    """The logits of the valid columns, one tile after the other in the same memory.

    ``backward``: the caller overwrites them, and begins with the last, which may be there.
    """
    count, valid = len(rows), head.shards.own_valid
    if not count or not valid:
        return
    by_columns = count <= valid
    fixed, split = (count, valid) if by_columns else (valid, count)
    # By powers of two, so that a batch of other length seldom makes tiles of other shape.
    copies = 2 * rows.shape[1] if by_columns and weight.dtype != rows.dtype else 0
    fits = head.budget // (rows.dtype.itemsize * ((1 << (fixed - 1).bit_length()) + copies))
    step = min(split, max(fits // _MULTIPLE * _MULTIPLE, min(fits, _MULTIPLE), 1))
    if buffer.memory is None:
        buffer.memory, buffer.holds = torch.empty(fixed * step, dtype=rows.dtype, device=rows.device), None
    starts = range(0, split, step)
    for start in reversed(starts) if backward else starts:
        part, all_ = slice(start, min(start + step, split)), slice(0, fixed)
        of_rows, of_columns = (all_, part) if by_columns else (part, all_)
        factor = weight[of_columns].to(rows.dtype)
        logits = buffer.memory[: fixed * (part.stop - start)].view(-1, len(factor))
        if buffer.holds != start:
            torch.mm(rows[of_rows], factor.T, out=logits)
            if bias is not None:
                logits += bias[of_columns]
            if head.softcap is not None:
                logits.div_(head.softcap).tanh_().mul_(head.softcap)
        buffer.holds = None if backward else start
        yield _Tile(of_rows, of_columns, factor, logits)


class _Sum:
    """A gradient that tiles add up to: in float32, or where one tile alone makes a part of it, at once in its type."""

    def __init__(self, of: Tensor, total: Tensor | None = None) -> None:
        self._of, self._total = of, total

    def add(self, part: slice, left: Tensor, right: Tensor, *, once: bool) -> None:
        """``left @ right`` into the rows ``part``; ``once``: nothing else is there or comes to them."""
        if self._total is None:
            self._total = self._of.new_zeros(self._of.shape, dtype=self._of.dtype if once else torch.float32)
        into = self._total[part]
        if once and left.dtype == into.dtype:
            torch.mm(left, right, out=into)
        elif once:
            into.copy_(left @ right)
        elif left.dtype == torch.float32:
            into.addmm_(left, right)
        elif left.device.type == "cuda":
            torch.ops.aten.addmm.dtype_out(into, left, right, torch.float32, out=into)
        else:
            into += left @ right

    def result(self) -> Tensor:
        """The gradient in its type."""
        return torch.zeros_like(self._of) if self._total is None else self._total.to(self._of.dtype)


def _over_ranks(gradient: Tensor, kept: Tensor | None, count: int, head: _Head) -> Tensor:
    """The hidden states' gradient, summed over the ranks' columns; of this rank's rows under sequence parallelism."""
    shards = head.shards
    if shards.group is not None and len(shards.sizes) > 1 and not head.sequence_parallel:
        dist.all_reduce(gradient, group=shards.group)
    if kept is not None:
        gradient = gradient.new_zeros(count, gradient.shape[1]).index_copy_(0, kept, gradient)
    if not head.sequence_parallel:
        return gradient
    share = gradient.new_empty(count // len(shards.sizes), gradient.shape[1])
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    scatter(share, gradient, group=shards.group)
    return share
