"""A NeMo-RL microbatch as clean token tensors.

Positions that are not trained on may hold any value (NaN, ±inf, 1e6). :func:`read` replaces it by 0 with
``torch.where``, so that it never enters the arithmetic.

Names: ``curr`` is log π_θ of the current policy, ``prev`` log π_old of the policy before the step, ``gen`` log μ of the
generation engine, ``ref`` log π_ref of the reference policy. Tensors in "token layout" are [B, T-1] for padded rows and
[N] for packed tokens. S is the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.losses.raw_batch import CHECKED, RawBatch
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import Segments

_UNSURE = -1e-3
"""Log-prob of the sampler below which a log-prob of exactly 0 of the trainer is that of a filtered token."""


class TokenBatch(NamedTuple):
    """Clean float32 tensors of one microbatch; log-probs and advantages are 0 at tokens that aren't trained."""

    curr: Tensor  # log π_θ of the sampled tokens, with gradient
    curr_kl: Tensor  # log π_θ before top-k/top-p filtering, for the KL term; curr if the batch has none
    surrogate_log_ratio: Tensor  # log of the surrogate's ratio: curr − prev or, under ratio_anchor: gen, curr − gen
    prev: Tensor  # log π_old; interpolated between gen and curr if the batch has versions, else curr if it has none
    gen: Tensor  # log μ
    mismatch: Tensor  # prev − gen: training engine against generation engine
    ref: Tensor | None  # log π_ref; None without a KL term
    metrics_ref: Tensor | None  # log π_ref for metrics only, as the trainer passed it
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

    @property
    def reference_log_ratio(self) -> Tensor | None:
        """curr_kl − log π_ref without gradient, 0 where π_ref is not known; None without reference log-probs."""
        if self.ref is not None:
            return self.curr_kl.detach() - self.ref
        if self.metrics_ref is None:
            return None
        return _reference_log_ratio(self.curr_kl.detach(), self.metrics_ref, self.is_trained)

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
    optional = ("unfiltered", "rewards", "metrics_ref", "audited_prev")
    unfiltered, rewards, metrics_ref, audited_prev = (raw.tensors.get(name) for name in optional)
    declared_mask, filtered_mask = token_mask, None
    if (is_filtered := _find_filtered(raw, drop_filtered)) is not None:
        token_mask = zero_outside(~is_filtered, token_mask)
        filtered_mask = declared_mask - token_mask
    # NaN and infinity survive every sum, so one test covers all tensors.
    sum_of_values = token_mask
    for value in checked.values():
        sum_of_values = sum_of_values + value
    # A finite value times 0 is 0; NaN and infinity give NaN, which is not above 0.
    is_trained = torch.add(token_mask * segments.spread(sample_mask), sum_of_values, alpha=0) > 0

    zero = token_mask.new_zeros(())
    inputs = ("curr", "unfiltered")  # these have a gradient
    clean = {name: zero_outside(is_trained, value, zero) for name, value in checked.items() if name not in inputs}
    trained_mask = zero_outside(is_trained, token_mask, zero)
    curr = zero_outside(is_trained, curr, zero)
    curr_kl = curr if unfiltered is None else zero_outside(is_trained, unfiltered.float())
    prev = clean.get("prev", curr.detach())
    if "version" in raw.tensors:
        version = segments.spread(raw.tensors["version"].float())
        prev = F.interpolated_logprobs(clean["gen"], prev, version=version, sampled_at=clean["sampled_version"])
    return TokenBatch(
        curr=curr,
        curr_kl=curr_kl,
        surrogate_log_ratio=curr - (clean["gen"] if anchor == "gen" else prev),
        prev=prev,
        gen=clean["gen"],
        mismatch=prev - clean["gen"],
        ref=clean.get("ref"),
        metrics_ref=None if metrics_ref is None else metrics_ref.float(),
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
    names = [name for name in raw.tensors if name in CHECKED]
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
