"""Log-probs of target tokens from logits whose vocabulary is sharded over tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_geomask.errors import DataError, ShapeError
from nemo_geomask.kernels.cpu import row_gradients, row_statistics

__all__ = ["vocab_parallel_logprobs"]


@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    temperature: float = ...,
    entropy: Literal[False] = ...,
    vocab_size: int | None = ...,
    shard_sizes: Sequence[int] | None = ...,
    ignore_index: int = ...,
) -> Tensor: ...
@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    temperature: float = ...,
    entropy: Literal[True],
    vocab_size: int | None = ...,
    shard_sizes: Sequence[int] | None = ...,
    ignore_index: int = ...,
) -> tuple[Tensor, Tensor]: ...
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_size: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Log-softmax of the targets over a sharded vocabulary, and on request the full-vocabulary entropy.

    .. math:: \log p_y = x_y/T - \log\sum_j e^{x_j/T}, \qquad H = -\sum_j p_j \log p_j

    All arithmetic is float32; the temperature divides inside it. One collective forward, an all-gather of two numbers
    a token (three with entropy), merged in rank order, so that all ranks hold the same bits; none backward. Beyond the
    logits and their gradient it holds a few numbers a token and one block of rows.

    Args:
        logits: [..., V/TP], floating point: this rank's columns.
        targets: [...] int64, in the numbering of the whole vocabulary; the same on all ranks of ``group``.
        group: tensor-parallel group; None is one rank that holds the whole vocabulary.
        temperature: T > 0.
        entropy: also return H; differentiable.
        vocab_size: valid tokens where the vocabulary is padded at its end; columns beyond take no part. None: all.
        shard_sizes: columns of each rank, where they differ; None: all ranks have as many as this one.
        ignore_index: targets with this value are not computed: log-prob, entropy and gradient are 0 there.

    Returns:
        Log-probs [...] float32, or the pair (log-probs, entropy), in nats.

    Raises:
        ShapeError: shapes or dtypes don't fit, or the ranks' columns aren't those of ``shard_sizes`` (of equal shards
            where it is None); the latter on all ranks.
        DataError: a target is in no rank's columns; raised on all ranks.

    Source: Megatron-LM ``vocab_parallel_cross_entropy`` for the sharding; the merge of partial softmaxes is that of
    Milakov and Gimelshein, arXiv:1805.02867.
    """
    if logits.shape[:-1] != targets.shape or not logits.is_floating_point() or targets.dtype != torch.int64:
        raise ShapeError(
            "logits must be floating point [..., V/TP] and targets int64 [...] of the same leading shape, but they are "
            f"{logits.dtype} {list(logits.shape)} and {targets.dtype} {list(targets.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ShapeError(f"temperature must be above 0 and finite, but it is {temperature}")
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    width = logits.shape[-1]
    sizes = [width] * world if shard_sizes is None else list(shard_sizes)
    # With several ranks their widths are compared after the collective, where all of them can raise.
    if len(sizes) != world or (world == 1 and sizes != [width]):
        raise ShapeError(
            f"shard_sizes {sizes} must have one entry for each of the {world} ranks of the group, and rank {rank}'s "
            f"must be its {width} columns"
        )
    start = sum(sizes[:rank])
    valid = width if vocab_size is None else min(max(vocab_size - start, 0), width)
    flat = logits.reshape(targets.numel(), width)
    result = _VocabParallel.apply(  # type: ignore[no-untyped-call]
        flat, targets.reshape(-1), group, sizes, start, valid, 1.0 / temperature, ignore_index, entropy
    )
    logprobs = result[0].reshape(targets.shape)
    return (logprobs, result[1].reshape(targets.shape)) if entropy else logprobs


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        sizes: list[int],
        start: int,
        valid: int,
        inverse_temperature: float,
        ignore_index: int,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        counted = targets != ignore_index
        local = targets - start
        statistics = row_statistics(
            logits[:, :valid],
            local,
            _selection(counted),
            inverse_temperature=inverse_temperature,
            entropy=entropy,
        )
        parts = _gather(statistics, logits.shape[1], sizes, group)
        lse = torch.logsumexp(parts[:, 0], dim=0)
        target = parts[:, 1].amin(dim=0)
        # Every rank holds the same numbers, so all of them raise.
        nowhere = torch.isposinf(target) & counted
        if bool(nowhere.any()):
            wrong = targets[nowhere]
            raise DataError(
                f"{wrong.numel()} targets are in no vocabulary shard, the first is {int(wrong[0])}; targets must be "
                f"below the vocabulary size, or ignore_index ({ignore_index})"
            )
        logprobs = torch.where(counted, target - lse, 0.0)
        expected = torch.zeros_like(lse)
        if entropy:
            expected = torch.where(counted, lse - (torch.exp(parts[:, 0] - lse) * parts[:, 2]).sum(dim=0), 0.0)
        ctx.save_for_backward(logits, local, lse, expected, counted)
        ctx.valid, ctx.inverse_temperature = valid, inverse_temperature
        ctx.set_materialize_grads(False)
        return (logprobs, expected) if entropy else (logprobs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, lse, entropy, counted = ctx.saved_tensors
        nothing = (None,) * 8
        grad_logprobs = grads[0]
        grad_entropy = grads[1] if len(grads) > 1 else None
        if grad_logprobs is None and grad_entropy is None:
            return (None, *nothing)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        # Rows that a mask removed have gradient 0 and are not read.
        active = counted & (grad_logprobs != 0)
        if grad_entropy is not None:
            active = active | (counted & (grad_entropy != 0))
        rows = _selection(active)
        whole = rows is None and ctx.valid == logits.shape[1]
        out = torch.empty_like(logits) if whole else torch.zeros_like(logits)
        row_gradients(
            logits[:, : ctx.valid],
            local,
            rows,
            inverse_temperature=ctx.inverse_temperature,
            lse=lse,
            grad_logprobs=grad_logprobs,
            entropy=entropy,
            grad_entropy=grad_entropy,
            out=out[:, : ctx.valid],
        )
        return (out, *nothing)


def _selection(active: Tensor) -> Tensor | None:
    """Indices of the active rows, None where that is all of them."""
    return None if bool(active.all()) else active.nonzero().squeeze(1)


def _gather(statistics: Tensor, width: int, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """[k, N] of each rank as [TP, k, N], in rank order; a misfit of the shards' sizes is an error on all ranks."""
    if group is None or len(sizes) == 1:
        return statistics.unsqueeze(0)
    # One more column carries each rank's width, so that wrong sizes can't shift targets silently.
    mine = torch.cat([statistics, statistics.new_full((len(statistics), 1), float(width))], dim=1)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    gathered = torch.stack(parts)
    widths = [int(found) for found in gathered[:, 0, -1].tolist()]
    if widths != sizes:
        raise ShapeError(f"the ranks hold {widths} columns, but {sizes} were assumed; give shard_sizes={widths}")
    return gathered[..., :-1]
