"""NeMo-RL's rows as packed tokens, whole or this rank's context-parallel share of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_geomask.errors import DataError, MissingDataError, ShapeError
from nemo_geomask.segments import PackedSegments

__all__ = ["IGNORE", "check_rows", "pack_rows", "predicted_tokens"]

IGNORE = -100
_TOKEN_KEYS = (
    "advantages",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "token_mask",
)


def pack_rows(
    data: Mapping[str, Tensor], segments: PackedSegments, *, starts: Tensor, lengths: Tensor
) -> dict[str, Tensor]:
    """Token tensors as this rank holds them, shifted so that position t speaks of the token that it predicts.

    Args:
        data: NeMo-RL's microbatch: token tensors [B, T] with column t about token t, ``input_ids`` among them, and [B]
            tensors.
        segments: where this rank's tokens lie in the packed row; B sequences.
        starts: [B] int64 on the segments' device, where each sequence starts in the packed row.
        lengths: [B] int64, how many columns of each row are the sequence; the packed row may hold padding beyond.

    Returns:
        The token tensors as [N] and ``targets`` [N] int64 (-100 where a position predicts nothing that trains); [B]
        tensors as they are.

    Raises:
        MissingDataError: a tensor is missing.
        ShapeError: the batch has another number of rows than the packing has sequences, or its tensors differ in shape.
    """
    width = _check(data, segments.count)
    device = segments.cu_seqlens.device
    row = segments.spread(torch.arange(segments.count, device=device))
    column = segments.token_index - segments.spread(starts) + 1
    # The last token of a sequence and the padding behind it predict nothing.
    inside = column < segments.spread(lengths).clamp(max=width)
    place = row * width + torch.where(inside, column, 0)
    packed = {key: torch.where(inside, value, 0) for key, value in _taken(data, place).items()}
    train = packed["token_mask"].bool() & segments.spread(data["sample_mask"].bool())
    targets = torch.where(train, data["input_ids"].reshape(-1)[place].to(torch.int64), IGNORE)
    return {**_of_sequences(data), **packed, "targets": targets}


def predicted_tokens(
    data: Mapping[str, Tensor], lengths: Sequence[int], device: torch.device
) -> tuple[dict[str, Tensor], PackedSegments, Tensor]:
    """Rows without padding and without their first tokens, which nothing predicts, one sequence after the other.

    Args:
        data: as for :func:`pack_rows`.
        lengths: of the B sequences, on the host; what exceeds the rows' width is cut.
        device: where the tokens are to be.

    Returns:
        The token tensors as [N] and [B] tensors as they are; the sequences among the N tokens; where each of these lies
        in a tensor [B, T], flattened: [N] int64.

    Raises:
        MissingDataError, ShapeError: as for :func:`pack_rows`.
    """
    width = _check(data, len(lengths))
    counts = [max(0, min(length, width) - 1) for length in lengths]
    offsets = [0, *itertools.accumulate(counts)]
    segments = PackedSegments(offsets, device=device)
    starts = [row * width + 1 - offset for row, offset in enumerate(offsets[:-1])]
    further = torch.tensor(starts, dtype=torch.int64, device=device)
    place = segments.spread(further) + segments.token_index
    return {**_of_sequences(data), **_taken(data, place)}, segments, place


def _check(data: Mapping[str, Tensor], count: int) -> int:
    """Columns of a batch that holds ``count`` sequences."""
    missing = [key for key in ("token_mask", "sample_mask", "input_ids") if key not in data]
    if missing:
        raise MissingDataError(f"data['{missing[0]}'] is missing; packing needs token_mask, sample_mask and input_ids")
    rows, width = data["token_mask"].shape
    if rows != count:
        raise ShapeError(f"data['token_mask'] has {rows} rows, but {count} sequences are packed")
    for key in ("input_ids", *_TOKEN_KEYS):
        if key in data and data[key].shape != (rows, width):
            raise ShapeError(
                f"data['{key}'] must be [{rows}, {width}] as data['token_mask'] is, but it is {list(data[key].shape)}"
            )
    return width


def _taken(data: Mapping[str, Tensor], place: Tensor) -> dict[str, Tensor]:
    return {key: data[key].flatten().index_select(0, place) for key in _TOKEN_KEYS if key in data}


def _of_sequences(data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in data.items() if isinstance(value, Tensor) and value.dim() == 1}


def check_rows(data: Mapping[str, Tensor], *, lengths: Tensor, vocab_size: int) -> None:
    """Raise for trained tokens outside their sequence or the vocabulary; one flag is read back from the device.

    On the whole rows, which every rank holds, so that all of them raise and none waits for another.

    Args:
        data: NeMo-RL's microbatch, rows [B, T].
        lengths: [B] int64, how many columns of each row are the sequence.
        vocab_size: valid tokens over all ranks.

    Raises:
        DataError: there are such tokens.
    """
    ids = data["input_ids"]
    trained = data["token_mask"].bool() & data["sample_mask"].bool().unsqueeze(-1)
    trained[:, 0] = False  # predicted by nothing
    stray = trained & ((ids < 0) | (ids >= vocab_size))
    cut = trained & (torch.arange(ids.shape[1], device=ids.device) >= lengths.to(ids.device).unsqueeze(-1))
    if not bool((stray | cut).any()):
        return
    if bool(cut.any()):
        raise DataError(
            f"data['token_mask'] trains {int(cut.sum())} tokens behind the end of their sequences, whose lengths "
            f"cu_seqlens_q gives as {lengths.tolist()}"
        )
    raise DataError(
        f"data['input_ids'] holds {int(stray.sum())} trained tokens outside the vocabulary of {vocab_size}, the first "
        f"is {int(ids[stray][0])}"
    )
