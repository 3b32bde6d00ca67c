"""Tensors of a NeMo-RL microbatch as the trainer passed them: which a loss reads, and whether their shapes fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import (
    CURR_LOGPROBS_KEEP_MASK,
    CURR_LOGPROBS_UNFILTERED,
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    TOKEN_MASK,
    TOKEN_WEIGHT_VERSIONS,
    TRAINING_WEIGHT_VERSION,
)
from nemo_geomask.errors import MissingDataError, ShapeError
from nemo_geomask.functional.entry import check_dense
from nemo_geomask.segments import PackedSegments

BATCH_KEYS = {
    "advantages": "advantages",
    "prev": PREV_LOGPROBS,
    "gen": GENERATION_LOGPROBS,
    "ref": REFERENCE_POLICY_LOGPROBS,
    "unfiltered": CURR_LOGPROBS_UNFILTERED,
    "keep_mask": CURR_LOGPROBS_KEEP_MASK,
    "rewards": "rewards",
    "metrics_ref": REFERENCE_POLICY_LOGPROBS,
    "audited_prev": PREV_LOGPROBS,
    "sampled_version": TOKEN_WEIGHT_VERSIONS,
    "version": TRAINING_WEIGHT_VERSION,
}
"""NeMo-RL's batch key of each tensor that a loss may read in addition to the masks.

``metrics_ref`` and ``audited_prev`` are optional reads of the same keys as ``ref`` and ``prev``, for metrics only.
"""
_OPTIONAL = ("unfiltered", "rewards", "metrics_ref", "audited_prev", "keep_mask")
CHECKED = ("advantages", "gen", "prev", "ref", "unfiltered", "sampled_version")
"""Those whose values must be finite where a token is trained."""
BY_SEQUENCE = ("rewards", "version")
"""Those with one value for each sequence."""
_VERSION_REMEDY = (
    ", for loss_fn.proximal_policy: interpolated or max_token_lag. Add it in a training loop of your own "
    "(docs/reference/nemo_rl.md says where NeMo-RL has it), or remove the setting"
)
_REMEDIES = {
    REFERENCE_POLICY_LOGPROBS: "; without a reference policy, set reference_policy_kl_penalty: 0",
    TOKEN_WEIGHT_VERSIONS: _VERSION_REMEDY,
    TRAINING_WEIGHT_VERSION: _VERSION_REMEDY,
}


class RawBatch(NamedTuple):
    """Tensors of a microbatch as the trainer passed them, with shapes and dtypes checked."""

    curr: Tensor  # token layout, floating point, with gradient
    token_mask: Tensor  # token layout
    sample_mask: Tensor  # [S]
    tensors: dict[str, Tensor]  # by the names of BATCH_KEYS; token layout, those of BY_SEQUENCE [S]
    batch_scalars: Tensor | None = None  # [k], numbers computed over the whole batch, see LossConfig.batch_scalars

    @property
    def differentiable_inputs(self) -> list[Tensor]:
        """Tensors that the loss is differentiated by: ``curr``, and the unfiltered log-probs if the batch has them."""
        return [self.curr, self.tensors["unfiltered"]] if "unfiltered" in self.tensors else [self.curr]

    def with_differentiable_inputs(self, inputs: Sequence[Tensor]) -> RawBatch:
        """Return a copy with ``inputs`` in place of :attr:`differentiable_inputs`."""
        curr, *unfiltered = inputs
        tensors = {**self.tensors, "unfiltered": unfiltered[0]} if unfiltered else self.tensors
        return self._replace(curr=curr, tensors=tensors)


def requested_tensors(config: LossConfig) -> tuple[str, ...]:
    """Return the names, among :data:`BATCH_KEYS`, of the tensors that a configuration reads.

    A batch may lack ``unfiltered``, ``rewards``, ``metrics_ref``, ``audited_prev`` and ``keep_mask``; the others are
    required.
    """
    names = ["advantages", "gen", "keep_mask"]
    if config.needs_prev:
        names.append("prev")
    if config.kl_coefficient:
        names += ["ref", "unfiltered"]
    elif config.metrics == "full":
        names.append("metrics_ref")
    if config.positive_example_nll_weight:
        names.append("rewards")
    if config.audit_fraction:
        names.append("audited_prev")
    if config.proximal_policy == "interpolated":
        names += ["sampled_version", "version"]
    return tuple(names)


def possible_batch_keys(requested: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every combination of the requested tensors that a batch may hold, given that some are optional."""
    combinations: list[tuple[str, ...]] = [()]
    for name in requested:
        without = combinations if name in _OPTIONAL else []
        combinations = [*((*names, name) for names in combinations), *without]
    return combinations


def take_padded(next_token_logprobs: Tensor, data: Mapping[str, Any], requested: Sequence[str]) -> RawBatch:
    """Check the tensors of a padded NeMo-RL microbatch and align them with the log-probs.

    Args:
        next_token_logprobs: [B, T-1], any floating dtype: log-prob of token t+1 at position t.
        data: mapping with ``token_mask`` and the token tensors among :data:`BATCH_KEYS`, all [B, T], where column t is
            about token t, and ``sample_mask`` and those of :data:`BY_SEQUENCE` [B]; ``curr_logprobs_unfiltered`` is
            [B, T-1].
        requested: names, among :data:`BATCH_KEYS`, of the tensors to read.

    Raises: MissingDataError: a tensor is missing. ShapeError: one has another shape, or a dtype that it can't have.
    """
    check_dense("next_token_logprobs", next_token_logprobs)
    if next_token_logprobs.dim() != 2 or not next_token_logprobs.is_floating_point():
        raise ShapeError(
            "next_token_logprobs must be a floating-point tensor [B, T-1], one log-prob for each token after the "
            f"first, but it is {next_token_logprobs.dtype} {list(next_token_logprobs.shape)}"
        )
    mask = data.get(TOKEN_MASK)
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == 0:
        raise ShapeError("data['token_mask'] must be [B, T] with T of at least 1, but it has no columns (T = 0)")
    if isinstance(mask, Tensor) and mask.shape == next_token_logprobs.shape:
        raise ShapeError(
            f"next_token_logprobs must be [B, T-1], one log-prob for each token after the first, but it is "
            f"{list(mask.shape)} like data['token_mask'] [B, T]; leave out the last position, which predicts nothing"
        )
    rows, width = next_token_logprobs.shape
    raw = _take(next_token_logprobs, data, requested, (rows, width + 1), (rows,))
    aligned = {name: value[:, 1:] if value.shape == (rows, width + 1) else value for name, value in raw.tensors.items()}
    return raw._replace(token_mask=raw.token_mask[:, 1:], tensors=aligned)


def take_packed(
    logprobs: Tensor, data: Mapping[str, Any], segments: PackedSegments, requested: Sequence[str]
) -> RawBatch:
    """Check the tensors of packed sequences, all of their tokens or this rank's shard.

    Args:
        logprobs: [N], any floating dtype: log-prob of the token that each position is about.
        data: the tensors of :func:`take_padded` with [N] in place of [B, T] (aligned with ``logprobs``, no shift) and
            [S] in place of [B].
        segments: layout of this rank's N tokens and of all S sequences.
        requested: names, among :data:`BATCH_KEYS`, of the tensors to read.

    Raises: the errors of :func:`take_padded`; also ShapeError if the segments' groups don't match their shard.
    """
    if not isinstance(segments, PackedSegments):
        raise ShapeError(
            f"segments must be PackedSegments(cu_seqlens, …), the layout of the packed row, but it is {segments!r}"
        )
    segments.check()
    check_dense("logprobs", logprobs)
    count = segments.tokens
    if logprobs.shape != (count,) or not logprobs.is_floating_point():
        raise ShapeError(
            f"logprobs must be a floating-point tensor [{count}], one log-prob for each token of the segments on this "
            f"rank, but it is {logprobs.dtype} {list(logprobs.shape)}"
        )
    return _take(logprobs, data, requested, (count,), (segments.count,))


def _take(
    curr: Tensor,
    data: Mapping[str, Any],
    requested: Sequence[str],
    token_shape: tuple[int, ...],
    sequence_shape: tuple[int, ...],
) -> RawBatch:
    """Check shapes and dtypes of the masks and requested tensors; move them to the device of ``curr``."""
    special_shapes = {"unfiltered": curr.shape, "keep_mask": curr.shape, **dict.fromkeys(BY_SEQUENCE, sequence_shape)}
    tensors = {}
    for name in requested:
        key = BATCH_KEYS[name]
        if name in _OPTIONAL and data.get(key) is None:
            continue
        is_logprob = name not in ("advantages", "keep_mask", "sampled_version", *BY_SEQUENCE)
        shape = special_shapes.get(name, token_shape)
        tensors[name] = checked_tensor(data, key, shape, curr.device, logprobs=is_logprob)
    token_mask = checked_tensor(data, TOKEN_MASK, token_shape, curr.device)
    return RawBatch(curr, token_mask, checked_tensor(data, "sample_mask", sequence_shape, curr.device), tensors)


def checked_tensor(
    data: Mapping[str, Any], key: str, shape: Sequence[int], device: torch.device, *, logprobs: bool = False
) -> Tensor:
    """Return a tensor of the batch on the device, after a check of its shape and dtype.

    It has a gradient only if it is the unfiltered log-probs.

    Raises: MissingDataError: it is missing. ShapeError: it has another shape, or a dtype that it can't have.
    """
    if isinstance(data.get(key), Tensor):
        check_dense(f"data['{key}']", data[key])
    if key not in data:
        need = f"data['{key}'] is missing; the configured loss needs it as a tensor {list(shape)}"
        raise MissingDataError(need + _REMEDIES.get(key, ""))
    value = data[key]
    if not isinstance(value, Tensor) or value.shape != shape:
        actual = f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ShapeError(f"data['{key}'] must be a tensor {list(shape)} to fit the log-probs, but it is {actual}")
    if value.is_complex() or (logprobs and not value.is_floating_point()):
        raise ShapeError(f"data['{key}'] must be {'floating point' if logprobs else 'real'}, not {value.dtype}")
    if value.is_floating_point() and key == TRAINING_WEIGHT_VERSION:
        raise ShapeError(f"data['{key}'] must hold integers, numbers of updates, not {value.dtype}")
    value = value if value.device == device else value.to(device)
    return value.detach() if value.requires_grad and key != CURR_LOGPROBS_UNFILTERED else value
