"""Megatron-core: groups from ``parallel_state``, shares from ``PackedSeqParams``, log-probs from sharded logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.errors import DataError, MissingDependencyError, ShapeError
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

__all__ = ["pack_batch", "packed_segments", "policy_loss"]

_IGNORE = -100
_TOKEN_KEYS = (
    "advantages",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "token_mask",
)


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


def packed_segments(params: PackedSeqParams, device: torch.device | str = "cpu") -> PackedSegments:
    """Segments of this rank's share of a packed row.

    Args:
        params: Megatron's ``PackedSeqParams`` in format ``thd``; its padded offsets are used where it has them.
        device: where the tokens are.

    Returns:
        Segments whose statistics cross the context-parallel group.

    Raises:
        ShapeError: the offsets don't fit the context-parallel size.
    """
    state = _parallel_state()
    size = state.get_context_parallel_world_size()
    return PackedSegments(
        _row_offsets(params),
        device=device,
        cp_rank=state.get_context_parallel_rank(),
        cp_size=size,
        groups=(state.get_context_parallel_group(),) if size > 1 else (),
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
        DataError: a tensor is missing.
        ShapeError: the batch has another number of rows than the packing has sequences, or its tensors differ in shape.
    """
    missing = [key for key in ("token_mask", "sample_mask", "input_ids") if key not in data]
    if missing:
        raise DataError(f"data['{missing[0]}'] is missing; packing needs token_mask, sample_mask and input_ids")
    rows, width = data["token_mask"].shape
    if rows != segments.count:
        raise ShapeError(f"data['token_mask'] has {rows} rows, but PackedSeqParams packs {segments.count} sequences")
    for key in ("input_ids", *_TOKEN_KEYS):
        if key in data and data[key].shape != (rows, width):
            raise ShapeError(
                f"data['{key}'] must be [{rows}, {width}] as data['token_mask'] is, but it is {list(data[key].shape)}"
            )
    device = segments.token_index.device
    lengths = torch.as_tensor(params.cu_seqlens_q, dtype=torch.int64, device=device).diff()
    starts = torch.as_tensor(_row_offsets(params), dtype=torch.int64, device=device)
    row = segments.spread(torch.arange(rows, device=device))
    column = segments.token_index - starts[:-1][row] + 1
    # The last token of a sequence and the padding behind it predict nothing.
    inside = column < lengths[row].clamp(max=width)
    column = torch.where(inside, column, 0)

    packed = {key: value for key, value in data.items() if isinstance(value, Tensor) and value.dim() == 1}
    for key in _TOKEN_KEYS:
        if key in data:
            packed[key] = torch.where(inside, data[key][row, column], 0)
    train = packed["token_mask"].bool() & data["sample_mask"].bool()[row]
    packed["targets"] = torch.where(train, data["input_ids"][row, column], _IGNORE)
    return packed


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
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a packed microbatch from Megatron's logits, in one call whatever the number of sequences.

    Only two numbers a token cross the tensor-parallel group and [k, S] statistics the context-parallel one.

    Args:
        loss: from :func:`nemo_geomask.build_loss`.
        logits: this rank's, [1, N, V/TP] as ``GPTModel`` returns them for packed input.
        data: NeMo-RL's microbatch [B, T], see :func:`pack_batch`; ``input_ids`` among it.
        params: the packing that the model ran with.
        global_valid_seqs: valid sequences in the optimiser step.
        global_valid_toks: valid tokens in the optimiser step.
        temperature: of sampling.
        vocab_size: valid tokens where Megatron padded the vocabulary.

    Returns:
        The whole loss and metrics, alike on all ranks; the gradient is the whole's for this rank's logits. Where
        gradients are averaged over context-parallel ranks, multiply the loss by their number.

    Raises:
        ShapeError, DataError: tensors that don't fit, missing ones, targets outside the vocabulary.
    """
    state = _parallel_state()
    segments = packed_segments(params, logits.device)
    packed = pack_batch(data, params, segments)
    if logits.shape[:-1] != (1, segments.token_index.numel()):
        raise ShapeError(
            f"logits must be [1, {segments.token_index.numel()}, V/TP], this rank's share of the packed row, but they "
            f"are {list(logits.shape)}"
        )
    _check_targets(data, vocab_size or logits.shape[-1] * state.get_tensor_model_parallel_world_size())
    group = state.get_tensor_model_parallel_group() if state.get_tensor_model_parallel_world_size() > 1 else None
    logprobs = vocab_parallel_logprobs(
        logits[0],
        packed["targets"],
        group=group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=_IGNORE,
    )
    return loss.packed(logprobs, packed, segments, global_valid_seqs, global_valid_toks)


def _check_targets(data: Mapping[str, Tensor], vocab_size: int) -> None:
    # On the whole rows, which every context-parallel rank holds, so that all of them raise and none waits for another.
    ids = data["input_ids"][:, 1:]
    trained = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool().unsqueeze(-1)
    wrong = trained & ((ids < 0) | (ids >= vocab_size))
    if bool(wrong.any()):
        raise DataError(
            f"data['input_ids'] holds {int(wrong.sum())} trained tokens outside the vocabulary of {vocab_size}, the "
            f"first is {int(ids[wrong][0])}"
        )
