"""Loss of a packed microbatch in Megatron-core, with its process groups, ``PackedSeqParams`` and sharded logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.errors import MissingDependencyError, ShapeError
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.packing import IGNORE, check_rows, pack_rows
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def _parallel_state() -> Any:
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise MissingDependencyError(
            'nemo_geomask.hosts.megatron needs megatron-core: pip install "nemo-geomask[megatron]"'
        ) from error
    return parallel_state


def _row_offsets(params: PackedSeqParams) -> Tensor:
    """Return the offsets of the sequences in the packed row, padding included."""
    padded: Tensor | None = getattr(params, "cu_seqlens_q_padded", None)
    return params.cu_seqlens_q if padded is None else padded


def packed_segments(
    params: PackedSeqParams,
    device: torch.device | str = "cpu",
    *,
    sequence_parallel: bool = False,
    host_offsets: Sequence[int] | Tensor | None = None,
) -> PackedSegments:
    """Make the segments of this rank's shard of a packed row.

    Args:
        params: Megatron's ``PackedSeqParams`` in format ``thd``; its padded offsets are used if it has any.
        device: device of the tokens.
        sequence_parallel: True if the loss runs on sequence-parallel shards, so that each tensor-parallel rank has a
            slice of a context-parallel rank's tokens. Pass False for ``GPTModel``, which gathers the slices before its
            output layer, even under its own ``sequence_parallel``.
        host_offsets: the same offsets on the host (a list or CPU tensor), if the caller has them. Otherwise those of
            ``params`` are copied, usually from the device, which is the only synchronisation of this call.

    Returns:
        Segments whose statistics cross the context-parallel group, or the group of context and tensor parallelism.

    Raises:
        ShapeError: the offsets do not fit the shards, or ``host_offsets`` has another length than those of ``params``.
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
    """Pack NeMo-RL's rows into this rank's tokens, shifted so that position t describes the token that it predicts.

    Args:
        data: NeMo-RL's microbatch: token tensors [B, T] whose column t describes token t, and [B] tensors.
        params: its packing; sequence i is the first ``cu_seqlens_q[i+1] - cu_seqlens_q[i]`` columns of row i.
        segments: from :func:`packed_segments`.

    Returns:
        The token tensors as [N]; ``targets`` [N] int64, -100 where a position predicts no token that trains; the [B]
        tensors unchanged.

    Raises:
        MissingDataError: a tensor is missing.
        ShapeError: the number of rows is not the number of packed sequences, or the tensors' shapes differ.
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
    """Compute the loss of a packed microbatch from Megatron's logits, in one call for all sequences.

    Only four numbers per token cross the tensor-parallel group, and [k, S] statistics the context-parallel one.

    Args:
        loss: from :func:`nemo_geomask.build_loss`.
        logits: this rank's, [1, N, V/TP] as ``GPTModel`` returns them for packed input; with ``sequence_parallel``
            [1, N, V]: its shard of the tokens and the complete vocabulary.
        data: NeMo-RL's microbatch [B, T], see :func:`pack_batch`, with ``input_ids``.
        params: the packing that the model ran with.
        global_valid_seqs: valid sequences of the optimiser step.
        global_valid_toks: valid tokens of the optimiser step.
        temperature: sampling temperature.
        vocab_size: number of valid tokens if Megatron padded the vocabulary.
        sequence_parallel: see :func:`packed_segments`.
        host_offsets: see :func:`packed_segments`.
        validate: check that the batch fits the packing and the vocabulary, and that the shards fit the vocabulary. The
            checks read flags from the device. Without them, a target outside the vocabulary gives a NaN loss.

    Returns:
        Loss and metrics of the complete microbatch, equal on all ranks; the gradient is that of the complete loss with
        respect to this rank's logits. Where gradients are averaged over context-parallel ranks (and over
        tensor-parallel ranks, with ``sequence_parallel``), multiply the loss by their number.

    Raises:
        ShapeError, DataError: tensors do not fit or are missing, or targets are outside the vocabulary.
    """
    state = _parallel_state()
    segments = packed_segments(params, logits.device, sequence_parallel=sequence_parallel, host_offsets=host_offsets)
    packed = pack_batch(data, params, segments)
    count = segments.tokens
    if logits.shape[:-1] != (1, count):
        raise ShapeError(
            f"logits must be [1, {count}, {'V' if sequence_parallel else 'V/TP'}], this rank's shard of the packed "
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
