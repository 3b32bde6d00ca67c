"""Log-probs of target tokens from logits whose vocabulary is sharded over tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.functional.entry import check_dense
from nemo_geomask.kernels import choose
from nemo_geomask.parallel.logprob_options import (
    LogprobKeywords,
    LogprobOptions,
    VocabShards,
    check_temperature,
    vocab_shards,
)
from nemo_geomask.parallel.softmax import check_targets, gradient_inputs, merge_shards


@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[False] = ...,
    inplace_gradient: bool = ...,
    **keywords: Unpack[LogprobKeywords],
) -> Tensor: ...
@overload
def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[True],
    inplace_gradient: bool = ...,
    **keywords: Unpack[LogprobKeywords],
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
    r"""Compute the log-softmax of the targets over a sharded vocabulary and, on request, the entropy.

    .. math:: \log p_y = x_y/T - \log\sum_j e^{x_j/T}, \qquad H = -\sum_j p_j \log p_j

    All arithmetic is float32. The largest logit is subtracted before the division by the temperature, so that the
    precision does not depend on the size of the logits. The forward pass has two collectives. One is an all-gather of
    four numbers a token, which are merged in rank order so that all ranks hold the same bits. The other is an
    all-gather of nine integers, by which the ranks compare their arguments. The backward pass has none. Besides the
    logits and their gradient, the memory is a few numbers a token and one block of rows for each thread.

    Args:
        logits: [..., V/TP], floating point: this rank's columns.
        targets: [...] int64, token ids of the global vocabulary; the same on all ranks of ``group``.
        group: tensor-parallel group; None if this rank holds the whole vocabulary.
        temperature: T > 0.
        entropy: also return H; differentiable.
        vocab_size: number of valid tokens if the vocabulary is padded at its end; the columns after them take no part.
            None: all are valid.
        shard_sizes: number of columns of each rank, if they differ; None: all ranks have as many as this one.
        ignore_index: rows whose target has this value are not read; their log-prob, entropy and gradient are 0.
        inplace_gradient: write the gradient of the logits into the logits themselves, so that a step holds one tensor
            of their size instead of two. The logits are gone after the backward pass. If autograd has kept them for
            anything else (another loss on them, an operation that produced them and saved its output, a second backward
            pass), that fails with autograd's own error about a tensor modified in place.
        validate: check that every target is in a shard, and that the ranks of ``group`` agree on targets, shards and
            settings. The host reads one flag back from the device for this. If False, the log-prob of a target in no
            shard is NaN.
        kernel: ``auto``, ``triton`` or ``torch``, see :func:`nemo_geomask.kernels.choose`.

    Returns: log-probs [...] float32, or the pair (log-probs, entropy), in nats.

    Raises:
        ShapeError: shapes or dtypes don't fit, or the ranks' columns aren't those of ``shard_sizes`` (of equal shards
            where it is None); the latter on all ranks.
        ArgumentError: a temperature or ``vocab_size`` is out of range; ``inplace_gradient`` with logits that are a
            leaf, or that overlap in memory.
        DataError: a target is in no rank's columns; raised on all ranks.
        RanksDisagreeError: ranks of ``group`` were given different targets, temperature, ``ignore_index``,
            ``entropy`` or ``validate``; raised on all that validate.

    Source: Megatron-LM ``vocab_parallel_cross_entropy`` for the sharding; the merge of partial softmaxes is that of
    Milakov and Gimelshein, arXiv:1805.02867.
    """
    check_dense("logits", logits)
    check_dense("targets", targets)
    if logits.shape[:-1] != targets.shape or not logits.is_floating_point() or targets.dtype != torch.int64:
        raise ShapeError(
            "logits must be floating point [..., V/TP] and targets int64 [...] of the same leading shape, but they are "
            f"{logits.dtype} {list(logits.shape)} and {targets.dtype} {list(targets.shape)}"
        )
    check_temperature(temperature)
    if inplace_gradient:
        _check_inplace(logits)
    shards = vocab_shards(logits.shape[-1], group, shard_sizes, vocab_size)
    options = LogprobOptions(temperature, ignore_index, entropy, validate, choose(logits, kernel))
    apply: Any = _VocabParallel.apply
    outputs: tuple[Tensor, ...] = apply(logits, targets, shards, options, inplace_gradient)
    return (outputs[0], outputs[1]) if entropy else outputs[0]


class _VocabParallel(torch.autograd.Function):
    """Autograd function of :func:`vocab_parallel_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shards: VocabShards, options: LogprobOptions, inplace: bool
    ) -> tuple[Tensor, ...]:
        checked = check_targets(targets, shards, options)
        statistics = [
            options.kernels.row_statistics(
                matrix[:, : shards.local_valid_columns],
                checked.ids[rows],
                start=shards.start,
                entropy=options.entropy,
                **options.kernel_arguments,
            )
            for rows, matrix in _matrices(logits.detach())
        ]
        softmax = merge_shards(
            statistics[0] if len(statistics) == 1 else torch.cat(statistics, dim=1), checked, shards, options
        )
        ctx.save_for_backward(logits, checked.ids, softmax.max_logit, softmax.sum_exp, softmax.entropy)
        ctx.shards, ctx.options, ctx.inplace = shards, options, inplace
        ctx.set_materialize_grads(False)
        outputs = (softmax.logprobs, softmax.entropy) if options.entropy else (softmax.logprobs,)
        return tuple(output.reshape(targets.shape) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, *saved = ctx.saved_tensors
        options: LogprobOptions = ctx.options
        inputs = gradient_inputs(grads, *saved)
        if inputs is None:
            return None, None, None, None, None
        logits = logits.detach()
        out = logits if ctx.inplace else options.kernels.empty_gradient(logits)
        for rows, matrix in _matrices(logits):
            options.kernels.row_gradients(
                matrix,
                inputs.slice_rows(rows),
                start=ctx.shards.start,
                valid=ctx.shards.local_valid_columns,
                out=matrix if ctx.inplace else out.view(len(inputs.targets), matrix.shape[1])[rows],
                **options.kernel_arguments,
            )
        if ctx.inplace:
            # Autograd then refuses to use the overwritten logits for anything else.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


def _matrices(logits: Tensor, first_row: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits [..., V] as matrices [rows, V] without a copy, each after the slice of its rows among all rows.

    A single matrix is yielded unless the strides prevent a view that merges the leading dimensions.
    """
    count = math.prod(logits.shape[:-1])
    try:
        matrix = logits.view(count, logits.shape[-1])
    except RuntimeError:
        for index, block in enumerate(logits):
            yield from _matrices(block, first_row + index * (count // len(logits)))
    else:
        yield slice(first_row, first_row + count), matrix


def _check_inplace(logits: Tensor) -> None:
    """Raise ArgumentError if the logits are a leaf that requires a gradient, or if they overlap in memory."""
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
