"""Masks: which tokens stay in the surrogate, and what each mask removed."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.statistics import SequenceStatistics, token_value
from nemo_geomask.metrics import MetricSums

__all__ = ["reject"]


def reject(batch: TokenBatch, statistics: SequenceStatistics, config: LossConfig, metrics: MetricSums) -> Tensor:
    """Tokens kept by every mask: bool, token layout, within the trained tokens.

    Each mask judges the same tokens, those that train; none sees what another removed. For each, the fractions
    removed in all, below the lower and above the upper bound go to ``geomask/mask/<label>/…``, of tokens for a
    token-level mask and of sequences otherwise.
    """
    kept = batch.trained
    for rule in config.rules_in_loss:
        by_token = rule.level == "token"
        below, above = _removed(rule, batch, statistics)
        add = metrics.tokens if by_token else metrics.sequences
        add(f"geomask/mask/{rule.label}/removed", below + above)
        add(f"geomask/mask/{rule.label}/removed_low", below)
        add(f"geomask/mask/{rule.label}/removed_high", above)
        survives = (below + above) == 0
        kept = kept & (survives if by_token else batch.segments.spread(survives))
    metrics.tokens("geomask/kept_tokens", kept.int().float())
    return kept


def _removed(rule: MaskRule, batch: TokenBatch, statistics: SequenceStatistics) -> tuple[Tensor, Tensor]:
    """1 where the rule removes for the lower and for the upper bound, else 0; token layout or [S]."""
    if rule.level == "token":
        side = F.bound_side(token_value(batch, rule), rule.low, rule.high)
        below, above = torch.relu(-side), torch.relu(side)
        eligible, advantage = batch.trained, batch.advantages
    else:
        for_low, for_high = statistics.rule_value(rule)
        # A token beyond each bound is reported once, under the lower one.
        below = (for_low < rule.low).float()
        above = (for_high > rule.high).float() * (1 - below)
        eligible = ~statistics.empty
        advantage = statistics.advantage() if rule.when != "always" else statistics.count
    if rule.when == "negative_advantage":
        eligible = eligible & (advantage < 0)
    elif rule.when == "positive_advantage":
        eligible = eligible & (advantage > 0)
    return below * eligible, above * eligible
