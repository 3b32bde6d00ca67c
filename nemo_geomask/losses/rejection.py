"""Application of the masks: the tokens that stay in the surrogate, and the fraction that each mask removes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import MaskRule
from nemo_geomask.config.masks import Allowance
from nemo_geomask.losses.batch import TokenBatch, zero_outside
from nemo_geomask.losses.sequence_stats import PooledBy, PooledStatistic, SequencePool, SequenceStats
from nemo_geomask.metrics import Metric, Reduction

_POOLED_BY: dict[str, PooledBy] = {
    "sequence": "sum",
    "sequence_mean": "mean",
    "prefix_sum": "prefix_sum",
    "prefix_mean": "prefix_mean",
    "prefix_min": "prefix_min",
    "prefix_max": "prefix_max",
    "turn": "turn_sum",
    "turn_mean": "turn_mean",
}
"""How token values are pooled, for each level whose rules compare one statistic with both bounds.

Level ``sequence_max`` is not here: it compares the minimum with the lower bound and the maximum with the upper bound.
"""


class PooledRule(NamedTuple):
    """A mask rule with the statistics that it needs; None where it needs none."""

    rule: MaskRule
    lowest: PooledStatistic | None = None  # compared with the lower bound
    highest: PooledStatistic | None = None  # compared with the upper bound
    advantage: PooledStatistic | None = None  # mean over the sequence, for a rule that depends on its sign
    position: PooledStatistic | None = None  # number of trained tokens up to and including each, for rule.allowance
    mean_size: PooledStatistic | None = None  # mean absolute value over the sequence, for level sequence_mean_size


def request_rules(pool: SequencePool, batch: TokenBatch, rules: Iterable[MaskRule]) -> list[PooledRule]:
    """Request the sequence and prefix statistics that the rules need."""
    return [_request_rule(pool, batch, rule) for rule in rules]


def _request_rule(pool: SequencePool, batch: TokenBatch, rule: MaskRule) -> PooledRule:
    if rule.level == "token":
        return PooledRule(rule)
    if rule.allowance is not None:
        return PooledRule(rule, position=pool.request(torch.ones_like(batch.gen), "prefix_sum"))
    values = _token_values(batch, rule)
    if rule.level == "sequence_mean_size":
        return PooledRule(rule, mean_size=pool.request(values.abs(), "mean"))
    if rule.level == "sequence_max":
        lowest, highest = pool.request(values, "min"), pool.request(values, "max")
    else:
        lowest = highest = pool.request(values, _POOLED_BY[rule.level])
    is_conditional = not rule.is_per_token and rule.when != "always"
    advantage = pool.request(batch.advantages, "mean") if is_conditional else None
    return PooledRule(rule, lowest, highest, advantage)


def reject(
    batch: TokenBatch, stats: SequenceStats, rules: Iterable[PooledRule], budget_bounds: Mapping[str, Tensor | float]
) -> tuple[Tensor | None, list[Metric]]:
    """Return the tokens that no mask removes, and the metrics of what each mask removed.

    The masks are independent: each judges all trained tokens, whatever the other masks remove. The metrics
    ``geomask/mask/<label>/removed``, ``…/removed_low`` and ``…/removed_high`` are the fractions that a mask removes in
    all, below its lower bound, and above its upper bound. They are fractions of the tokens for a mask that judges
    tokens, and of the sequences otherwise.

    Args:
        batch: the microbatch.
        stats: statistics of its sequences.
        rules: the masks, with their statistics.
        budget_bounds: by label, the largest absolute value that a mask with a budget keeps.

    Returns: bool, token layout, True where a token is kept, or None without rules; and the metrics.
    """
    kept: Tensor | None = None
    reports: list[Metric] = []
    for pooled_rule in rules:
        rule = pooled_rule.rule
        below, above = find_removed(pooled_rule, batch, stats, budget_bounds)
        removed = below | above
        survives = ~(removed if rule.is_per_token else batch.segments.spread(removed))
        kept = survives if kept is None else kept & survives
        reduction: Reduction = "tokens" if rule.is_per_token else "sequences"
        for name, flags in (("removed", removed), ("removed_low", below), ("removed_high", above)):
            reports.append(Metric((f"geomask/mask/{rule.label}/{name}",), reduction, flags.float))
    kept_tokens = ("geomask/kept_tokens",)
    if kept is None:
        return None, [Metric(kept_tokens, "token_sum", lambda: stats.total_weight)]
    return kept, [*reports, Metric(kept_tokens, "tokens", kept.float)]


def find_removed(
    pooled_rule: PooledRule, batch: TokenBatch, stats: SequenceStats, budget_bounds: Mapping[str, Tensor | float]
) -> tuple[Tensor, Tensor]:
    """Return the tokens or sequences that the rule removes below its lower bound, and those above its upper bound.

    Returns: two bool tensors, in token layout for a rule that judges tokens, else [S]; never both True.
    """
    rule = pooled_rule.rule
    lowest, highest, is_judged = rule_values(pooled_rule, batch, stats)
    low: Tensor | float = rule.low
    high: Tensor | float = rule.high
    if rule.has_budget:
        high = budget_bounds[rule.label]
        low = -high
    below, above = lowest < low, highest > high  # values equal to a bound are kept
    if rule.when != "always":
        advantages = batch.advantages if pooled_rule.advantage is None else pooled_rule.advantage.value
        # Under "pushing" a rule removes what the advantage moves further beyond a bound: below the lower one where
        # A < 0, above the upper one where A > 0.
        below = below & (advantages > 0 if rule.when == "positive_advantage" else advantages < 0)
        above = above & (advantages < 0 if rule.when == "negative_advantage" else advantages > 0)
    below = below & is_judged
    # A sequence with tokens beyond both bounds is reported once, under the lower one.
    return below, above & is_judged & ~below


def rule_values(pooled_rule: PooledRule, batch: TokenBatch, stats: SequenceStats) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values to compare with the lower and the upper bound, and which of them are judged.

    Returns: two float32 tensors and a bool tensor, in token layout for a rule that judges tokens, else [S].
    """
    rule, lowest, highest, _, position, mean_size = pooled_rule
    if lowest is not None and highest is not None:
        if rule.is_per_token:
            return lowest.value.float(), highest.value.float(), stats.is_trained
        return lowest.value, highest.value, ~stats.is_empty
    if mean_size is not None:
        # The sequence decides how far is too far, and each token's own direction which updates push it there.
        direction = torch.sign(batch.detached_log_ratio(rule.log_ratio))
        values = direction * batch.segments.spread(mean_size.value)
        return values, values, stats.is_trained
    values = _token_values(batch, rule)
    if rule.allowance is not None and position is not None:
        values = _excess(values, rule.allowance, position.value, batch, stats).float()
    return values, values, stats.is_trained


def _token_values(batch: TokenBatch, rule: MaskRule) -> Tensor:
    """Return the statistic of each token that the rule judges or pools, token layout."""
    if rule.plugin_statistic is not None:
        values: Tensor = rule.plugin_statistic.of(*batch.compared_logprobs(rule.log_ratio))
        return zero_outside(batch.is_trained, values)
    if rule.statistic in get_args(F.Statistic):
        return F.token_statistic(batch.detached_log_ratio(rule.log_ratio), rule.statistic)
    return F.binary_statistic(*batch.compared_logprobs(rule.log_ratio), rule.statistic)


def _excess(
    distance: Tensor, allowance: Allowance, position: Tensor, batch: TokenBatch, stats: SequenceStats
) -> Tensor:
    r"""Return CPPO's signed excess: the larger of a token's weighted distance and its prefix's drift; float64.

    .. math:: v_t = \mathrm{sgn}(p_t - q_t)\,\max\Bigl(Z_t,\ \sum_{s \le t} Z_s - b\,W_{t-1}\Bigr), \qquad
        Z_t = w_t\,|p_t - q_t|, \qquad b = \mathrm{clamp}(\kappa\,Q_\beta(|p - q|),\ b_{min},\ 5\,b_{min})

    p and q are the two probabilities of a token that the rule compares. :math:`Q_\beta` is the β-quantile over the
    response's trained tokens. :math:`w_t` and :math:`W_{t-1}` are those of
    :func:`~nemo_geomask.functional.position_weights`. With :math:`S_{t-1} = \sum_{s<t} Z_s` and the rule's bound δ,
    :math:`|v_t| \le \delta` is CPPO's condition :math:`Z_t \le \min(\delta,\ \delta + b\,W_{t-1} - S_{t-1})`. Under
    context parallelism this makes collectives of its own, since the length and the quantile must be known first.

    Args:
        distance: :math:`p_t - q_t`, token layout, 0 at tokens that aren't trained.
        allowance: :math:`w_{min}`, :math:`b_{min}`, :math:`\beta` and :math:`\kappa`.
        position: number of trained tokens up to and including each, token layout, float64.
    """
    segments, size = batch.segments, distance.abs()
    quantile = segments.quantile(size, stats.is_trained.float(), allowance.quantile)
    budget = (allowance.scale * quantile).clamp(allowance.budget_min, 5 * allowance.budget_min)
    length = segments.spread(stats.trained_tokens).double()
    weight, weight_before = F.position_weights(position, length, allowance.weight_min)
    weighted_size = weight * size
    drift = segments.prefix_sums({"": weighted_size})[""] - segments.spread(budget) * weight_before
    return torch.sign(distance) * torch.maximum(weighted_size, drift)
