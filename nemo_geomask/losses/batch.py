"""A NeMo-RL microbatch as checked, clean token tensors.

Positions that are not trained on may hold any value (NaN, ±inf, 1e6). :func:`read` replaces it by 0 with
``torch.where``, so that it never enters the arithmetic.

Names: ``curr`` is log π_θ of the current policy, ``prev`` log π_old of the policy before the step, ``gen`` log μ of the
generation engine, ``ref`` log π_ref of the reference policy. Tensors in "token layout" are [B, T-1] for padded rows and
[N] for packed tokens. S is the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

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
)
from nemo_geomask.errors import MissingDataError, ShapeError
from nemo_geomask.functional.entry import check_dense
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import PackedSegments, Segments

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
}
"""NeMo-RL's batch key of each tensor that a loss may read in addition to the masks.

``metrics_ref`` and ``audited_prev`` are optional reads of the same keys as ``ref`` and ``prev``, for metrics only.
"""
_OPTIONAL = ("unfiltered", "rewards", "metrics_ref", "audited_prev", "keep_mask")
_UNSURE = -1e-3
"""Log-prob of the sampler below which a log-prob of exactly 0 of the trainer is that of a filtered token."""


class RawBatch(NamedTuple):
    """Tensors of a microbatch as the trainer passed them, with shapes and dtypes checked."""

    curr: Tensor  # token layout, floating point, with gradient
    token_mask: Tensor  # token layout
    sample_mask: Tensor  # [S]
    tensors: dict[str, Tensor]  # by the names of BATCH_KEYS; token layout, rewards [S]
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


class TokenBatch(NamedTuple):
    """Clean float32 tensors of one microbatch; log-probs and advantages are 0 at tokens that aren't trained."""

    curr: Tensor  # log π_θ of the sampled tokens, with gradient
    curr_kl: Tensor  # log π_θ before top-k/top-p filtering, for the KL term; curr if the batch has none
    surrogate_log_ratio: Tensor  # log of the surrogate's ratio: curr − prev or, under ratio_anchor: gen, curr − gen
    prev: Tensor  # log π_old; falls back to curr when the batch has none
    gen: Tensor  # log μ
    mismatch: Tensor  # prev − gen: training engine against generation engine
    ref: Tensor | None  # log π_ref; None without a KL term
    reference_log_ratio: Tensor | None  # curr_kl − log π_ref, for metrics only; 0 where π_ref is not known
    advantages: Tensor  # A
    rewards: Tensor | None  # [S]
    audited_prev: Tensor | None  # log π_old of the sequences in audit_fraction, NaN at others; None without an audit
    token_mask: Tensor  # as the trainer passed it, in float32, 0 at filtered tokens
    declared_mask: Tensor  # the same, before filtered tokens were left out
    filtered_mask: Tensor | None  # the difference of the two; None if no token is looked at
    sample_mask: Tensor  # [S], as the trainer passed it, clamped to [0, 1], with 0 for NaN
    trained_mask: Tensor  # token mask where is_trained, else 0
    left_out: Tensor  # token mask minus trained_mask
    mask_margins: tuple[Tensor, ...]  # four, 0-d, see _mask_margins
    is_trained: Tensor  # bool: both masks are above 0 and all values of the token are finite
    segments: Segments  # assigns tokens to sequences

    def compared_logprobs(self, log_ratio_name: str) -> tuple[Tensor, Tensor]:
        """Return the two log-probs whose difference, first minus second, is :meth:`detached_log_ratio`."""
        if log_ratio_name == "mismatch":
            return self.prev, self.gen
        return self.curr.detach(), self.prev if log_ratio_name == "policy" else self.gen

    def detached_log_ratio(self, log_ratio_name: str) -> Tensor:
        """Return the log-ratio ``mismatch`` prev − gen, ``policy`` curr − prev or ``total`` curr − gen, no gradient."""
        if log_ratio_name == "mismatch":
            return self.mismatch
        first, second = self.compared_logprobs(log_ratio_name)
        return first - second


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
            about token t, and ``sample_mask`` and ``rewards`` [B]; ``curr_logprobs_unfiltered`` is [B, T-1].
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
    device = curr.device

    def checked(key: str, shape: tuple[int, ...], *, logprobs: bool = False) -> Tensor:
        if isinstance(data.get(key), Tensor):
            check_dense(f"data['{key}']", data[key])
        if key not in data:
            remedy = (
                "; without a reference policy, set reference_policy_kl_penalty: 0" if key == BATCH_KEYS["ref"] else ""
            )
            raise MissingDataError(
                f"data['{key}'] is missing; the configured loss needs it as a tensor {list(shape)}{remedy}"
            )
        value = data[key]
        if not isinstance(value, Tensor) or value.shape != shape:
            actual = f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ShapeError(f"data['{key}'] must be a tensor {list(shape)} to fit the log-probs, but it is {actual}")
        if value.is_complex() or (logprobs and not value.is_floating_point()):
            raise ShapeError(f"data['{key}'] must be {'floating point' if logprobs else 'real'}, not {value.dtype}")
        value = value if value.device == device else value.to(device)
        return value.detach() if value.requires_grad and key != BATCH_KEYS["unfiltered"] else value

    special_shapes = {"unfiltered": curr.shape, "keep_mask": curr.shape, "rewards": sequence_shape}
    tensors = {}
    for name in requested:
        key = BATCH_KEYS[name]
        if name in _OPTIONAL and data.get(key) is None:
            continue
        is_logprob = name not in ("advantages", "rewards", "keep_mask")
        tensors[name] = checked(key, special_shapes.get(name, token_shape), logprobs=is_logprob)
    return RawBatch(curr, checked(TOKEN_MASK, token_shape), checked("sample_mask", sequence_shape), tensors)


def is_finite(values: Tensor) -> Tensor:
    """Return ``torch.isfinite(values)``, computed in a quarter of its time on a CPU."""
    # NaN - NaN and inf - inf are NaN, which is not equal to 0.
    return values - values == 0


def zero_outside(mask: Tensor, values: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return the values where the mask is True, and 0 elsewhere, whatever the values are there.

    ``zero`` is 0 in a tensor, 0-d, for a caller that has one already.
    """
    # With the number 0.0 in place of a tensor, torch.where takes twice as long on a CPU.
    return torch.where(mask, values, values.new_zeros(()) if zero is None else zero)


def read(
    raw: RawBatch, segments: Segments, anchor: Literal["prev", "gen"] = "prev", *, drop_filtered: bool = False
) -> TokenBatch:
    """Convert a batch to float32, with 0 in place of the values at tokens that are not trained.

    A token with a non-finite value in any required tensor or in the unfiltered log-probs is not trained.
    :meth:`~nemo_geomask.losses.sequence_stats.SequencePool.reduce` decides whether the rest of its sequence is dropped,
    too, since it takes the tokens of all ranks into account.

    Args:
        raw: the microbatch as the trainer passed it.
        segments: assigns tokens to sequences.
        anchor: denominator of the policy ratio, ``ratio_anchor`` of the settings.
        drop_filtered: leave out tokens that the training engine's own top-k and top-p removed; see
            :func:`_find_filtered`. The batch's ``keep_mask`` is applied in any case.
    """
    curr, token_mask = raw.curr.float(), raw.token_mask.float()
    sample_mask = raw.sample_mask.float().clamp(0.0, 1.0).nan_to_num(0.0)
    checked = _checked_values(raw)
    unfiltered, rewards, metrics_ref, audited_prev, _ = (raw.tensors.get(name) for name in _OPTIONAL)
    declared_mask, filtered_mask = token_mask, None
    if (is_filtered := _find_filtered(raw, drop_filtered)) is not None:
        token_mask = zero_outside(~is_filtered, token_mask)
        filtered_mask = declared_mask - token_mask
    # NaN and infinity survive every sum, so one test covers all tensors.
    sum_of_values = token_mask
    for value in checked.values():
        sum_of_values = sum_of_values + value
    # A finite value minus itself is 0; NaN and infinity give NaN, which is not above 0.
    is_trained = token_mask * segments.spread(sample_mask) + (sum_of_values - sum_of_values) > 0

    zero = token_mask.new_zeros(())
    clean = {name: zero_outside(is_trained, checked[name], zero) for name in raw.tensors if name not in _OPTIONAL}
    trained_mask = zero_outside(is_trained, token_mask, zero)
    curr = zero_outside(is_trained, curr, zero)
    curr_kl = curr if unfiltered is None else zero_outside(is_trained, unfiltered.float())
    prev = clean.get("prev", curr.detach())
    reference_log_ratio = curr_kl.detach() - clean["ref"] if "ref" in clean else None
    if metrics_ref is not None:
        reference_log_ratio = _reference_log_ratio(curr_kl.detach(), metrics_ref.float(), is_trained)
    return TokenBatch(
        curr=curr,
        curr_kl=curr_kl,
        surrogate_log_ratio=curr - (clean["gen"] if anchor == "gen" else prev),
        prev=prev,
        gen=clean["gen"],
        mismatch=prev - clean["gen"],
        ref=clean.get("ref"),
        reference_log_ratio=reference_log_ratio,
        advantages=clean["advantages"],
        rewards=None if rewards is None else rewards.float(),
        audited_prev=None if audited_prev is None else audited_prev.float(),
        token_mask=token_mask,
        declared_mask=declared_mask,
        filtered_mask=filtered_mask,
        sample_mask=sample_mask,
        trained_mask=trained_mask,
        left_out=token_mask - trained_mask,
        mask_margins=_mask_margins(declared_mask, raw.sample_mask.float()),
        is_trained=is_trained,
        segments=segments,
    )


def _find_filtered(raw: RawBatch, drop_filtered: bool) -> Tensor | None:
    """Return the tokens that the training engine's own top-k and top-p removed; None if nothing is known of them.

    NeMo-RL sets their log-prob to exactly 0 (``mask_out_neg_inf_logprobs``). A token of which both engines are sure has
    a log-prob of 0, too; it is not filtered.
    """
    keep_mask = raw.tensors.get("keep_mask")
    is_filtered = None if keep_mask is None else keep_mask == 0
    if drop_filtered:
        is_zero = raw.curr.detach() == 0
        if "prev" in raw.tensors:
            is_zero = is_zero | (raw.tensors["prev"] == 0)
        is_zero = is_zero & (raw.tensors["gen"] < _UNSURE)
        is_filtered = is_zero if is_filtered is None else is_filtered | is_zero
    return is_filtered


def _checked_values(raw: RawBatch) -> dict[str, Tensor]:
    """Return the tensors whose values must be finite, float32 without gradient, by the names of :data:`BATCH_KEYS`."""
    names = [name for name in raw.tensors if name not in _OPTIONAL or name == "unfiltered"]
    return {
        name: (value.detach() if value.requires_grad else value).float()
        for name, value in (("curr", raw.curr), *((n, raw.tensors[n]) for n in names))
    }


def report_invalid(raw: RawBatch, batch: TokenBatch) -> Iterator[Metric]:
    """Yield counts of the values that :func:`read` refuses.

    ``geomask/nonfinite_<tensor>`` is the number of non-finite values at tokens whose masks are both above 0, of each
    tensor that :func:`read` checks. ``geomask/invalid_token_mask`` and ``geomask/invalid_sample_mask`` are 1 if a mask
    holds a value that no mask can have: NaN, or one that is not from 0 to 1.
    """
    # 1 where both masks are above 0, but the token isn't trained.
    nonfinite_mask = (batch.left_out * batch.segments.spread(batch.sample_mask)).sign()
    nonfinite_tokens = nonfinite_mask.nansum()

    def nonfinite_count(value: Tensor) -> Tensor:
        # 0 times a non-finite value is NaN, which nansum skips. The sum is therefore the number of non-finite tokens at
        # which this tensor is finite.
        return nonfinite_tokens - torch.add(nonfinite_mask, value, alpha=0).nansum()

    for name, value in _checked_values(raw).items():
        yield Metric((f"geomask/nonfinite_{name}",), "local_sum", partial(nonfinite_count, value))
    is_invalid = (~(torch.stack(batch.mask_margins) >= 0)).float()
    yield Metric(("geomask/invalid_token_mask",), "local_sum", lambda: is_invalid[:2].amax())
    yield Metric(("geomask/invalid_sample_mask",), "shared_count", lambda: is_invalid[2:].amax())


def _mask_margins(*masks: Tensor) -> tuple[Tensor, ...]:
    """Return the smallest value of each mask, and the distance of the largest one from 1, 0-d each.

    All of them are at least 0 if every value is from 0 to 1; NaN, which is not, survives the extrema. Extrema cost a
    fifth of comparisons by element on a CPU. The host does not read them, as it would have to wait for the device.
    """
    filled = [pad_empty(mask, 0.0) for mask in masks]
    return tuple(margin for mask in filled for margin in (mask.amin(), 1.0 - mask.amax()))


def pad_empty(values: Tensor, fill: float) -> Tensor:
    """Return the values, or [1] of ``fill`` if there are none, since ``amin`` and ``amax`` refuse an empty tensor."""
    return values if values.numel() else values.new_full((1,), fill)


def _reference_log_ratio(curr: Tensor, ref: Tensor, is_trained: Tensor) -> Tensor:
    """Return curr − log π_ref at trained tokens where log π_ref is known, else 0; token layout.

    NeMo-RL fills the tensor with zeros when it skips the reference policy, so a log π_ref of exactly 0 counts as not
    known. Each token is judged by itself: a judgement by the microbatch or by the rank would not add up.
    """
    is_known = is_trained & (ref / ref == 1)  # a number divided by itself is 1 unless it is 0 or not finite
    return zero_outside(is_known, curr - ref)
