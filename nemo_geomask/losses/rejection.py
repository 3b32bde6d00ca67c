"""Masks: which tokens stay in the surrogate, and what each mask removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import MaskRule
from nemo_geomask.config.masks import Allowance
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.losses.observe import Observed, rule_key, token_values
from nemo_geomask.metrics import Metric, Over

__all__ = ["reject", "removed_by", "rule_values"]


def reject(
    batch: TokenBatch, seen: Observed, rules: Iterable[MaskRule], bounds: Mapping[str, Tensor | float]
) -> tuple[Tensor | None, list[Metric]]:
    """Tokens that no mask removes, and what each removed.

    Each mask judges the same tokens, those that train; none sees what another removed. For each, the fractions
    removed in all, below the lower and above the upper bound are ``geomask/mask/<label>/…``, of tokens for a
    token-level mask and of sequences otherwise. ``bounds`` are, by label, the largest size that a mask with a budget
    keeps.

    Returns: bool, token layout, None without rules; and the metrics.
    """
    kept: Tensor | None = None
    reports: list[Metric] = []
    for rule in rules:
        below, above = removed_by(rule, batch, seen, bounds)
        removed = below | above
        survives = ~(removed if rule.by_token else batch.segments.spread(removed))
        kept = survives if kept is None else kept & survives
        over: Over = "tokens" if rule.by_token else "sequences"
        for name, which in (("removed", removed), ("removed_low", below), ("removed_high", above)):
            reports.append(Metric((f"geomask/mask/{rule.label}/{name}",), over, which.float))
    remain = ("geomask/kept_tokens",)
    if kept is None:
        return None, [Metric(remain, "summed", lambda: seen.trained)]
    return kept, [*reports, Metric(remain, "tokens", kept.float)]


def rule_values(rule: MaskRule, batch: TokenBatch, seen: Observed) -> tuple[Tensor, Tensor, Tensor]:
    """What the rule compares with its lower and with its upper bound, float32, and where it judges, bool; token layout
    or [S]."""
    key, prefix = rule_key(rule), seen.prefix
    if rule.level == "sequence_max":
        return seen.lowest[key], seen.highest[key], ~seen.empty
    if not rule.by_token:
        values = seen.sums[key] if rule.level == "sequence" else seen.mean(key)
        return values, values, ~seen.empty
    if rule.allowance is not None:
        values = _excess(rule, rule.allowance, batch, seen)
    elif rule.level == "token":
        values = token_values(batch, rule)
    elif rule.level in ("prefix_min", "prefix_max"):
        values = (prefix.lowest if rule.level == "prefix_min" else prefix.highest)[key]
    else:
        values = prefix.sums[key] / (prefix.sums["count"].clamp(min=1.0) if rule.level == "prefix_mean" else 1.0)
    values = values.float()
    return values, values, seen.trains != 0


def removed_by(
    rule: MaskRule, batch: TokenBatch, seen: Observed, bounds: Mapping[str, Tensor | float]
) -> tuple[Tensor, Tensor]:
    """Where the rule removes for the lower and for the upper bound: bool, token layout or [S]."""
    low, high, eligible = rule_values(rule, batch, seen)
    lowest, highest = (-bounds[rule.label], bounds[rule.label]) if rule.budgeted else (rule.low, rule.high)
    below, above = low < lowest, high > highest  # both ends are kept
    if rule.when != "always":
        advantages = batch.advantages if rule.by_token else seen.mean("advantages")
        down = advantages > 0 if rule.when == "positive_advantage" else advantages < 0
        up = advantages < 0 if rule.when == "negative_advantage" else advantages > 0
        below, above = below & down, above & up
    below = below & eligible
    # A sequence with tokens beyond both bounds is reported once, under the lower one.
    return below, above & eligible & ~below


def _excess(rule: MaskRule, allowance: Allowance, batch: TokenBatch, seen: Observed) -> Tensor:
    r"""How far a token's weighted distance or that of its prefix, less the budget of the tokens before, goes; float64.

    .. math:: v_t = \mathrm{sgn}(p_t - q_t)\,\max\Bigl(Z_t,\ \sum_{s \le t} Z_s - b\,W_{t-1}\Bigr), \qquad
        Z_t = w_t\,|p_t - q_t|, \qquad b = \mathrm{clamp}(\kappa\,Q_\beta(|p - q|),\ b_{min},\ 5\,b_{min})

    Staying within δ is CPPO's :math:`Z_t \le \min(\delta,\ \delta + b\,W_{t-1} - S_{t-1})`. Stages of its own: the
    response's length and quantile come first.
    """
    segments, distance = batch.segments, token_values(batch, rule)
    size = distance.abs()  # 0 where nothing trains
    usual = segments.quantile(size, seen.trains, allowance.quantile)
    budget = (allowance.scale * usual).clamp(allowance.budget_min, 5 * allowance.budget_min)
    length = segments.spread(seen.tokens).double()
    weight, before = F.position_weights(seen.prefix.sums["count"], length, allowance.weight_min)
    weighted = weight * size
    drift = segments.prefixes({"": weighted})[""] - segments.spread(budget) * before
    return torch.sign(distance) * torch.maximum(weighted, drift)
