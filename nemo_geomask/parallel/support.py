"""Log-probs over the tokens that the sampler's top-k and top-p kept, in place of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_geomask.errors import ArgumentError, DataError, ShapeError
from nemo_geomask.parallel.logprob_options import VocabShards
from nemo_geomask.segments.packed_reductions import gather_ranks, reduce_over_ranks


class SampledSupport(NamedTuple):
    """The sampler's kept set S of each row, rows one after another: the tokens that it could have sampled.

    Attributes:
        token_ids: [M] int64, the kept token ids of all rows, each once in its row and the target among them.
        offsets: [N+1] int64, where each of the N rows starts in ``token_ids``.
    """

    token_ids: Tensor
    offsets: Tensor


def support_logprobs(
    logits_at: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
    support: SampledSupport,
    shards: VocabShards,
    *,
    temperature: float,
    ignore_index: int,
    validate: bool,
) -> Tensor:
    r"""Compute the log-softmax of the targets over each row's kept set, sharded and differentiable.

    .. math:: \log p_y = x_y/T - \log\sum_{j \in S} e^{x_j/T}

    The forward pass makes two all-gathers, of one and of two numbers a row, merged in rank order. The backward pass
    makes none.

    Args:
        logits_at: function of rows and local columns, both [K] int64, that returns these logits, differentiable.
        targets: [...] int64, N of them in all; the same on all ranks.
        support: the kept sets, with ids of the global vocabulary; the same on all ranks.
        shards: the shards of the vocabulary.
        temperature, ignore_index, validate: as for :func:`~nemo_geomask.parallel.vocab_parallel_logprobs`.

    Returns: [...] float32, in nats; 0 at ``ignore_index``.
    Raises: ShapeError: the offsets don't fit. DataError: a target is not in its row's kept set.
    Source: DeepSeek-V3.2, section 3.1 ("keep sampling mask"); vLLM PR 49577 returns the sets.
    """
    token_ids, offsets = support
    ids, count = targets.reshape(-1), targets.numel()
    if offsets.shape != (count + 1,) or token_ids.dim() != 1 or {token_ids.dtype, offsets.dtype} != {torch.int64}:
        raise ShapeError(
            f"support must be int64 token_ids [M] and int64 offsets [{count + 1}], one more than there are targets, "
            f"but they are {token_ids.dtype} {list(token_ids.shape)} and {offsets.dtype} {list(offsets.shape)}"
        )
    every = torch.arange(count, device=ids.device)
    rows = torch.repeat_interleave(every, offsets.diff(), output_size=len(token_ids))
    is_counted = ids != ignore_index
    if validate:
        is_kept = torch.zeros_like(is_counted).index_fill(0, rows[token_ids == ids[rows]], True)
        if bool((is_counted & ~is_kept).any()):
            row = int((is_counted & ~is_kept).nonzero()[0])
            raise DataError(
                f"support: the target {int(ids[row])} of row {row} is not among the token_ids that the sampler kept "
                "there; check that sets and targets are aligned, and that the sets have global token ids"
            )

    def held_logits(rows: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        columns = token_ids - shards.start
        is_held = (columns >= 0) & (columns < shards.local_valid_columns)
        return logits_at(rows, torch.where(is_held, columns, 0)).float() / temperature, is_held

    logits, is_held = held_logits(rows, token_ids)
    lowest = torch.full((count,), -torch.inf, dtype=torch.float32, device=ids.device)
    largest = lowest.scatter_reduce(0, rows, torch.where(is_held, logits.detach(), -torch.inf), "amax")
    if shards.group is not None:
        largest = gather_ranks(largest, shards.group).amax(dim=0)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # rows without a set, which are not counted
    exponentials = torch.where(is_held, torch.exp(logits - largest[rows]), 0.0)
    sums = torch.zeros_like(largest).index_add(0, rows, exponentials)
    target_logits, is_held = held_logits(every, torch.where(is_counted, ids, 0))
    parts = torch.stack((sums, torch.where(is_held, target_logits - largest, 0.0)))
    groups = () if shards.group is None else (shards.group,)
    # Every rank differentiates the same log-probs, so the gradient passes as it is.
    sums, target_logits = reduce_over_ranks(parts, parts[:0].detach(), 0, groups, local_gradient=True)[0]
    logprobs = target_logits - torch.log(torch.where(is_counted, sums, 1.0))
    return torch.where(is_counted, logprobs, 0.0).reshape(targets.shape)


def linear_logits_at(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    group: dist.ProcessGroup | None,
    tile_bytes: int,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function ``logits_at`` of :func:`support_logprobs` for an output layer; the arguments are the layer's.

    Products are made in pieces of at most ``tile_bytes``, which the backward pass makes anew.
    """
    hidden = sum_gradient_over_ranks(hidden, group)
    pairs = max(1, tile_bytes // (4 * hidden.shape[-1]))

    def product(rows: Tensor, columns: Tensor) -> Tensor:
        logits = (hidden[rows].float() * weight[columns].float()).sum(dim=-1)
        logits = logits if bias is None else logits + bias[columns].float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def logits_at(rows: Tensor, columns: Tensor) -> Tensor:
        pieces = zip(torch.split(rows, pairs), torch.split(columns, pairs), strict=True)
        return torch.cat([checkpoint(product, *piece, use_reentrant=False) for piece in pieces])

    return logits_at


def refuse_entropy(entropy: bool) -> None:
    """Raise ArgumentError if the entropy is requested together with kept sets."""
    if entropy:
        raise ArgumentError("entropy is that of the whole vocabulary; call again without support for it")


def sum_gradient_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the values, whose gradient is summed over ranks: what a layer sharded by columns does to its input."""
    if group is None:
        return values
    result: Tensor = _SumGradientOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _SumGradientOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_ranks(grads[0], ctx.group).sum(dim=0), None
