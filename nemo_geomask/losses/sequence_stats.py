"""Statistics of each sequence, all of them pooled in one reduction.

The variant, the weight and the masks each request the statistics that they need from a :class:`SequencePool`. However
many there are, they cost one reduction and, under context parallelism, one stage of collectives.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.losses.batch import TokenBatch, zero_outside
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import Pooled, Prefix

PooledBy = Literal[
    "sum", "mean", "min", "max", "prefix_sum", "prefix_mean", "prefix_min", "prefix_max", "turn_sum", "turn_mean"
]
"""How token values are pooled: over the sequence, over each token's prefix (the token included), or over its turn."""


class SequenceStats(NamedTuple):
    """Counts and masks of a microbatch's sequences, after sequences with non-finite values were dropped.

    A dropped sequence has the statistics of an empty one.
    """

    is_trained: Tensor  # token layout, bool: tokens with finite values, of sequences that aren't dropped
    weight: Tensor  # token layout: token mask times sample mask where is_trained, else 0
    total_weight: Tensor  # 0-d, sum of the weight over this rank's tokens
    sample_mask: Tensor  # [S], 0 for a dropped sequence
    trained_tokens: Tensor  # [S], summed token mask of the trained tokens
    # [S], summed token mask as the trainer passed it, before anything was dropped; None if no such counts are needed
    declared_tokens: Tensor | None
    exclusion: Tensor  # token layout: 0 where is_trained, else infinity; keeps other tokens out of minima and maxima

    @property
    def is_empty(self) -> Tensor:
        """[S] bool: sequences without a trained token."""
        return self.trained_tokens == 0


class PooledStatistic:
    """Statistic of each sequence, or of each prefix, that a part of the loss has requested.

    Attributes:
        value: set by :meth:`SequencePool.reduce`. [S], or float64 in token layout for a statistic of prefixes or turns.
    """

    value: Tensor


class SequencePool:
    """Requests for statistics of a microbatch's sequences, which :meth:`reduce` serves together.

    Args:
        batch: the microbatch.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self._batch = batch
        self._requests: list[tuple[PooledBy, Tensor, PooledStatistic]] = []

    def request(self, values: Tensor, pooled_by: PooledBy) -> PooledStatistic:
        r"""Request a statistic of a token tensor over the trained tokens of each sequence.

        ============================ ================================================ ==================
        ``pooled_by``                value                                            empty sequence
        ============================ ================================================ ==================
        ``sum``                      :math:`\sum_t m_t x_t` with the token mask m     0
        ``mean``                     :math:`\sum_t m_t x_t / \sum_t m_t`              0
        ``min``, ``max``             over trained tokens                              :math:`\pm\infty`
        ``prefix_sum``, ``prefix_…`` over the trained tokens up to and including each –
        ``turn_sum``, ``turn_mean``  as ``sum`` and ``mean``, over the token's turn   0
        ============================ ================================================ ==================

        Args:
            values: x, token layout, float32, finite. ``sum`` and ``mean`` are differentiable.
            pooled_by: the first column of the table.

        Returns: the statistic, whose value :meth:`reduce` sets. Repeated requests for the same statistic of the same
        tensor, such as those of a weight and of a mask on the mismatch, return the same object, whose value crosses
        ranks once.
        """
        for requested_by, tensor, statistic in self._requests:
            if requested_by == pooled_by and tensor is values:
                return statistic
        statistic = PooledStatistic()
        self._requests.append((pooled_by, values, statistic))
        return statistic

    def reduce(self, config: LossConfig) -> tuple[SequenceStats, list[Metric]]:
        """Compute all requested statistics, and drop sequences with non-finite values under ``drop_sequence``.

        Every rank of the segments' groups must call this together.

        Returns: the statistics that every loss needs, and the metrics ``num_valid_samples`` and
        ``geomask/dropped_sequences``.
        """
        batch, segments = self._batch, self._batch.segments
        trained_mask = batch.trained_mask
        sums = {"trained_tokens": trained_mask}
        if config.normalization == "sequences":
            sums["declared_tokens"] = batch.declared_mask
        if config.nonfinite == "drop_sequence":
            # Above 0 at a token with a non-finite value, and at the tokens of sequences that are not trained at all.
            sums["left_out"] = batch.left_out
        requested = self._pooled_requests(trained_mask)
        local_prefixes = self._local_prefixes()
        turn_tensors = self._turn_requests()
        # Tokens that the masks train but a value or a filter removes are members: they don't split a turn.
        turns = segments.turns(batch.declared_mask > 0) if turn_tensors else None
        local_turns = Prefix(Pooled({}, {}, {})) if turns is None else segments.turn_sums(turns, turn_tensors)
        pooled = segments.pool(
            sums | requested.sums | local_prefixes.run_totals.sums | local_turns.run_totals.sums,
            requested.lowest | local_prefixes.run_totals.lowest,
            requested.highest | local_prefixes.run_totals.highest,
        )
        prefixes = segments.global_prefix(local_prefixes, pooled)
        turn_sums = {} if turns is None else segments.global_turn_sums(turns, local_turns, pooled)

        sample_mask, zero = batch.sample_mask, batch.sample_mask.new_zeros(())
        if config.nonfinite == "drop_sequence":
            is_dropped = (pooled.sums["left_out"] > 0) & (sample_mask > 0)
            sample_mask = torch.where(is_dropped, zero, sample_mask)
        else:
            # drop_token: ``read`` has excluded the token itself. raise: ``PolicyLoss`` reads the counts and raises.
            is_dropped = torch.zeros_like(sample_mask, dtype=torch.bool)
        weight = trained_mask * segments.spread(sample_mask)
        is_trained = batch.is_trained & ~segments.spread(is_dropped)
        stats = SequenceStats(
            is_trained=is_trained,
            weight=weight,
            total_weight=weight.sum(),
            sample_mask=sample_mask,
            trained_tokens=torch.where(is_dropped, zero, pooled.sums["trained_tokens"]),
            declared_tokens=pooled.sums.get("declared_tokens"),
            exclusion=torch.where(is_trained, zero, zero.new_full((), torch.inf)),
        )
        for index, (pooled_by, _, statistic) in enumerate(self._requests):
            if pooled_by == "turn_sum" or pooled_by == "turn_mean":
                divisor = turn_sums[_TURN_TOKENS] if pooled_by == "turn_mean" else None
                statistic.value = _turn_value(turn_sums[str(index)], divisor)
            else:
                statistic.value = _value(str(index), pooled_by, stats, is_dropped, pooled, prefixes)
        self._requests.clear()
        return stats, [
            Metric(("num_valid_samples",), "shared_count", batch.sample_mask.sum),
            Metric(("geomask/dropped_sequences",), "shared_count", lambda: is_dropped.float().sum()),
        ]

    def _pooled_requests(self, trained_mask: Tensor) -> Pooled:
        """Return token tensors for the requests over whole sequences, keyed by the request's index.

        Tokens that aren't trained have the neutral element: 0, +inf for minima, -inf for maxima.
        """
        is_trained = self._batch.is_trained
        tensors = Pooled({}, {}, {})
        for index, (pooled_by, values, _) in enumerate(self._requests):
            if pooled_by in ("sum", "mean"):
                tensors.sums[str(index)] = values * trained_mask
            elif pooled_by == "min":
                tensors.lowest[str(index)] = torch.where(is_trained, values, torch.inf)
            elif pooled_by == "max":
                tensors.highest[str(index)] = torch.where(is_trained, values, -torch.inf)
        return tensors

    def _turn_requests(self) -> dict[str, Tensor]:
        """Return token tensors for the requests over turns, keyed by the request's index; empty without such."""
        trained_mask = self._batch.trained_mask
        tensors = {
            str(index): values * trained_mask
            for index, (pooled_by, values, _) in enumerate(self._requests)
            if pooled_by in ("turn_sum", "turn_mean")
        }
        return tensors | {_TURN_TOKENS: trained_mask} if tensors else tensors

    def _local_prefixes(self) -> Prefix:
        """Return the statistics of prefixes over this rank's tokens, keyed by the request's index."""
        is_trained = self._batch.is_trained
        tensors = Pooled({}, {}, {})
        for index, (pooled_by, values, _) in enumerate(self._requests):
            if pooled_by in ("prefix_sum", "prefix_mean"):
                tensors.sums[str(index)] = zero_outside(is_trained, values)
            elif pooled_by == "prefix_min":
                tensors.lowest[str(index)] = torch.where(is_trained, values, torch.inf)
            elif pooled_by == "prefix_max":
                tensors.highest[str(index)] = torch.where(is_trained, values, -torch.inf)
            if pooled_by == "prefix_mean":
                tensors.sums["trained_so_far"] = is_trained.float()
        return self._batch.segments.prefix(*tensors) if any(tensors) else Prefix(tensors)


_TURN_TOKENS = "trained_tokens_of_turn"


def _turn_value(total: Tensor, divisor: Tensor | None) -> Tensor:
    """Return the sum over the turn, or its mean if ``divisor`` has the number of the turn's trained tokens."""
    return total if divisor is None else total / torch.where(divisor == 0, 1.0, divisor)


def _value(
    key: str, pooled_by: PooledBy, stats: SequenceStats, is_dropped: Tensor, pooled: Pooled, prefixes: Pooled
) -> Tensor:
    """Return the value of one requested statistic; a dropped sequence gets the value of an empty one."""
    if pooled_by == "sum":
        return torch.where(is_dropped, 0.0, pooled.sums[key])
    if pooled_by == "mean":
        return torch.where(is_dropped, 0.0, pooled.sums[key]) / torch.where(stats.is_empty, 1.0, stats.trained_tokens)
    if pooled_by == "min":
        return torch.where(is_dropped, torch.inf, pooled.lowest[key])
    if pooled_by == "max":
        return torch.where(is_dropped, -torch.inf, pooled.highest[key])
    if pooled_by == "prefix_min":
        return prefixes.lowest[key]
    if pooled_by == "prefix_max":
        return prefixes.highest[key]
    if pooled_by == "prefix_mean":
        return prefixes.sums[key] / prefixes.sums["trained_so_far"].clamp(min=1.0)
    return prefixes.sums[key]
