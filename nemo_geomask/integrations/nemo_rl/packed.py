"""Packed rows under ``logprob_backend: nemo_rl``: NeMo-RL computes the log-probs, our loss is called once.

NeMo-RL's wrappers compute log-probs in one of two ways, for one sequence after the other or for all at once, and both
are kept as they are: filtering, chunks, fused linear log-probs, and the gathering over context-parallel ranks, after
which every rank holds all of them. What differs is the loss: it gets the predicted tokens of all sequences in one call,
where NeMo-RL makes one a sequence, or one on the rows with all their padding, as we do where that costs less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.integrations.packing import predicted_tokens

__all__ = ["at_once", "by_sequence"]

_UNFILTERED = "curr_logprobs_unfiltered"
_WITH_PADDING = 1 << 21
"""Positions up to which a GPU computes the loss on padded rows in less time than the host waits for their lengths."""


def by_sequence(wrapper: Any, logits: Tensor, data: Any, seqs: Tensor | float, toks: Tensor | float) -> Any:
    """Loss and metrics of a packed row, as NeMo-RL's ``SequencePackingLossWrapper`` but with one call of the loss.

    Args:
        wrapper: NeMo-RL's, constructed with a :class:`~nemo_geomask.losses.PolicyLoss`.
        logits: [1, N/CP, V/TP], or log-probs [1, N] where NeMo-RL's model computes those.
        data: NeMo-RL's microbatch, rows [B, T].
        seqs: valid sequences in the optimiser step.
        toks: valid tokens in it.
    """
    padded = wrapper.cu_seqlens_q if wrapper.cu_seqlens_q_padded is None else wrapper.cu_seqlens_q_padded
    # Read once; NeMo-RL reads each offset by itself.
    lengths, sizes = torch.stack([wrapper.cu_seqlens_q.diff(), padded.diff()]).tolist()
    tokens, segments, _ = predicted_tokens(data, lengths, logits.device)
    if wrapper.loss_fn.use_fused_linear_logprobs:
        # All of them are there already, and nothing splits the row over ranks.
        starts = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=logits.device)
        place = segments.token_index + segments.spread(starts - segments.cu_seqlens[:-1])
        return wrapper.loss_fn.packed(logits[0].index_select(0, place), tokens, segments, seqs, toks)
    tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
    rows = {key: torch.split(value, 1) for key, value in tensors.items() if value.shape[:1] == (len(lengths),)}
    logprobs, unfiltered = [], []
    for index, (part, length) in enumerate(zip(_split(logits, sizes, wrapper), lengths, strict=True)):
        row = {key: value[index][:, :length] if value[index].dim() > 1 else value[index] for key, value in rows.items()}
        given, row = wrapper.prepare_fn(logits=part, data=row, **_arguments(wrapper))
        logprobs.append(given["next_token_logprobs"].squeeze(0))
        if _UNFILTERED in row:
            unfiltered.append(row[_UNFILTERED].squeeze(0))
    if unfiltered:
        tokens[_UNFILTERED] = torch.cat(unfiltered)
    return wrapper.loss_fn.packed(torch.cat(logprobs), tokens, segments, seqs, toks)


def at_once(wrapper: Any, logits: Tensor, data: Any, seqs: Tensor | float, toks: Tensor | float) -> Any:
    """Loss and metrics of a packed row, as NeMo-RL's ``SequencePackingFusionLossWrapper``, which computes log-probs
    [B, T-1] at once.

    On the rows without their padding, unless a GPU computes it in less time than it takes to wait for the lengths.

    Args: as for :func:`by_sequence`.
    """
    given, rows = wrapper.prepare_fn(
        logits=logits,
        data=data,
        cu_seqlens_q=wrapper.cu_seqlens_q,
        cu_seqlens_q_padded=wrapper.cu_seqlens_q_padded,
        **_arguments(wrapper),
    )
    logprobs = given["next_token_logprobs"]
    if logprobs.is_cuda and logprobs.numel() <= _WITH_PADDING:
        return wrapper.loss_fn(logprobs, rows, seqs, toks)
    tokens, segments, place = predicted_tokens(rows, wrapper.cu_seqlens_q.diff().tolist(), logprobs.device)
    # Each row of what is predicted is one shorter.
    place = place - segments.spread(torch.arange(1, segments.count + 1, device=place.device))
    if _UNFILTERED in rows:
        tokens[_UNFILTERED] = rows[_UNFILTERED].flatten().index_select(0, place)
    return wrapper.loss_fn.packed(logprobs.flatten().index_select(0, place), tokens, segments, seqs, toks)


def _split(logits: Tensor, sizes: list[int], wrapper: Any) -> Sequence[Tensor]:
    """Each sequence's positions on this rank, by one operation: a slice's gradient is as large as the whole row."""
    group = wrapper.context_parallel_group
    ranks = 1 if group is None else dist.get_world_size(group)
    shares = [size // ranks for size in sizes]
    beyond = logits.shape[1] - sum(shares)
    if beyond < 0:
        # Fused linear log-probs end one before the last sequence's padding.
        shares[-1] += beyond
    elif beyond > 0:
        # Not as a part of its own: without a gradient, it would be no DTensor among those of the others.
        logits = logits.narrow(1, 0, sum(shares))
    return torch.split(logits, shares, dim=1)


def _arguments(wrapper: Any) -> dict[str, Any]:
    names = ("loss_fn", "vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")
    return {name: getattr(wrapper, name) for name in names}
