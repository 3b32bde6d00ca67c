"""NeMo-RL's rows [B, T] as packed tokens [N]: all of them, or this rank's context-parallel shard."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_geomask.data_keys import (
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    TOKEN_MASK,
    TOKEN_WEIGHT_VERSIONS,
)
from nemo_geomask.errors import DataError, MissingDataError, ShapeError
from nemo_geomask.segments import PackedSegments

IGNORE = -100
"""Target at positions that predict no trained token."""
_TOKEN_KEYS = (
    "advantages",
    PREV_LOGPROBS,
    GENERATION_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    TOKEN_MASK,
    TOKEN_WEIGHT_VERSIONS,
)


def pack_rows(
    data: Mapping[str, Tensor], segments: PackedSegments, *, starts: Tensor, lengths: Tensor
) -> dict[str, Tensor]:
    """Pack this rank's tokens, shifted so that position t describes the token that it predicts.

    Args:
        data: NeMo-RL's microbatch: token tensors [B, T] whose column t describes token t, including ``input_ids``, and
            [B] tensors.
        segments: layout of this rank's N tokens and of all B sequences.
        starts: [B] int64 on the segments' device, start of each sequence in the packed row.
        lengths: [B] int64, number of columns of each row that belong to the sequence. In the packed row, padding may
            follow each sequence.

    Returns:
        The token tensors as [N], 0 where a position predicts no token of its sequence; ``targets`` [N] int64,
        :data:`IGNORE` where a position predicts no trained token; the [B] tensors unchanged.

    Raises:
        MissingDataError: a tensor is missing.
        ShapeError: the number of rows is not the number of packed sequences, or the tensors' shapes differ.
    """
    width = _check_rows_shape(data, segments.count)
    device = segments.cu_seqlens.device
    row = segments.spread(torch.arange(segments.count, device=device))
    column = segments.token_index - segments.spread(starts) + 1
    # The last token of a sequence and the padding behind it predict nothing.
    inside = column < segments.spread(lengths).clamp(max=width)
    index = row * width + torch.where(inside, column, 0)
    packed = {key: torch.where(inside, value, 0) for key, value in _select_tokens(data, index).items()}
    mask = packed[TOKEN_MASK].bool() & segments.spread(data["sample_mask"].bool())
    targets = torch.where(mask, data["input_ids"].reshape(-1)[index].to(torch.int64), IGNORE)
    return {**_sequence_tensors(data), **packed, "targets": targets}


def predicted_tokens(
    data: Mapping[str, Tensor], lengths: Sequence[int], device: torch.device
) -> tuple[dict[str, Tensor], PackedSegments, Tensor]:
    """Pack the tokens that are predicted: each row without its first token and without its padding.

    Args:
        data: as for :func:`pack_rows`.
        lengths: lengths of the B sequences, on the host; a length beyond T counts as T.
        device: device of the packed tokens.

    Returns:
        The token tensors as [N] with the [B] tensors unchanged; the segments of the N tokens; the index [N] int64 of
        each token in a flattened [B, T] tensor.

    Raises:
        MissingDataError, ShapeError: as for :func:`pack_rows`.
    """
    width = _check_rows_shape(data, len(lengths))
    counts = [max(0, min(length, width) - 1) for length in lengths]
    offsets = [0, *itertools.accumulate(counts)]
    segments = PackedSegments(offsets, device=device)
    # A row's token at packed index i is at i + shift in the flattened [B, T] tensor; one shift for each row.
    shifts = [row * width + 1 - offset for row, offset in enumerate(offsets[:-1])]
    shift = torch.tensor(shifts, dtype=torch.int64, device=device)
    index = segments.spread(shift) + segments.token_index
    return {**_sequence_tensors(data), **_select_tokens(data, index)}, segments, index


def _check_rows_shape(data: Mapping[str, Tensor], count: int) -> int:
    """Check the shapes of a batch of ``count`` sequences; return its number of columns."""
    missing = [key for key in (TOKEN_MASK, "sample_mask", "input_ids") if key not in data]
    if missing:
        raise MissingDataError(f"data['{missing[0]}'] is missing; packing needs token_mask, sample_mask and input_ids")
    rows, width = data[TOKEN_MASK].shape
    if rows != count:
        raise ShapeError(f"data['token_mask'] has {rows} rows, but {count} sequences are packed")
    for key in ("input_ids", *_TOKEN_KEYS):
        if key in data and data[key].shape != (rows, width):
            raise ShapeError(
                f"data['{key}'] must be [{rows}, {width}] as data['token_mask'] is, but it is {list(data[key].shape)}"
            )
    return width


def _select_tokens(data: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Return the token tensors [B, T] of the batch, flattened, at ``index`` [N]."""
    return {key: data[key].flatten().index_select(0, index) for key in _TOKEN_KEYS if key in data}


def _sequence_tensors(data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the [B] tensors of the batch."""
    return {key: value for key, value in data.items() if isinstance(value, Tensor) and value.dim() == 1}


def check_rows(data: Mapping[str, Tensor], *, lengths: Tensor, vocab_size: int) -> None:
    """Check that trained tokens lie within their sequence and the vocabulary.

    Every rank holds the complete rows and checks all of them, so that either all ranks raise or none does. The check
    reads one flag from the device.

    Args:
        data: NeMo-RL's microbatch, rows [B, T].
        lengths: [B] int64, number of columns of each row that belong to the sequence.
        vocab_size: number of valid token ids, over all ranks that share the vocabulary.

    Raises:
        DataError: a trained token lies beyond the end of its sequence or outside the vocabulary.
    """
    ids = data["input_ids"]
    is_trained = data[TOKEN_MASK].bool() & data["sample_mask"].bool().unsqueeze(-1)
    is_trained[:, 0] = False  # nothing predicts the first token
    is_unknown = is_trained & ((ids < 0) | (ids >= vocab_size))
    columns = torch.arange(ids.shape[1], device=ids.device)
    is_behind_end = is_trained & (columns >= lengths.to(ids.device).unsqueeze(-1))
    if not bool((is_unknown | is_behind_end).any()):
        return
    if bool(is_behind_end.any()):
        raise DataError(
            f"data['token_mask'] trains {int(is_behind_end.sum())} tokens behind the end of their sequences, whose "
            f"lengths cu_seqlens_q gives as {lengths.tolist()}"
        )
    raise DataError(
        f"data['input_ids'] holds {int(is_unknown.sum())} trained tokens outside the vocabulary of {vocab_size}, the "
        f"first is {int(ids[is_unknown][0])}"
    )
