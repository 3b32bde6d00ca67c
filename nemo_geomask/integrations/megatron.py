"""Megatron-core: groups from ``parallel_state``, shares from ``PackedSeqParams``, log-probs from sharded logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.errors import MissingDependencyError, ShapeError
from nemo_geomask.integrations.packing import IGNORE, check_rows, pack_rows
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

__all__ = ["pack_batch", "packed_segments", "policy_loss"]


def _parallel_state() -> Any:
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise MissingDependencyError(
            'nemo_geomask.integrations.megatron needs megatron-core: pip install "nemo-geomask[megatron]"'
        ) from error
    return parallel_state


def _row_offsets(params: PackedSeqParams) -> Tensor:
    """Where sequences start in the packed row: padded offsets where there are any."""
    padded: Tensor | None = getattr(params, "cu_seqlens_q_padded", None)
    return params.cu_seqlens_q if padded is None else padded


def packed_segments(
    params: PackedSeqParams,
    device: torch.device | str = "cpu",
    *,
    sequence_parallel: bool = False,
    host_offsets: Sequence[int] | Tensor | None = None,
) -> PackedSegments:
    """Segments of this rank's share of a packed row.

    Args:
        params: Megatron's ``PackedSeqParams`` in format ``thd``; its padded offsets are used where it has them.
        device: where the tokens are.
        sequence_parallel: the loss runs on sequence-parallel shares: of a context-parallel rank's tokens, each
            tensor-parallel rank holds its slice. ``GPTModel`` gathers them before its output layer, also under its own
            ``sequence_parallel``, and needs False.
        host_offsets: the same offsets on the host (a list or CPU tensor), where the caller has them. Without them,
            those of ``params``, usually on the device, are copied from there: the one synchronisation of this call.

    Returns:
        Segments whose statistics cross the context-parallel group, or that of context and tensor parallelism together.

    Raises:
        ShapeError: the offsets don't fit the shares, or ``host_offsets`` aren't as many as those of ``params``.
    """
    state = _parallel_state()
    cp_size = state.get_context_parallel_world_size()
    sp_rank, sp_size = 0, 1
    if sequence_parallel:
        sp_rank, sp_size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
        group = state.get_tensor_and_context_parallel_group()
    else:
        group = state.get_context_parallel_group()
    offsets = _row_offsets(params)
    if host_offsets is not None and len(host_offsets) != len(offsets):
        raise ShapeError(f"host_offsets must be {len(offsets)} numbers as PackedSeqParams has, not {len(host_offsets)}")
    return PackedSegments(
        offsets if host_offsets is None else host_offsets,
        device=device,
        cp_rank=state.get_context_parallel_rank(),
        cp_size=cp_size,
        sp_rank=sp_rank,
        sp_size=sp_size,
        groups=(group,) if cp_size * sp_size > 1 else (),
    )


def pack_batch(data: Mapping[str, Tensor], params: PackedSeqParams, segments: PackedSegments) -> dict[str, Tensor]:
    """NeMo-RL's rows as this rank's packed tokens, shifted so that position t speaks of the token that it predicts.

    Args:
        data: NeMo-RL's microbatch, token tensors [B, T] with column t about token t, and [B] tensors.
        params: its packing; sequence i holds the first ``cu_seqlens_q[i+1] - cu_seqlens_q[i]`` columns of row i.
        segments: from :func:`packed_segments`.

    Returns:
        The token tensors as [N] and ``targets`` [N] int64 (-100 where a position predicts nothing that trains); [B]
        tensors as they are.

    Raises:
        MissingDataError: a tensor is missing.
        ShapeError: the batch has another number of rows than the packing has sequences, or its tensors differ in shape.
    """
    lengths = torch.as_tensor(params.cu_seqlens_q, dtype=torch.int64, device=segments.cu_seqlens.device).diff()
    return pack_rows(data, segments, starts=segments.cu_seqlens[:-1], lengths=lengths)


def policy_loss(
    loss: PolicyLoss,
    logits: Tensor,
    data: Mapping[str, Tensor],
    params: PackedSeqParams,
    *,
    global_valid_seqs: Tensor | float,
    global_valid_toks: Tensor | float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    host_offsets: Sequence[int] | Tensor | None = None,
    validate: bool = True,
) -> tuple[Tensor, Metrics]:
    """Loss of a packed microbatch from Megatron's logits, in one call whatever the number of sequences.

    Only four numbers a token cross the tensor-parallel group and [k, S] statistics the context-parallel one.

    Args:
        loss: from :func:`nemo_geomask.build_loss`.
        logits: this rank's, [1, N, V/TP] as ``GPTModel`` returns them for packed input; with ``sequence_parallel``
            [1, N, V], its share of the tokens and the whole vocabulary.
        data: NeMo-RL's microbatch [B, T], see :func:`pack_batch`; ``input_ids`` among it.
        params: the packing that the model ran with.
        global_valid_seqs: valid sequences in the optimiser step.
        global_valid_toks: valid tokens in the optimiser step.
        temperature: of sampling.
        vocab_size: valid tokens where Megatron padded the vocabulary.
        sequence_parallel: see :func:`packed_segments`.
        host_offsets: see :func:`packed_segments`.
        validate: check the batch against packing and vocabulary, and the vocabulary's shards, by flags read back from
            the device. Without it a stray target gives a NaN loss.

    Returns:
        The whole loss and metrics, alike on all ranks; the gradient is the whole's for this rank's logits. Where
        gradients are averaged over context-parallel ranks (and over the tensor-parallel ones, with
        ``sequence_parallel``), multiply the loss by their number.

    Raises:
        ShapeError, DataError: tensors that don't fit, missing ones, targets outside the vocabulary.
    """
    state = _parallel_state()
    segments = packed_segments(params, logits.device, sequence_parallel=sequence_parallel, host_offsets=host_offsets)
    packed = pack_batch(data, params, segments)
    count = segments.tokens
    if logits.shape[:-1] != (1, count):
        raise ShapeError(
            f"logits must be [1, {count}, {'V' if sequence_parallel else 'V/TP'}], this rank's share of the packed "
            f"row, but they are {list(logits.shape)}"
        )
    shards = 1 if sequence_parallel else state.get_tensor_model_parallel_world_size()
    if validate:
        _validate(data, params, segments, vocab_size or logits.shape[-1] * shards)
    logprobs = vocab_parallel_logprobs(
        logits[0],
        packed["targets"],
        group=state.get_tensor_model_parallel_group() if shards > 1 else None,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=IGNORE,
        validate=validate,
    )
    return loss.packed(logprobs, packed, segments, global_valid_seqs, global_valid_toks)


def _validate(data: Mapping[str, Tensor], params: PackedSeqParams, segments: PackedSegments, vocab_size: int) -> None:
    offsets = torch.as_tensor(_row_offsets(params), device=segments.cu_seqlens.device)
    if not torch.equal(offsets.to(torch.int64), segments.cu_seqlens):
        raise ShapeError(
            f"host_offsets are {segments.cu_seqlens.tolist()}, but PackedSeqParams has the padded offsets "
            f"{offsets.tolist()}"
        )
    check_rows(data, lengths=torch.as_tensor(params.cu_seqlens_q).diff(), vocab_size=vocab_size)
