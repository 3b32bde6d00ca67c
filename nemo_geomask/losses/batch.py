"""From NeMo-RL's batch to clean token tensors.

This is where bad values stop: whatever a position that does not train holds (NaN, ±inf, 1e6) is replaced by
selection and never enters the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import MissingDataError, ShapeError
from nemo_geomask.kernels.select import count_finite, select, where_finite
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import PackedSegments, Segments

__all__ = ["KEYS", "Raw", "TokenBatch", "held", "keys_read", "read", "take_packed", "take_padded"]

KEYS = {
    "advantages": "advantages",
    "prev": "prev_logprobs",
    "gen": "generation_logprobs",
    "ref": "reference_policy_logprobs",
    "unfiltered": "curr_logprobs_unfiltered",
    "rewards": "rewards",
    "seen_ref": "reference_policy_logprobs",
    "audited": "prev_logprobs",
}
"""NeMo-RL's keys of what a loss may read beside its masks."""
_OPTIONAL = ("unfiltered", "rewards", "seen_ref", "audited")


class Raw(NamedTuple):
    """A microbatch as it came, its shapes and dtypes checked."""

    curr: Tensor  # token layout, floating point, with gradient
    token_mask: Tensor  # token layout
    sample_mask: Tensor  # [S]
    others: dict[str, Tensor]  # by the names of KEYS; token layout, rewards [S]
    bounds: Tensor | None = None  # of the masks in the loss that have a budget, in their order

    @property
    def moving(self) -> list[Tensor]:
        """Those that the loss is differentiated by."""
        return [self.curr, self.others["unfiltered"]] if "unfiltered" in self.others else [self.curr]

    def moved(self, moving: Sequence[Tensor]) -> Raw:
        """The same with other tensors as :attr:`moving`."""
        curr, *unfiltered = moving
        others = {**self.others, "unfiltered": unfiltered[0]} if unfiltered else self.others
        return self._replace(curr=curr, others=others)


class TokenBatch(NamedTuple):
    """Clean float32 tensors of one microbatch; every token tensor but the masks holds 0 where ``trains`` does."""

    curr: Tensor  # log π_θ of the sampled tokens, with gradient
    curr_kl: Tensor  # the same without top-k/top-p filtering, for the KL term; curr where there is none
    log_ratio: Tensor  # of the policy ratio: curr − prev, or curr − gen by ratio_anchor; with gradient
    prev: Tensor  # log π_old; curr where nothing tells
    gen: Tensor  # log μ
    mismatch: Tensor  # prev − gen: train engine against generation engine
    ref: Tensor | None  # log π_ref; None without a KL term
    reference: Tensor | None  # curr_kl − log π_ref for metrics alone, also without one; 0 where that is not known
    advantages: Tensor  # A
    rewards: Tensor | None  # [S]
    audited: Tensor | None  # log π_old of the tokens of a sample, NaN elsewhere; None where there is none
    token_mask: Tensor  # as it came
    sample_mask: Tensor  # [S], as it came
    trains: Tensor  # 1 at tokens that are to be trained and have finite values, else 0
    bad: Tensor  # 1 at those that are to be trained and have not
    weight: Tensor  # token mask times sample mask where trains, else 0
    segments: Segments  # who belongs to which sequence

    def pair(self, which: str) -> tuple[Tensor, Tensor]:
        """The two log-probs whose difference :meth:`log_ratios` is, without gradient."""
        if which == "mismatch":
            return self.prev, self.gen
        return self.curr.detach(), self.prev if which == "policy" else self.gen

    def log_ratios(self, which: str) -> Tensor:
        """``mismatch`` prev − gen, ``policy`` curr − prev or ``total`` curr − gen, without gradient."""
        return self.mismatch if which == "mismatch" else torch.sub(*self.pair(which))


def keys_read(config: LossConfig) -> tuple[str, ...]:
    """Names of :data:`KEYS` that a configuration needs or, of the last four, uses where they are given."""
    names = ["advantages", "gen"]
    if config.needs_prev:
        names.append("prev")
    if config.kl_coefficient:
        names += ["ref", "unfiltered"]
    elif config.metrics == "full":
        names.append("seen_ref")
    if config.positive_example_nll_weight:
        names.append("rewards")
    if config.audit_fraction:
        names.append("audited")
    return tuple(names)


def held(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Which of the names a batch may hold: some need not be there."""
    found: list[tuple[str, ...]] = [()]
    for name in names:
        found = [(*some, name) for some in found] + (found if name in _OPTIONAL else [])
    return found


def take_padded(next_token_logprobs: Tensor, data: Mapping[str, Any], names: Sequence[str]) -> Raw:
    """A padded NeMo-RL microbatch.

    Args:
        next_token_logprobs: [B, T-1], any floating dtype: log-prob of token t+1 at position t.
        data: mapping with ``token_mask`` and the token tensors among :data:`KEYS`, all [B, T] with column t speaking of
            token t, and ``sample_mask`` and ``rewards`` [B]; ``curr_logprobs_unfiltered`` is [B, T-1].
        names: of :data:`KEYS`, those to read.

    Raises: MissingDataError: a tensor is missing. ShapeError: one has another shape, or a dtype that it can't have.
    """
    if next_token_logprobs.dim() != 2 or not next_token_logprobs.is_floating_point():
        raise ShapeError(
            "next_token_logprobs must be a floating-point tensor [B, T-1], one log-prob for each token after the "
            f"first, but it is {next_token_logprobs.dtype} {list(next_token_logprobs.shape)}"
        )
    mask = data.get("token_mask")
    if isinstance(mask, Tensor) and mask.shape == next_token_logprobs.shape:
        raise ShapeError(
            f"next_token_logprobs must be [B, T-1], one log-prob for each token after the first, but it is "
            f"{list(mask.shape)} as data['token_mask'] [B, T] is; leave out the last position, which predicts nothing"
        )
    rows, width = next_token_logprobs.shape
    raw = _take(next_token_logprobs, data, names, (rows, width + 1), (rows,))
    shifted = {name: value[:, 1:] if value.shape == (rows, width + 1) else value for name, value in raw.others.items()}
    return raw._replace(token_mask=raw.token_mask[:, 1:], others=shifted)


def take_packed(logprobs: Tensor, data: Mapping[str, Any], segments: PackedSegments, names: Sequence[str]) -> Raw:
    """Packed tokens, whole or a rank's share.

    Args:
        logprobs: [N], any floating dtype: log-prob of the token that each position is about.
        data: the tensors of :func:`take_padded` with [N] in place of [B, T] (position for position those of
            ``logprobs``, no shift) and [S] in place of [B].
        segments: of this rank's N tokens and all S sequences.
        names: of :data:`KEYS`, those to read.

    Raises: as :func:`take_padded`, and ShapeError: the segments' groups are others.
    """
    segments.check()
    count = segments.tokens
    if logprobs.shape != (count,) or not logprobs.is_floating_point():
        raise ShapeError(
            f"logprobs must be a floating-point tensor [{count}], one log-prob for each token of the segments on this "
            f"rank, but it is {logprobs.dtype} {list(logprobs.shape)}"
        )
    return _take(logprobs, data, names, (count,), (segments.count,))


def _take(
    curr: Tensor, data: Mapping[str, Any], names: Sequence[str], tokens: tuple[int, ...], sequences: tuple[int, ...]
) -> Raw:
    device = curr.device

    def tensor(key: str, shape: tuple[int, ...], *, logprobs: bool = False) -> Tensor:
        if key not in data:
            raise MissingDataError(f"data['{key}'] is missing; the configured loss needs it as a tensor {list(shape)}")
        value = data[key]
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ShapeError(f"data['{key}'] must be a tensor {list(shape)} to fit the log-probs, but it is {found}")
        if value.is_complex() or (logprobs and not value.is_floating_point()):
            raise ShapeError(f"data['{key}'] must be {'floating point' if logprobs else 'real'}, not {value.dtype}")
        value = value if value.device == device else value.to(device)
        return value.detach() if value.requires_grad and key != KEYS["unfiltered"] else value

    shapes = {"unfiltered": curr.shape, "rewards": sequences}
    others = {}
    for name in names:
        if name in _OPTIONAL and data.get(KEYS[name]) is None:
            continue
        others[name] = tensor(KEYS[name], shapes.get(name, tokens), logprobs=name not in ("advantages", "rewards"))
    return Raw(curr, tensor("token_mask", tokens), tensor("sample_mask", sequences), others)


def read(raw: Raw, segments: Segments, anchor: Literal["prev", "gen"] = "prev") -> tuple[TokenBatch, list[Metric]]:
    """Select what trains; everything after this is arithmetic on finite numbers.

    A token with a non-finite value anywhere does not train; what becomes of the rest of its sequence is for
    :func:`~nemo_geomask.losses.observe.observe` to say, which sees the tokens of all ranks.

    Returns: the batch, and ``geomask/nonfinite_…``: values at tokens that were to be trained, by tensor.
    """
    curr = raw.curr.float()
    token_mask, sample_mask = raw.token_mask.float(), raw.sample_mask.float()
    given = {name: value.float() for name, value in raw.others.items() if name not in _OPTIONAL}
    unfiltered, rewards, seen, audited = (raw.others.get(name) for name in _OPTIONAL)
    weight = token_mask * segments.spread(sample_mask)
    declared = torch.sign(weight)
    together = curr.detach()
    for value in (*given.values(), *(() if unfiltered is None else (unfiltered.detach(),))):
        together = together + value
    trains = where_finite(declared, together)  # NaN and infinity survive every sum
    clean = {name: select(trains, value) for name, value in given.items()}
    curr = select(trains, curr)
    prev = clean.get("prev", curr.detach())
    curr_kl = curr if unfiltered is None else select(trains, unfiltered.float())
    reference = curr_kl.detach() - clean["ref"] if "ref" in clean else None
    if seen is not None:
        seen = seen.float()
        known = where_finite(trains, seen)
        # All zeros are what NeMo-RL puts there where it skips the reference.
        reference = select(known, curr_kl.detach() - seen) * torch.sign(select(known, seen).abs().sum())
    batch = TokenBatch(
        curr=curr,
        curr_kl=curr_kl,
        log_ratio=curr - (clean["gen"] if anchor == "gen" else prev),
        prev=prev,
        gen=clean["gen"],
        mismatch=prev - clean["gen"],
        ref=clean.get("ref"),
        reference=reference,
        advantages=clean["advantages"],
        rewards=None if rewards is None else rewards.float(),
        audited=None if audited is None else audited.float(),
        token_mask=token_mask,
        sample_mask=sample_mask,
        trains=trains,
        bad=declared - trains,
        weight=select(trains, weight),
        segments=segments,
    )
    asked = declared.sum()

    def count(name: str, value: Tensor) -> Metric:
        return Metric((f"geomask/nonfinite_{name}",), "part", lambda: asked - count_finite(declared, value))

    return batch, [count("curr", raw.curr.detach()), *map(count, given, given.values())]
