"""Packed rows under ``logprob_backend: nemo_rl``: NeMo-RL computes the log-probs, and the loss is called once.

NeMo-RL has two wrappers. ``SequencePackingLossWrapper`` computes log-probs of one sequence after the other, and
``SequencePackingFusionLossWrapper`` those of all sequences at once. Both ways of computing log-probs are kept, with
filtering, chunks, fused linear log-probs and the gathering over context-parallel ranks, after which every rank has all
log-probs. Only the call of the loss differs. NeMo-RL calls it for each sequence, or for the rows with their padding.
Here it is called once, with the predicted tokens of all sequences, or with the padded rows where that takes less time.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.data_keys import CURR_LOGPROBS_UNFILTERED
from nemo_geomask.hosts.nemo_rl.current_logprobs import add_fingerprints
from nemo_geomask.hosts.nemo_rl.hidden_states import HiddenStates
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.packing import predicted_tokens

_UNFILTERED = CURR_LOGPROBS_UNFILTERED
_MAX_PADDED_POSITIONS = 1 << 21
"""Positions up to which a GPU computes the loss on padded rows in less time than the host waits for their lengths."""


def wrap_packing_call(packed_loss: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of one of NeMo-RL's sequence-packing wrappers to call this package's losses once.

    Args:
        packed_loss: function that computes log-probs as NeMo-RL does and calls a loss that takes them. It is not used
            for a :class:`LogitLoss`, whose method ``packed`` takes the logits.
        original: ``__call__`` of NeMo-RL's wrapper.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = self.loss_fn
        arguments = signature.bind(self, *args, **kwargs).arguments
        logits, data = arguments["next_token_logits"], arguments["data"]
        counts = (arguments["global_valid_seqs"], arguments["global_valid_toks"])
        if isinstance(loss, LogitLoss):
            return loss.packed(
                logits,
                data,
                *counts,
                cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_q_padded=self.cu_seqlens_q_padded,
                vocab_parallel_group=self.vocab_parallel_group,
                context_parallel_group=self.context_parallel_group,
            )
        HiddenStates.refuse(logits, type(loss).__name__)
        if not isinstance(loss, PolicyLoss):
            return original(self, *args, **kwargs)
        add_fingerprints(loss, data)
        return packed_loss(self, logits, data, *counts)

    return call


def loss_by_sequence(wrapper: Any, logits: Tensor, data: Any, seqs: Tensor | float, toks: Tensor | float) -> Any:
    """Compute loss and metrics of a packed row like NeMo-RL's ``SequencePackingLossWrapper``, but in one call.

    Args:
        wrapper: NeMo-RL's, constructed with a :class:`~nemo_geomask.losses.PolicyLoss`.
        logits: [1, N/CP, V/TP], or log-probs [1, N] if NeMo-RL's model computes them.
        data: NeMo-RL's microbatch, rows [B, T].
        seqs: valid sequences of the optimiser step.
        toks: valid tokens of the optimiser step.
    """
    padded = wrapper.cu_seqlens_q if wrapper.cu_seqlens_q_padded is None else wrapper.cu_seqlens_q_padded
    # One copy to the host; NeMo-RL copies each offset by itself.
    lengths, sizes = torch.stack([wrapper.cu_seqlens_q.diff(), padded.diff()]).tolist()
    tokens, segments, _ = predicted_tokens(data, lengths, logits.device)
    if wrapper.loss_fn.use_fused_linear_logprobs:
        # The model has computed log-probs of the complete row, which are not sharded over ranks.
        starts = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=logits.device)
        index = segments.token_index + segments.spread(starts - segments.cu_seqlens[:-1])
        return wrapper.loss_fn.packed(logits[0].index_select(0, index), tokens, segments, seqs, toks)
    tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
    rows = {key: torch.split(value, 1) for key, value in tensors.items() if value.shape[:1] == (len(lengths),)}
    logprobs, unfiltered = [], []
    for number, (part, length) in enumerate(zip(_split_logits(logits, sizes, wrapper), lengths, strict=True)):
        row = {key: value[number] for key, value in rows.items()}
        row = {key: value[:, :length] if value.dim() > 1 else value for key, value in row.items()}
        loss_input, row = wrapper.prepare_fn(logits=part, data=row, **_prepare_arguments(wrapper))
        logprobs.append(loss_input["next_token_logprobs"].squeeze(0))
        if _UNFILTERED in row:
            unfiltered.append(row[_UNFILTERED].squeeze(0))
    if unfiltered:
        tokens[_UNFILTERED] = torch.cat(unfiltered)
    return wrapper.loss_fn.packed(torch.cat(logprobs), tokens, segments, seqs, toks)


def loss_at_once(wrapper: Any, logits: Tensor, data: Any, seqs: Tensor | float, toks: Tensor | float) -> Any:
    """Compute loss and metrics of a packed row like NeMo-RL's ``SequencePackingFusionLossWrapper``.

    That computes log-probs [B, T-1] at once. The loss is computed on the rows without their padding, unless a GPU
    computes it with the padding in less time than it takes to wait for the lengths.

    Args: as for :func:`loss_by_sequence`.
    """
    loss_input, rows = wrapper.prepare_fn(
        logits=logits,
        data=data,
        cu_seqlens_q=wrapper.cu_seqlens_q,
        cu_seqlens_q_padded=wrapper.cu_seqlens_q_padded,
        **_prepare_arguments(wrapper),
    )
    logprobs = loss_input["next_token_logprobs"]
    if logprobs.is_cuda and logprobs.numel() <= _MAX_PADDED_POSITIONS:
        return wrapper.loss_fn(logprobs, rows, seqs, toks)
    tokens, segments, index = predicted_tokens(rows, wrapper.cu_seqlens_q.diff().tolist(), logprobs.device)
    # The index is into rows of T columns; these have T-1, without the first.
    index = index - segments.spread(torch.arange(1, segments.count + 1, device=index.device))
    if _UNFILTERED in rows:
        tokens[_UNFILTERED] = rows[_UNFILTERED].flatten().index_select(0, index)
    return wrapper.loss_fn.packed(logprobs.flatten().index_select(0, index), tokens, segments, seqs, toks)


def _split_logits(logits: Tensor, sizes: list[int], wrapper: Any) -> Sequence[Tensor]:
    """Split this rank's logits into sequences.

    It is one operation, because the gradient of a slice is as large as the complete row.
    """
    group = wrapper.context_parallel_group
    ranks = 1 if group is None else dist.get_world_size(group)
    shares = [size // ranks for size in sizes]
    excess = logits.shape[1] - sum(shares)
    if excess < 0:
        # Fused linear log-probs end one position before the last sequence's padding.
        shares[-1] += excess
    elif excess > 0:
        # The excess is cut off and not split off: a part without a gradient would be no DTensor among DTensors.
        logits = logits.narrow(1, 0, sum(shares))
    return torch.split(logits, shares, dim=1)


def _prepare_arguments(wrapper: Any) -> dict[str, Any]:
    names = ("loss_fn", "vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")
    return {name: getattr(wrapper, name) for name in names}
