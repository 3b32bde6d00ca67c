"""Quantities that tables and figures show, each with a name, a definition and a function that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.run_statistics import BIN_SUMS
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums, ratio_or_nan
from nemo_geomask.tools.diagnose.read.record_reader import Array


class Quantity(NamedTuple):
    """A quantity of one step, or of several steps together.

    Attributes:
        name: name in tables.
        definition: definition, as tables and figures show it.
        value: function that computes the quantity from the sums; NaN if they don't contain the data.
        bootstrapped_sum: the sum whose mean per token is the quantity and has bootstrap replicates; empty if the
            quantity has no interval.
        sign: -1 if the quantity is minus that mean, otherwise 1.
    """

    name: str
    definition: str
    value: Callable[[StepSums], float]
    bootstrapped_sum: str = ""
    sign: int = 1

    def interval(self, sums: StepSums) -> tuple[float, float]:
        """Return the confidence interval over sequences; NaN for both ends if there are no bootstrap replicates."""
        if not self.bootstrapped_sum:
            return math.nan, math.nan
        low, high = sorted(self.sign * end for end in sums.interval(self.bootstrapped_sum))
        return low, high


def effective_share(weight: float, weight_squared: float, count: float) -> float:
    """Return the effective sample size (Σ w)² / Σ w² as a share of the sample; NaN if all weights are 0."""
    return ratio_or_nan(weight**2, weight_squared * count)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "k1",
        "mean of −Δ, nats a token; also the difference of the log-perplexities",
        lambda sums: -sums.mean("delta"),
        "delta",
        -1,
    ),
    Quantity("k3 reversed", "mean of exp(−Δ) − 1 + Δ; policy_kl_error", lambda sums: sums.mean("k3_reverse")),
    Quantity("|Δ|", "mean, nats", lambda sums: sums.mean("abs_delta"), "abs_delta"),
    Quantity("|Δ| > 0.1", "share of tokens; geomask/mismatch_above_0.1", lambda sums: sums.mean("above_0.1")),
    Quantity("|Δ| > 1", "share of tokens; geomask/mismatch_above_1", lambda sums: sums.mean("above_1")),
    Quantity(
        "Δ > 0",
        "share of tokens that the training engine finds likelier than the generation engine",
        lambda sums: sums.mean("delta_positive"),
    ),
    Quantity("noise", "mean |Δ| (at most 1) in units of 1 − p", lambda sums: sums.mean("capped_abs", "one_minus_p")),
    Quantity("surprise", "mean of −gen (at most 20), nats a token", lambda sums: sums.mean("surprise")),
    Quantity(
        "mean weight",
        "mean of exp(Δ); 1 if gen are the sampler's log-probs",
        lambda sums: sums.mean("weight"),
        "weight",
    ),
    Quantity(
        "ESS, sequences",
        "effective sample size, as a share, of the weights exp(Σ Δ)",
        lambda sums: effective_share(sums["sequence_weight"], sums["sequence_weight_squared"], sums["sequences"]),
    ),
    Quantity(
        "ESS, sequence_mean",
        "effective sample size, as a share, of the weights exp(mean Δ)",
        lambda sums: effective_share(sums["mean_weight"], sums["mean_weight_squared"], sums["sequences"]),
    ),
    Quantity(
        "masked out",
        "share of sequences with a sample mask of 0",
        lambda sums: sums.mean("masked_out_sequences", "all_sequences"),
    ),
    Quantity(
        "their |Δ|",
        "mean |Δ| (at most 1) of the sequences that are masked out",
        lambda sums: sums.mean("masked_out_capped_abs", "masked_out_tokens"),
    ),
    Quantity("reward", "mean over sequences", lambda sums: sums.mean("reward", "sequences_with_reward")),
    Quantity(
        "response length",
        "mean over sequences, in tokens, tool output included",
        lambda sums: sums.mean("response_tokens", "sequences"),
    ),
    Quantity("staleness", "mean, in steps", lambda sums: sums.mean("staleness", "sequences_with_staleness")),
)
"""Quantities of a run, in the order of the table."""
REMOVED_SHARES: tuple[tuple[Literal["tokens", "capped_abs"], str], ...] = (
    ("tokens", "share of trained tokens that it removes"),
    ("capped_abs", "share of the sum of |Δ| (each at most 1) that it removes"),
)
"""Shares that a mask removes: the argument of :meth:`StepSums.removed_share`, and a definition."""

AGAINST_EXPECTED = "against expected"


class BinMeasure(NamedTuple):
    """A measure of the tokens in one bin of a dimension.

    Attributes:
        name: title of the column in tables.
        definition: definition, as tables show it.
        value: function that computes the measure from the sums of the bin and the sums of all bins, both by the names
            in ``BIN_SUMS``.
    """

    name: str
    definition: str
    value: Callable[[Mapping[str, float], Mapping[str, float]], float]


def _against_expected(sums: Mapping[str, float], total: Mapping[str, float]) -> float:
    rate = ratio_or_nan(sums["capped_abs"], sums["one_minus_p"])
    return ratio_or_nan(rate, ratio_or_nan(total["capped_abs"], total["one_minus_p"]))


BIN_MEASURES: tuple[BinMeasure, ...] = (
    BinMeasure(
        "tokens", "share of the trained tokens", lambda sums, total: ratio_or_nan(sums["tokens"], total["tokens"])
    ),
    BinMeasure(
        "|Δ|", "mean, each at most 1, nats", lambda sums, total: ratio_or_nan(sums["capped_abs"], sums["tokens"])
    ),
    BinMeasure(
        AGAINST_EXPECTED,
        "mean |Δ| over mean 1 − p, relative to that of all tokens: 1 if it is noise on the logits",
        _against_expected,
    ),
    BinMeasure(
        "k3", "mean of exp(Δ) − 1 − Δ, nats a token", lambda sums, total: ratio_or_nan(sums["k3"], sums["tokens"])
    ),
    BinMeasure("k1", "mean of −Δ, nats a token", lambda sums, total: -ratio_or_nan(sums["delta"], sums["tokens"])),
    BinMeasure(
        "Δ > 0", "share of the part's tokens", lambda sums, total: ratio_or_nan(sums["delta_positive"], sums["tokens"])
    ),
)
"""Columns of the tables by position, length and the other dimensions."""


def measure_bins(bin_sums: Array) -> dict[int, dict[str, float]]:
    """Return the value of every measure, by its name, for each bin that holds tokens.

    Args:
        bin_sums: [bins, len(BIN_SUMS)].
    """
    total = dict(zip(BIN_SUMS, bin_sums.sum(axis=0).tolist(), strict=True))
    values = {}
    for index in np.flatnonzero(bin_sums[:, BIN_SUMS.index("tokens")]).tolist():
        sums = dict(zip(BIN_SUMS, bin_sums[index].tolist(), strict=True))
        values[index] = {measure.name: measure.value(sums, total) for measure in BIN_MEASURES}
    return values
