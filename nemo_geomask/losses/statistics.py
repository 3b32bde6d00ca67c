"""Sequence statistics that a configuration needs, gathered in one reduction.

Weights, masks and the variant each say what they need of a sequence; all of it is pooled together, so that under
context parallelism one stage of collectives serves the whole loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.functional import token_statistic
from nemo_geomask.losses.batch import TokenBatch

__all__ = ["SequenceStatistics"]

_POOLED = ("sequence", "sequence_mean")


class SequenceStatistics:
    """Log-ratios of one microbatch and their statistics over each sequence.

    Args:
        batch: the tokens.
        config: what is configured.
        pool: token tensors whose sequence means the variant asks for.

    Attributes:
        log_ratios: ``mismatch`` (prev − gen), ``policy`` (curr − prev), ``total`` (curr − gen), token layout, without
            gradient.
        count: [S], summed weight of the trained tokens.
        empty: [S] bool, no token left to train.
    """

    def __init__(self, batch: TokenBatch, config: LossConfig, pool: Mapping[str, Tensor]) -> None:
        self._batch = batch
        curr = batch.curr.detach()
        self.log_ratios = {
            "mismatch": batch.prev - batch.gen,
            "policy": curr - batch.prev,
            "total": curr - batch.gen,
        }
        wanted: dict[str, Tensor] = {}
        lowest: dict[str, Tensor] = {}
        highest: dict[str, Tensor] = {}
        if config.correction_level != "token" or config.truncation == "seq-mask-tis":
            wanted["mismatch.ratio"] = self.log_ratios["mismatch"]
        for rule in config.mask_rules:
            if rule.level == "token":
                continue
            key = _key(rule)
            value = self.token_value(rule)
            if rule.level in _POOLED:
                wanted[key] = value
            else:
                lowest[key] = torch.where(batch.trained, value, torch.inf)
                highest[key] = torch.where(batch.trained, value, -torch.inf)
            if rule.when != "always":
                wanted["advantage"] = batch.advantages
        wanted.update({f"variant.{name}": value for name, value in pool.items()})
        sums = batch.segments.sum(
            {"count": batch.weight, **{name: value * batch.weight for name, value in wanted.items()}}
        )
        self._lowest, self._highest = batch.segments.extremes(lowest, highest)
        self.count = sums.pop("count")
        self.empty = ~self.count.bool()
        self._sums = sums
        self._inverse = (self.count + self.empty).reciprocal()

    def token_value(self, rule: MaskRule) -> Tensor:
        """The rule's statistic at each token."""
        return token_statistic(self.log_ratios[rule.log_ratio], rule.statistic)

    def pooled(self, key: str, level: str) -> Tensor:
        """[S] sum or mean of a tensor pooled at construction."""
        return self._sums[key] if level == "sequence" else self._sums[key] * self._inverse

    def rule_value(self, rule: MaskRule) -> tuple[Tensor, Tensor]:
        """[S] values to hold against the rule's lower and upper bound."""
        key = _key(rule)
        if rule.level == "sequence":
            # The sum runs over tokens; a fractional sample mask weights the loss, not the ratio.
            sample_mask = self._batch.sample_mask
            value = self._sums[key] / torch.where(sample_mask == 0, 1.0, sample_mask)
            return value, value
        if rule.level == "sequence_mean":
            value = self.pooled(key, rule.level)
            return value, value
        return self._lowest[key], self._highest[key]

    def advantage(self) -> Tensor:
        """[S] mean advantage."""
        return self.pooled("advantage", "sequence_mean")

    def variant_means(self) -> dict[str, Tensor]:
        """What the variant asked for: means over each sequence, spread over the tokens."""
        prefix = "variant."
        return {
            name.removeprefix(prefix): self._batch.segments.spread(self.pooled(name, "sequence_mean"))
            for name in self._sums
            if name.startswith(prefix)
        }


def _key(rule: MaskRule) -> str:
    return f"{rule.log_ratio}.{rule.statistic}"
