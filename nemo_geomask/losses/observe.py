"""Every statistic of every sequence that a loss needs, pooled once.

Weights, masks, the variant and the check for non-finite values each say what they need of a sequence; all of it is
one reduction, and under context parallelism one stage of collectives, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.losses.batch import TokenBatch
from nemo_geomask.metrics import Metric
from nemo_geomask.segments import Pooled, Prefix
from nemo_geomask.segments.base import NONE

__all__ = ["Observed", "observe", "rule_key", "token_values"]


class Observed(NamedTuple):
    """What is known of the sequences, and which tokens train after all; float32 but for ``empty``.

    A dropped sequence has the statistics of an empty one.
    """

    trains: Tensor  # token layout: 1 at tokens with finite values, of sequences that aren't dropped, else 0
    weight: Tensor  # token layout: token mask times sample mask where trains, else 0
    trained: Tensor  # 0-d, sum of the weight
    sample_mask: Tensor  # [S], 0 also for a dropped sequence
    declared: Tensor  # [S], trained tokens of each sequence as the batch declares them; 0 where not asked for
    tokens: Tensor  # [S], summed token mask of those that train after all; 0 where nothing was to be pooled
    empty: Tensor  # [S] bool, no token left to train
    sums: dict[str, Tensor]  # [S] each, of the tensors asked for, under the token mask
    lowest: dict[str, Tensor]  # [S] each, over trained tokens
    highest: dict[str, Tensor]  # likewise
    prefix: Pooled  # token layout, of the tensors asked for, over trained tokens up to and including each

    def mean(self, key: str) -> Tensor:
        """[S] mean of a tensor over the sequence's trained tokens; 0 for an empty one."""
        return self.sums[key] / torch.where(self.empty, 1.0, self.tokens)


def rule_key(rule: MaskRule) -> str:
    """Of what the rule pools, among the statistics."""
    return f"{rule.log_ratio}.{rule.statistic}"


def token_values(batch: TokenBatch, rule: MaskRule) -> Tensor:
    """What the rule pools, token layout."""
    if rule.measure is not None:
        found = rule.measure.of(*batch.pair(rule.log_ratio))
        return torch.where(batch.trains != 0, found, 0.0)
    if rule.statistic in ("ratio", "k2", "k3"):
        return F.token_statistic(batch.log_ratios(rule.log_ratio), rule.statistic)
    return F.binary_statistic(*batch.pair(rule.log_ratio), rule.statistic)


def _of_rules(batch: TokenBatch, rules: Iterable[MaskRule]) -> tuple[dict[str, Tensor], dict[str, Tensor], Pooled]:
    """Token tensors whose sums, and those whose extremes, the rules need of each sequence; and of each prefix."""
    sums: dict[str, Tensor] = {}
    extremes: dict[str, Tensor] = {}
    prefix = Pooled({}, {}, {})
    of_level = {
        "sequence_max": extremes,
        "prefix_sum": prefix.sums,
        "prefix_mean": prefix.sums,
        "prefix_min": prefix.lowest,
        "prefix_max": prefix.highest,
    }
    for rule in rules:
        if rule.level in ("prefix_mean", "prefix_excess"):
            prefix.sums["count"] = torch.ones_like(batch.trains)
        if rule.level not in ("token", "prefix_excess"):
            of_level.get(rule.level, sums)[rule_key(rule)] = token_values(batch, rule)
        if not rule.by_token and rule.when != "always":
            sums["advantages"] = batch.advantages
    return sums, extremes, prefix


def observe(
    batch: TokenBatch, rules: Iterable[MaskRule], config: LossConfig, further: Mapping[str, Tensor] = NONE
) -> tuple[Observed, list[Metric]]:
    """Pool token tensors over their sequences.

    Args:
        batch: the microbatch.
        rules: masks, each of which says what it needs of sequences or prefixes.
        config: the settings in force: whether the weight, the normalisation and the NLL term need something of
            sequences, and whether a token with a non-finite value drops its own; under ``raise`` the caller stops.
        further: token tensors to sum over trained tokens, differentiable.

    Returns: the statistics, and ``num_valid_samples`` and ``geomask/dropped_sequences``.
    """
    segments, token_mask = batch.segments, batch.token_mask
    of_rules, extremes, prefix = _of_rules(batch, rules)
    sums = {**of_rules, **further}
    if config.knows_prev and (config.correction_level != "token" or config.truncation == "seq-mask-tis"):
        sums["mismatch.ratio"] = batch.mismatch
    count = batch.rewards is not None and config.positive_example_nll_normalization == "microbatch"
    wanted = {"declared": token_mask} if config.normalization == "sequences" else {}
    if config.nonfinite == "drop_sequence":
        wanted["bad"] = batch.bad
    if sums or extremes or count or "count" in prefix.sums:
        mask = token_mask * batch.trains
        wanted |= {"count": mask, **{f"sum {name}": value * mask for name, value in sums.items()}}
    none = batch.trains == 0 if extremes or any(prefix) else batch.trains

    def over(values: Mapping[str, Tensor], idle: float) -> dict[str, Tensor]:
        return {name: torch.where(none, idle, value) for name, value in values.items()}

    running = Prefix(prefix)
    if any(prefix):
        running = segments.prefix(
            over(prefix.sums, 0.0), over(prefix.lowest, torch.inf), over(prefix.highest, -torch.inf)
        )
    pooled = segments.pool(
        wanted | running.parts.sums,
        over(extremes, torch.inf) | running.parts.lowest,
        over(extremes, -torch.inf) | running.parts.highest,
    )
    found, sample_mask = pooled.sums, batch.sample_mask
    zero = sample_mask * 0
    dropped = torch.sign(found.get("bad", zero))
    alive = 1 - dropped
    on_tokens = segments.spread(alive)
    counted = found.get("count", zero) * alive
    gone = dropped != 0
    weight = batch.weight * on_tokens
    observed = Observed(
        trains=batch.trains * on_tokens,
        weight=weight,
        trained=weight.sum(),
        sample_mask=sample_mask * alive,
        declared=found.get("declared", zero),
        tokens=counted,
        empty=counted == 0,
        sums={name: torch.where(gone, 0.0, found[f"sum {name}"]) for name in sums},
        lowest={name: torch.where(gone, torch.inf, pooled.lowest[name]) for name in extremes},
        highest={name: torch.where(gone, -torch.inf, pooled.highest[name]) for name in extremes},
        prefix=segments.whole_prefix(running, pooled) if any(prefix) else prefix,
    )
    return observed, [
        Metric(("num_valid_samples",), "count", sample_mask.sum),
        Metric(("geomask/dropped_sequences",), "count", dropped.sum),
    ]
