"""Log-probs of target tokens from logits whose vocabulary is sharded over tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.kernels import choose
from nemo_geomask.parallel.agreement import Keywords, Options, Shards
from nemo_geomask.parallel.softmax import check_temperature, goals_of, incoming, shards_of, softmax

__all__ = ["vocab_parallel_logprobs"]


@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[False] = ...,
    inplace_gradient: bool = ...,
    **keywords: Unpack[Keywords],
) -> Tensor: ...
@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[True],
    inplace_gradient: bool = ...,
    **keywords: Unpack[Keywords],
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
    inplace_gradient: bool = False,
    validate: bool = True,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Log-softmax of the targets over a sharded vocabulary, and on request the full-vocabulary entropy.

    .. math:: \log p_y = x_y/T - \log\sum_j e^{x_j/T}, \qquad H = -\sum_j p_j \log p_j

    All arithmetic is float32, on distances from the largest logit: no digit depends on the logits' size, and the
    temperature divides inside it. One collective forward, an all-gather of four numbers a token, merged in rank order,
    so that all ranks hold the same bits; none backward. Beyond the logits and their gradient it holds a few numbers a
    token and one block of rows a thread.

    Args:
        logits: [..., V/TP], floating point: this rank's columns.
        targets: [...] int64, in the numbering of the whole vocabulary; the same on all ranks of ``group``.
        group: tensor-parallel group; None is one rank that holds the whole vocabulary.
        temperature: T > 0.
        entropy: also return H; differentiable.
        vocab_size: valid tokens where the vocabulary is padded at its end; columns beyond take no part. None: all.
        shard_sizes: columns of each rank, where they differ; None: all ranks have as many as this one.
        ignore_index: targets with this value are not computed: log-prob, entropy and gradient are 0 there, and the
            row is not read.
        inplace_gradient: write the gradient of the logits into the logits themselves, so that a step holds one tensor
            of their size in place of two. After the backward pass the logits are gone. Whatever else autograd has kept
            them for (another loss on them, an operation that produced them and saved its output, a second backward
            pass) then fails with autograd's own error about a tensor modified in place.
        validate: check that targets fit and that the ranks of ``group`` agree on targets, shards and settings, by one
            flag read back from the device. Without it a stray target has log-prob NaN.
        kernel: ``auto``, ``triton`` or ``torch``, see :func:`nemo_geomask.kernels.choose`.

    Returns: log-probs [...] float32, or the pair (log-probs, entropy), in nats.
    Raises:
        ShapeError: shapes or dtypes don't fit, or the ranks' columns aren't those of ``shard_sizes`` (of equal shards
            where it is None); the latter on all ranks.
        ArgumentError: a temperature or ``vocab_size`` out of range; ``inplace_gradient`` where the logits are a leaf,
            or overlap in memory.
        DataError: a target is in no rank's columns; raised on all ranks.
        RanksDisagreeError: ranks of ``group`` were given different targets, temperature, ``ignore_index``,
            ``entropy`` or ``validate``; raised on all that validate.

    Source: Megatron-LM ``vocab_parallel_cross_entropy`` for the sharding; the merge of partial softmaxes is that of
    Milakov and Gimelshein, arXiv:1805.02867.
    """
    if logits.shape[:-1] != targets.shape or not logits.is_floating_point() or targets.dtype != torch.int64:
        raise ShapeError(
            "logits must be floating point [..., V/TP] and targets int64 [...] of the same leading shape, but they are "
            f"{logits.dtype} {list(logits.shape)} and {targets.dtype} {list(targets.shape)}"
        )
    check_temperature(temperature)
    if inplace_gradient:
        _check_inplace(logits)
    shards = shards_of(logits.shape[-1], group, shard_sizes, vocab_size)
    options = Options(temperature, ignore_index, entropy, validate, choose(logits, kernel))
    apply: Any = _VocabParallel.apply
    result: tuple[Tensor, ...] = apply(logits, targets, shards, options, inplace_gradient)
    return (result[0], result[1]) if entropy else result[0]


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shards: Shards, options: Options, inplace: bool
    ) -> tuple[Tensor, ...]:
        goals = goals_of(targets, shards, options)
        parts = [
            options.kernels.row_statistics(
                rows[:, : shards.own_valid],
                goals.ids[span],
                start=shards.start,
                entropy=options.entropy,
                **options.of_rows,
            )
            for span, rows in _matrices(logits.detach())
        ]
        statistics = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        found = softmax(statistics, goals, shards, options)
        results = [found.logprobs, found.entropy][: 1 + options.entropy]
        ctx.save_for_backward(logits, goals.ids, found.peak, found.mass, found.entropy)
        ctx.shards, ctx.options, ctx.inplace = shards, options, inplace
        ctx.set_materialize_grads(False)
        return tuple(result.reshape(targets.shape) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, *saved = ctx.saved_tensors
        options: Options = ctx.options
        given = incoming(grads, *saved)
        if given is None:
            return None, None, None, None, None
        logits = logits.detach()
        out = logits if ctx.inplace else options.kernels.empty_gradient(logits)
        for span, rows in _matrices(logits):
            options.kernels.row_gradients(
                rows,
                given.part(span),
                start=ctx.shards.start,
                valid=ctx.shards.own_valid,
                out=rows if ctx.inplace else out.view(len(given.targets), rows.shape[1])[span],
                **options.of_rows,
            )
        if ctx.inplace:
            # So that autograd refuses to use the logits for anything else.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


def _matrices(logits: Tensor, begin: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """The logits as matrices [rows, V] without a copy: one, unless the leading dimensions can't be merged.

    Each with its rows' place among all, of which ``begin`` come before.
    """
    count = math.prod(logits.shape[:-1])
    try:
        rows = logits.view(count, logits.shape[-1])
    except RuntimeError:
        for index, part in enumerate(logits):
            yield from _matrices(part, begin + index * (count // len(logits)))
    else:
        yield slice(begin, begin + count), rows


def _check_inplace(logits: Tensor) -> None:
    if logits.is_leaf and logits.requires_grad:
        raise ArgumentError(
            "inplace_gradient would overwrite logits that no operation produced (a leaf); pass the output of the "
            "model, or inplace_gradient=False"
        )
    strides = sorted((stride, size) for size, stride in zip(logits.shape, logits.stride(), strict=True) if size > 1)
    reach = 1
    for stride, size in strides:
        if stride < reach:
            raise ArgumentError(
                f"inplace_gradient needs logits that don't overlap in memory, but their shape is {list(logits.shape)} "
                f"and their strides are {list(logits.stride())}; pass logits.contiguous(), or inplace_gradient=False"
            )
        reach = stride * size
