"""From NeMo-RL's batch to clean token tensors.

This is where bad values stop: whatever a position that does not train holds (NaN, ±inf, 1e6) is replaced by
selection and never enters the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import DataError, NonFiniteError, ShapeError
from nemo_geomask.segments import PackedSegments, PaddedSegments, Segments

__all__ = ["Reading", "TokenBatch", "Verdict", "read_nemo_rl", "read_packed"]


class Verdict(NamedTuple):
    """What is known of sequences once the tokens of all ranks were seen.

    Attributes:
        tokens_of_sequence: [S] float32, trained tokens of each sequence as the batch declares them.
        dropped: [S] bool, sequences dropped for a non-finite value.
    """

    tokens_of_sequence: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Tensors of one microbatch in one token layout; every token tensor holds 0 where ``trained`` is False.

    Attributes:
        curr: log π_θ of the sampled tokens, float32, with gradient.
        curr_kl: the same without top-k/top-p filtering, for the KL term; ``curr`` where there is none.
        prev: log π_old.
        gen: log μ.
        ref: log π_ref; None without a KL term.
        advantages: A.
        rewards: [S] or None.
        trained: bool, the tokens that take part.
        weight: float32, token mask times sample mask where ``trained``, else 0.
        sample_mask: [S] float32, 0 also for a dropped sequence.
        valid_samples: 0-d, sum of the sample mask as it came.
        nonfinite: 0-d counts of non-finite values at tokens that were to be trained, by tensor.
        segments: who belongs to which sequence.
        verdict: which sequences were dropped. Where that takes a collective it is found with the statistics; until then
            only single tokens are left out, and this is the reading that the verdict is about.
    """

    curr: Tensor
    curr_kl: Tensor
    prev: Tensor
    gen: Tensor
    ref: Tensor | None
    advantages: Tensor
    rewards: Tensor | None
    trained: Tensor
    weight: Tensor
    sample_mask: Tensor
    valid_samples: Tensor
    nonfinite: dict[str, Tensor]
    segments: Segments
    verdict: Verdict | Reading

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """Curr − prev, with gradient."""
        return self.curr - self.prev

    @property
    def policy(self) -> Tensor:
        """Curr − prev: staleness."""
        return self.log_ratio.detach()

    @functools.cached_property
    def mismatch(self) -> Tensor:
        """Prev − gen: train engine against generation engine."""
        return self.prev - self.gen

    @functools.cached_property
    def total(self) -> Tensor:
        """Curr − gen."""
        return self.curr.detach() - self.gen


@dataclass(frozen=True)
class Reading:
    """A microbatch as it came, with its non-finite values found.

    Attributes:
        curr: log π_θ, token layout, with gradient.
        unfiltered: ``curr_logprobs_unfiltered`` where given.
        stacked: [n, …], the other token tensors, so that each step on them is one kernel.
        names: of those n.
        token_mask: token layout, float32.
        sample_mask: [S], float32.
        rewards: [S] or None.
        trained: bool, tokens that were to be trained.
        bad: bool, those of them with a non-finite ``gen``, ``prev`` or ``ref``.
        nonfinite: 0-d counts of non-finite values at tokens that were to be trained, by tensor.
        action: ``loss_fn.nonfinite``.
        segments: who belongs to which sequence.
    """

    curr: Tensor
    unfiltered: Tensor | None
    stacked: Tensor
    names: tuple[str, ...]
    token_mask: Tensor
    sample_mask: Tensor
    rewards: Tensor | None
    trained: Tensor
    bad: Tensor
    nonfinite: dict[str, Tensor]
    action: str
    segments: Segments

    def judged(self) -> dict[str, Tensor]:
        """Token tensors whose sums over sequences :meth:`judge` needs."""
        return {"tokens": self.token_mask, "bad": self.bad.int().float()}

    def judge(self, sums: Mapping[str, Tensor]) -> Verdict:
        """The verdict on sequences, from the sums over them of what :meth:`judged` gives."""
        tokens, bad = sums["tokens"], sums["bad"]
        if self.action == "raise" and bool(bad.any()):
            self._refuse()
        return Verdict(tokens, bad > 0 if self.action == "drop_sequence" else torch.zeros_like(bad, dtype=torch.bool))

    def batch(self, verdict: Verdict | None = None) -> TokenBatch:
        """What trains: tokens that aren't bad, of sequences that aren't dropped as far as is known."""
        trained, sample_mask = self.trained & ~self.bad, self.sample_mask
        if verdict is not None:
            trained = trained & ~self.segments.spread(verdict.dropped)
            sample_mask = sample_mask * ~verdict.dropped
        clean = dict(zip(self.names, F.select(self.stacked, trained), strict=True))
        curr = F.select(self.curr, trained)
        return TokenBatch(
            curr=curr,
            curr_kl=curr if self.unfiltered is None else F.select(self.unfiltered, trained),
            prev=clean.get("prev", curr.detach()),
            gen=clean["gen"],
            ref=clean.get("ref"),
            advantages=clean["advantages"],
            rewards=self.rewards,
            trained=trained,
            weight=clean["weight"],
            sample_mask=sample_mask,
            valid_samples=self.sample_mask.sum(),
            nonfinite=self.nonfinite,
            segments=self.segments,
            verdict=self if verdict is None else verdict,
        )

    def _refuse(self) -> None:
        keys = [key for name, key in _KEYS.items() if name in self.nonfinite]
        counts = torch.stack([self.nonfinite[name] for name in _KEYS if name in self.nonfinite])
        whole, *_ = self.segments.whole(counts, counts[:0], counts[:0])
        found = ", ".join(f"{int(count)} in {key}" for key, count in zip(keys, whole.tolist(), strict=True) if count)
        raise NonFiniteError(
            f"non-finite log-probs at trained tokens: {found}; loss_fn.nonfinite is 'raise'. Find their origin, or "
            "choose drop_sequence or drop_token"
        )


def read_nemo_rl(next_token_logprobs: Tensor, data: Mapping[str, Any], config: LossConfig) -> TokenBatch:
    """Read a padded NeMo-RL microbatch.

    Args:
        next_token_logprobs: [B, T-1], any floating dtype: log-prob of token t+1 at position t.
        data: mapping with ``advantages``, ``prev_logprobs`` (unless ``force_on_policy_ratio``),
            ``generation_logprobs``, ``reference_policy_logprobs`` (with a KL term), ``token_mask``, all [B, T] with
            column t speaking of token t, ``sample_mask`` [B], and, with ``positive_example_nll_weight``, optionally
            ``rewards`` [B]. ``curr_logprobs_unfiltered`` [B, T-1] is used for the KL term where given.
        config: the settings in force.

    Raises:
        DataError: a tensor is missing.
        ShapeError: a tensor has another shape, or is not floating point where log-probs are.
        NonFiniteError: under ``nonfinite: raise``.
    """
    if next_token_logprobs.dim() != 2 or not next_token_logprobs.is_floating_point():
        raise ShapeError(
            "next_token_logprobs must be a floating-point tensor [B, T-1], one log-prob for each token after the "
            f"first, but it is {next_token_logprobs.dtype} {list(next_token_logprobs.shape)}"
        )
    batch, width = next_token_logprobs.shape

    def tokens(key: str) -> Tensor:
        return _tensor(data, key, (batch, width + 1), next_token_logprobs.device)[:, 1:].float()

    unfiltered = None
    if config.kl_coefficient and data.get("curr_logprobs_unfiltered") is not None:
        unfiltered = _tensor(data, "curr_logprobs_unfiltered", (batch, width), next_token_logprobs.device).float()
    return _read(next_token_logprobs.float(), unfiltered, tokens, data, batch, PaddedSegments(), config)


def read_packed(logprobs: Tensor, data: Mapping[str, Any], segments: PackedSegments, config: LossConfig) -> TokenBatch:
    """Read packed tokens, whole or a rank's share.

    Args:
        logprobs: [N], any floating dtype: log-prob of the token that each position is about.
        data: the tensors of :func:`read_nemo_rl` with [N] in place of [B, T] (position for position those of
            ``logprobs``, no shift) and [S] in place of [B].
        segments: of this rank's N tokens and all S sequences.
        config: the settings in force.

    Raises:
        DataError: a tensor is missing.
        ShapeError: a tensor has another shape, or is not floating point where log-probs are.
        NonFiniteError: under ``nonfinite: raise``; where sequences cross ranks, by their statistics.
    """
    count = segments.token_index.numel()
    if logprobs.shape != (count,) or not logprobs.is_floating_point():
        raise ShapeError(
            f"logprobs must be a floating-point tensor [{count}], one log-prob for each token of the segments on this "
            f"rank, but it is {logprobs.dtype} {list(logprobs.shape)}"
        )

    def tokens(key: str) -> Tensor:
        return _tensor(data, key, (count,), logprobs.device).float()

    unfiltered = None
    if config.kl_coefficient and data.get("curr_logprobs_unfiltered") is not None:
        unfiltered = tokens("curr_logprobs_unfiltered")
    return _read(logprobs.float(), unfiltered, tokens, data, segments.count, segments, config)


def _read(
    curr: Tensor,
    unfiltered: Tensor | None,
    tokens: Callable[[str], Tensor],
    data: Mapping[str, Any],
    count: int,
    segments: Segments,
    config: LossConfig,
) -> TokenBatch:
    """The batch in the layout of ``curr``, where ``tokens`` gives a tensor of ``data`` and there are ``count``
    sequences."""
    sample_mask = _tensor(data, "sample_mask", (count,), curr.device).float()
    token_mask = tokens("token_mask")
    weight = token_mask * segments.spread(sample_mask)
    trained = weight.bool()
    given = {"gen": tokens("generation_logprobs")}
    if not config.force_on_policy_ratio:
        given["prev"] = tokens("prev_logprobs")
    if config.kl_coefficient:
        given["ref"] = tokens("reference_policy_logprobs")
    advantages = tokens("advantages")
    rewards = None
    if config.positive_example_nll_weight and "rewards" in data:
        rewards = _tensor(data, "rewards", (count,), curr.device).float()

    stacked = torch.stack([curr.detach(), advantages, *given.values(), weight])
    # Non-finite log-probs of the model itself or advantages are counted and left to show in the loss.
    flags = F.nonfinite(stacked[:-1]) & trained
    counts = flags.int().flatten(1).sum(dim=1, dtype=torch.int32)
    reading = Reading(
        curr=curr,
        unfiltered=unfiltered,
        stacked=stacked[1:],
        names=("advantages", *given, "weight"),
        token_mask=token_mask,
        sample_mask=sample_mask,
        rewards=rewards,
        trained=trained,
        bad=functools.reduce(torch.logical_or, flags[2:]),
        nonfinite=dict(zip(("curr", "advantages", *given), counts, strict=True)),
        action=config.nonfinite,
        segments=segments,
    )
    if segments.crosses_ranks:
        return reading.batch()
    return reading.batch(reading.judge(segments.pool(reading.judged()).sums))


def _tensor(data: Mapping[str, Any], key: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if key not in data:
        raise DataError(f"data['{key}'] is missing; the configured loss needs it as a tensor {list(shape)}")
    value = data[key]
    if not isinstance(value, Tensor) or value.shape != shape:
        found = f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ShapeError(f"data['{key}'] must be a tensor {list(shape)} to fit next_token_logprobs, but it is {found}")
    return value.to(device)


_KEYS = {
    "gen": "data['generation_logprobs']",
    "prev": "data['prev_logprobs']",
    "ref": "data['reference_policy_logprobs']",
}
