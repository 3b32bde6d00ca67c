"""Sums over the trained tokens and the sequences of one step, with bootstrap replicates of some of them.

Sums of parts (files, processes, machines) add up to the sums of the whole, so no process ever holds a run in memory.
Δ = prev − gen is the training engine's log-prob of a trained token minus the generation engine's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.context import MIN_STANDARD_ERRORS
from nemo_geomask.tools.diagnose.read.record_reader import Array
from nemo_geomask.tools.shared.intervals import percentile_interval

BOOTSTRAP_REPLICATES = 100
"""Number of replicates of the bootstrap over sequences."""

TOKEN_SUMS = {
    "tokens": "number of trained tokens",
    "abs_delta": "|Δ|",
    "capped_abs": "min(|Δ|, 1); parts of the data are compared by it, because a few tokens dominate the mean of k3",
    "delta": "Δ; its mean is −k1, the difference of the log-perplexities",
    "k3": "exp(Δ) − 1 − Δ, an estimate of KL(gen ‖ prev)",
    "k3_reverse": "exp(−Δ) − 1 + Δ, NeMo-RL's policy_kl_error",
    "prob_error": "exp(|Δ|), NeMo-RL's token_mult_prob_error",
    "weight": "exp(Δ), the importance weight",
    "weight_squared": "exp(2Δ)",
    "delta_positive": "1 where Δ > 0",
    "above_0.1": "1 where |Δ| > 0.1",
    "above_1": "1 where |Δ| > 1",
    "one_minus_p": "1 − p, p the generation engine's probability: noise s on the logits moves it by s (1 − p)",
    "one_minus_p_squared": "(1 − p)²",
    "scaled_delta": "Δ/(1 − p), clipped to ±0.1, so that of large noise only the sign counts",
    "surprise": "−gen, at most 20; its mean estimates the cross-entropy of the sampled tokens",
}
"""Sums over trained tokens, with what is summed."""
SEQUENCE_SUMS = (
    *("sequences", "response_tokens", "reward", "sequences_with_reward", "staleness", "sequences_with_staleness"),
    *("sequence_weight", "sequence_weight_squared", "mean_weight", "mean_weight_squared"),
    *("entropy", "tokens_with_entropy"),
)
"""Sums over sequences that have a trained token: ``sequence_weight`` is exp(Σ Δ), ``mean_weight`` exp(mean Δ).

``entropy`` is over tokens: the entropy of the training engine's distribution, where it was recorded.
"""
CHECK_SUMS = (
    *("all_sequences", "sequences_without_gen", "sequences_without_prev", "nonfinite", "unsure_tokens"),
    *("zero_gen", "zero_prev", "positive_logprobs", "all_tokens"),
    *("sequences_checked_for_shift", "shifted_later", "shifted_earlier"),
    *("masked_out_sequences", "masked_out_capped_abs", "masked_out_tokens"),
    *("curr_sequences", "curr_shifted", "curr_same"),
)
"""Counts of ``logprob_checks``, and sums over what the sample mask leaves out.

``curr_…`` compare ``curr`` with ``prev``: sequences that are compared, those that are shifted, and those that differ by
numerical noise alone, as all of a batch's first update do.
"""
FAULTS = ("zero", "positive", "shifted")
"""Faults of single tokens, in the names of :data:`FAULT_SUMS`; a token has the last of the faults that apply."""
FAULT_SUMS = (
    *(f"{fault}_{measure}" for fault in FAULTS for measure in ("k3", "capped_abs")),
    "missing_k3",
    "missing_capped_abs",
)
"""Sums of ``k3`` and ``capped_abs`` over the trained tokens with each fault.

``missing`` are the tokens of sequences for which the generation engine returned only zeros. They are in no other sum,
because these zeros are no log-probs; the loss takes them for log-probs all the same.
"""
ADVANTAGE_SUMS = ("ad", "an", "a2d2", "a2dn", "a2n2")
"""Sums over sequences of products of the advantage a, n = √tokens and d = Σ scaled_delta / n.

The detector of a stale engine computes the correlation of Δ with the advantage from them.
"""
CONTEXT_SUMS = (
    *("wrong_tokens", "wrong_tokens_good", "wrong_tokens_bad", "sequences_with_advantages"),
    *("explained_tokens", "explained_squared", "tokens_with_context"),
    *("pull", "pull_squared", "sequences_with_context"),
)
"""Sums that tell the harm of a bias that persists; see :mod:`~nemo_geomask.tools.diagnose.measure.context`.

``wrong_tokens`` is Σ (1 − exp(Δ))₊ over tokens: the expected number of tokens that the training engine would not have
sampled; ``good`` and ``bad`` are those with A > 0 and A < 0. ``explained_tokens`` is the sum of the share of the
advantage that the context explains, s, and ``pull`` that of ½ s |1 − exp(Δ)|; ``squared`` are sums of the squares of
what each prompt adds. They are over the steps in which s is identified: ``sequences_with_context`` are the sequences
with an advantage other than 0 there.
"""
SUMS = (*TOKEN_SUMS, *SEQUENCE_SUMS, *CHECK_SUMS, *FAULT_SUMS, *ADVANTAGE_SUMS, *CONTEXT_SUMS)
"""Order of the sums in :attr:`StepSums.sums`."""
BOOTSTRAP_SUMS = (
    *("tokens", "abs_delta", "capped_abs", "delta", "k3", "prob_error", "weight", "weight_squared", "one_minus_p"),
    *FAULT_SUMS,
)
"""Sums that have bootstrap replicates, in the order of the columns of :attr:`StepSums.bootstrap`."""
_INDEX = {name: index for index, name in enumerate(SUMS)}


class Estimate(NamedTuple):
    """A value and the ends of its confidence interval; NaN where there is none."""

    value: float
    low: float
    high: float

    @classmethod
    def over_prompts(cls, total: float, squared: float, count: float) -> Estimate:
        """Return a total over a count, from the sum of the squares of what each prompt adds to the total."""
        value, width = (ratio_or_nan(x, count) for x in (total, MIN_STANDARD_ERRORS * math.sqrt(squared)))
        return cls(value, value - width, value + width)


def ratio_or_nan(numerator: float, denominator: float) -> float:
    """Return the ratio, or NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


@dataclass
class StepSums:
    """Sums of one step, or of several steps added up.

    ``sums["k3"]`` reads one of them, ``sums["k3"] = 1.0`` sets it.
    """

    sums: Array = field(default_factory=lambda: np.zeros(len(SUMS)))  # [len(SUMS)], in the order of SUMS
    # [BOOTSTRAP_REPLICATES, len(BOOTSTRAP_SUMS)]
    bootstrap: Array = field(default_factory=lambda: np.zeros((BOOTSTRAP_REPLICATES, len(BOOTSTRAP_SUMS))))
    # [2], number and capped_abs of the trained tokens of the records that contain decisions of masks
    maskable: Array = field(default_factory=lambda: np.zeros(2))
    # the same over the tokens that a mask removes, for each mask by its label
    removed: dict[str, Array] = field(default_factory=dict)
    # smallest and largest weight version of the samples; (inf, -inf) if none was recorded
    versions: tuple[float, float] = (np.inf, -np.inf)

    def __getitem__(self, name: str) -> float:
        return float(self.sums[_INDEX[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self.sums[_INDEX[name]] = value

    def mean(self, name: str, over: str = "tokens") -> float:
        """Return a sum divided by another one, the number of trained tokens by default; NaN if that is 0."""
        return ratio_or_nan(self[name], self[over])

    def advantage_explained(self) -> Estimate:
        """Return the share of the mean square of the advantage that its context predicts; NaN where unidentified."""
        return Estimate.over_prompts(self["explained_tokens"], self["explained_squared"], self["tokens_with_context"])

    def pull(self) -> Estimate:
        """Return ½ Σ s |1 − exp(Δ)| / responses; NaN where s is not identified."""
        return Estimate.over_prompts(self["pull"], self["pull_squared"], self["sequences_with_context"])

    def removed_share(self, label: str, of: Literal["tokens", "capped_abs"] = "tokens") -> float:
        """Return the share that a mask removes of the trained tokens, or of their mismatch; NaN if not recorded."""
        column = ("tokens", "capped_abs").index(of)
        return ratio_or_nan(float(self.removed.get(label, np.zeros(2))[column]), float(self.maskable[column]))

    def replicates(self) -> dict[str, Array]:
        """Return the replicates of each of :data:`BOOTSTRAP_SUMS`, without replicates that drew no token."""
        drawn = self.bootstrap[self.bootstrap[:, BOOTSTRAP_SUMS.index("tokens")] > 0]
        return dict(zip(BOOTSTRAP_SUMS, drawn.T, strict=True))

    def interval(self, name: str) -> tuple[float, float]:
        """Return the bootstrap interval, over sequences, of a sum's mean per token; NaN if there is no token."""
        replicates = self.replicates()
        return percentile_interval(replicates[name] / replicates["tokens"])

    def add(self, other: StepSums) -> None:
        """Add the sums of another part of the same step, or of another step."""
        self.sums = self.sums + other.sums
        self.bootstrap = self.bootstrap + other.bootstrap
        self.maskable = self.maskable + other.maskable
        self.versions = min(self.versions[0], other.versions[0]), max(self.versions[1], other.versions[1])
        add_by_key(self.removed, other.removed)


def add_by_key(mine: dict[Any, Array], others: Mapping[Any, Array]) -> None:
    """Add the values of another mapping to those of the same keys."""
    for key, value in others.items():
        mine[key] = mine[key] + value if key in mine else value
