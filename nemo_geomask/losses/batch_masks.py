"""Masks applied to a whole batch outside the loss: before the optimiser step, and for the flight recorder.

The flight recorder stores training batches for later analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.data_keys import PREV_LOGPROBS, TOKEN_MASK, TOKEN_WEIGHT_VERSIONS, TRAINING_WEIGHT_VERSION
from nemo_geomask.errors import MissingDataError, ShapeError
from nemo_geomask.losses.batch import TokenBatch, read, report_invalid
from nemo_geomask.losses.correction import MismatchStatistics, request_mismatch
from nemo_geomask.losses.raw_batch import checked_tensor, requested_tensors, take_padded
from nemo_geomask.losses.rejection import PooledRule, find_removed, request_rules, rule_values
from nemo_geomask.losses.sequence_stats import SequencePool, SequenceStats
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import PaddedSegments

_REQUESTED = ("advantages", "gen", "prev", "sampled_version", "version")
"""Tensors that masks and weights are computed from."""


class PooledBatch(NamedTuple):
    """A batch with the sequence statistics that the given masks and the weight against the mismatch need."""

    tokens: TokenBatch
    stats: SequenceStats
    mismatch: MismatchStatistics
    rules: list[PooledRule]
    invalid_counts: list[Metric]  # of non-finite values and of invalid values of the masks


def pool_batch(
    rules: Sequence[MaskRule], config: LossConfig, data: Mapping[str, Any], *, curr: Tensor | None = None
) -> PooledBatch:
    """Read a batch and compute the sequence statistics that the rules and the weight need.

    Args:
        rules: masks whose statistics to compute.
        config: settings in force.
        data: NeMo-RL's training batch [B, T], see :func:`nemo_geomask.losses.raw_batch.take_padded`.
        curr: [B, T-1], log-probs of the current policy; None: ``prev_logprobs``, its values before the first step.

    Raises: MissingDataError: ``prev_logprobs`` are missing. ShapeError: they are packed.
    """
    if curr is None:
        if PREV_LOGPROBS not in data:
            raise MissingDataError(
                "batch_veto, denominator: kept and masks with a budget read data['prev_logprobs'] before the step, but "
                "the batch has none"
            )
        if data[PREV_LOGPROBS].dim() != 2:
            raise ShapeError(
                f"the pass over a whole batch reads padded rows, data['{PREV_LOGPROBS}'] of [B, T], but it is "
                f"{list(data[PREV_LOGPROBS].shape)}; pad packed sequences for it"
            )
        curr = data[PREV_LOGPROBS][:, 1:]
    requested = [name for name in requested_tensors(config) if name in _REQUESTED]
    raw = take_padded(curr, data, requested)
    batch = read(raw, PaddedSegments(), drop_filtered=config.drop_filtered_tokens)
    pool = SequencePool(batch)
    mismatch = request_mismatch(pool, batch, config)
    pooled_rules = request_rules(pool, batch, rules)
    stats, _ = pool.reduce(config)
    return PooledBatch(batch, stats, mismatch, pooled_rules, [*report_invalid(raw, batch)])


@torch.no_grad()
def budget_bounds(config: LossConfig, data: Mapping[str, Any]) -> dict[str, float]:
    """Compute the bound of each mask with a budget from the whole batch, and return the bounds by mask label.

    A budget is ``drop_at_most`` or ``until_mean``. The mask removes values whose absolute value exceeds the bound.
    """
    bounds: dict[str, float] = {}
    if not config.budget_rules:
        return bounds
    batch = pool_batch(config.budget_rules, config, data)
    for pooled_rule in batch.rules:
        rule = pooled_rule.rule
        lowest, highest, is_judged = rule_values(pooled_rule, batch.tokens, batch.stats)
        sizes = torch.maximum(-lowest, highest)[is_judged]
        if rule.drop_at_most is not None:
            bounds[rule.label] = F.bound_by_share(sizes, rule.drop_at_most)
        elif rule.until_mean is not None:
            bounds[rule.label] = F.bound_by_mean(sizes, rule.until_mean)
    return bounds


@torch.no_grad()
def removed_tokens(config: LossConfig, data: Mapping[str, Any], curr: Tensor | None = None) -> dict[str, Tensor]:
    """Return, by mask label, the trained tokens that each mask removes from a whole batch.

    The masks are independent: each judges all trained tokens, whatever the other masks remove.

    Args:
        config: settings in force.
        data: as for :class:`~nemo_geomask.losses.PrestepPass`.
        curr: [B, T-1], log-probs of the current policy; None: ``prev_logprobs``, its values before the first step.

    Returns: bool [B, T] for each mask; a mask on sequences removes all tokens of a sequence. The dict is empty if
    ``curr`` is None and the settings need no ``prev_logprobs``: then no log-probs of the training policy are known.
    Raises: as :func:`pool_batch`.
    """
    if not config.mask_rules or (curr is None and not config.needs_prev):
        return {}
    bounds = budget_bounds(config, data)
    batch = pool_batch(config.mask_rules, config, data, curr=curr)
    removed: dict[str, Tensor] = {}
    for pooled_rule in batch.rules:
        below, above = find_removed(pooled_rule, batch.tokens, batch.stats, bounds)
        flags = below | above if pooled_rule.rule.is_per_token else batch.tokens.segments.spread(below | above)
        removed[pooled_rule.rule.label] = torch.nn.functional.pad(flags & batch.stats.is_trained, (1, 0))
    return removed


def masks_without_stale(config: LossConfig, data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks without tokens sampled more than ``max_token_lag`` updates ago; empty without the setting.

    Args:
        config: settings in force.
        data: NeMo-RL's training batch [B, T] with two more tensors: ``token_weight_versions`` [B, T], number of updates
            behind the policy that sampled each token, and ``training_weight_version`` [B], of the policy that trains.

    Raises: MissingDataError: one of the two is missing. ShapeError: one has another shape.
    """
    if config.max_token_lag is None:
        return {}
    shapes = {TOKEN_WEIGHT_VERSIONS: data[TOKEN_MASK].shape, TRAINING_WEIGHT_VERSION: data["sample_mask"].shape}
    device = data[TOKEN_MASK].device
    sampled_version, version = (checked_tensor(data, key, shape, device) for key, shape in shapes.items())
    lag = version.unsqueeze(-1) - sampled_version
    is_stale = (lag > config.max_token_lag)[:, 1:]
    is_trained = (data[TOKEN_MASK][:, 1:] * data["sample_mask"].unsqueeze(-1)) > 0
    return masks_without(data, is_trained & is_stale, is_trained & ~is_stale)


def masks_without(data: Mapping[str, Any], removed: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Return the batch's masks without the removed tokens; ``removed`` and ``kept`` are [B, T-1]."""
    token_mask, sample_mask = data[TOKEN_MASK].clone(), data["sample_mask"].clone()
    # A sequence that loses its last trained token leaves the sample mask, so that it no longer counts as valid.
    is_emptied = removed.any(dim=1) & ~kept.any(dim=1)
    token_mask[:, 1:].masked_fill_(removed.to(token_mask.device), 0)
    sample_mask.masked_fill_(is_emptied.to(sample_mask.device), 0)
    return {TOKEN_MASK: token_mask, "sample_mask": sample_mask}
