"""Sequence statistics that a configuration needs, gathered in one reduction.

Weights, masks, the variant and the check for non-finite values each say what they need of a sequence; all of it is
pooled together, so that under context parallelism one stage of collectives serves the whole loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.losses.batch import Reading, TokenBatch

__all__ = ["SequenceStatistics", "token_value"]

_POOLED = ("sequence", "sequence_mean")


class SequenceStatistics:
    """Statistics of one microbatch over each sequence, and which sequences it goes on without.

    Where sequences cross ranks, whether one is dropped travels with the statistics: until then each bad token is
    neutral by itself, and afterwards a dropped sequence has the statistics of an empty one.

    Args:
        read: the microbatch as read.
        config: what is configured.
        pool: token tensors of ``read`` whose sequence means the variant asks for.

    Attributes:
        batch: the microbatch without dropped sequences.
        verdict: which those are.
        count: [S], summed weight of the trained tokens.
        empty: [S] bool, no token left to train.

    Raises:
        NonFiniteError: under ``nonfinite: raise``, on all ranks where it holds on one.
    """

    def __init__(self, read: TokenBatch, config: LossConfig, pool: Mapping[str, Tensor]) -> None:
        judged = read.verdict.judged() if isinstance(read.verdict, Reading) else {}
        sums, lowest, highest = read.segments.pool({**judged, **_sums(read, config, pool)}, *_extremes(read, config))
        if isinstance(read.verdict, Reading):
            self.verdict = read.verdict.judge(sums)
            self.batch = read.verdict.batch(self.verdict)
            _gate(read.curr, self.batch.trained)
        else:
            self.verdict, self.batch = read.verdict, read
        dropped = self.verdict.dropped
        self._sums = {name: value.masked_fill(dropped, 0.0) for name, value in sums.items() if name not in judged}
        self._lowest = {name: value.masked_fill(dropped, torch.inf) for name, value in lowest.items()}
        self._highest = {name: value.masked_fill(dropped, -torch.inf) for name, value in highest.items()}
        self.count = self._sums.pop("count")
        self.empty = ~self.count.bool()
        self._inverse = (self.count + self.empty).reciprocal()

    def pooled(self, key: str, level: str) -> Tensor:
        """[S] sum or mean of a tensor pooled at construction."""
        return self._sums[key] if level == "sequence" else self._sums[key] * self._inverse

    def rule_value(self, rule: MaskRule) -> tuple[Tensor, Tensor]:
        """[S] values to hold against the rule's lower and upper bound."""
        key = _key(rule)
        if rule.level == "sequence":
            # The sum runs over tokens; a fractional sample mask weights the loss, not the ratio.
            sample_mask = self.batch.sample_mask
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
            name.removeprefix(prefix): self.batch.segments.spread(self.pooled(name, "sequence_mean"))
            for name in self._sums
            if name.startswith(prefix)
        }


def _gate(curr: Tensor, trained: Tensor) -> None:
    """Let no gradient through to tokens that don't train: what the statistics met in a dropped sequence, a NaN of the
    model's perhaps, must not come back from them."""
    if curr.requires_grad:
        curr.register_hook(lambda grad: F.select(grad.contiguous(), trained))  # type: ignore[no-untyped-call]


def token_value(batch: TokenBatch, rule: MaskRule) -> Tensor:
    """The rule's statistic at each token."""
    return F.token_statistic(getattr(batch, rule.log_ratio), rule.statistic)


def _sums(batch: TokenBatch, config: LossConfig, pool: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wanted: dict[str, Tensor] = {}
    if config.correction_level != "token" or config.truncation == "seq-mask-tis":
        wanted["mismatch.ratio"] = batch.mismatch
    for rule in config.rules_in_loss:
        if rule.level in _POOLED:
            wanted[_key(rule)] = token_value(batch, rule)
        if rule.level != "token" and rule.when != "always":
            wanted["advantage"] = batch.advantages
    wanted.update({f"variant.{name}": value for name, value in pool.items()})
    return {"count": batch.weight, **{name: value * batch.weight for name, value in wanted.items()}}


def _extremes(batch: TokenBatch, config: LossConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    values = {_key(rule): token_value(batch, rule) for rule in config.rules_in_loss if rule.level == "sequence_max"}
    return (
        {key: torch.where(batch.trained, value, torch.inf) for key, value in values.items()},
        {key: torch.where(batch.trained, value, -torch.inf) for key, value in values.items()},
    )


def _key(rule: MaskRule) -> str:
    return f"{rule.log_ratio}.{rule.statistic}"
