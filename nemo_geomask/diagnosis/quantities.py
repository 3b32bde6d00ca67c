"""What is measured of a mismatch, over steps and in parts of the data: a name, a definition and a value each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from nemo_geomask.diagnosis.read import Array
from nemo_geomask.diagnosis.statistics import CELLS, StepSums, per

__all__ = ["EXPECTED", "MEASURES", "NUMBERS", "REMOVED_SHARES", "Measure", "Number", "measured"]


class Number(NamedTuple):
    """A number of one step, or of several.

    Attributes:
        name: in tables.
        definition: what it is.
        value: of the sums; NaN where they hold none.
        boot: the sum of its bootstrap, where there is one.
        sign: of the number against that sum.
    """

    name: str
    definition: str
    value: Callable[[StepSums], float]
    boot: str = ""
    sign: int = 1

    def interval(self, sums: StepSums) -> tuple[float, float]:
        """95 % over sequences; NaN where there is no bootstrap."""
        if not self.boot:
            return math.nan, math.nan
        low, high = sorted(self.sign * end for end in sums.interval(self.boot))
        return low, high


def _effective(mean: str, square: str, count: str) -> Callable[[StepSums], float]:
    def share(sums: StepSums) -> float:
        return sums[mean] ** 2 / (sums[square] * sums[count]) if sums[square] * sums[count] else math.nan

    return share


NUMBERS: tuple[Number, ...] = (
    Number(
        "k1",
        "mean of −Δ, nats a token; also the gap of log-perplexities",
        lambda sums: -sums.mean("delta"),
        "delta",
        -1,
    ),
    Number("k3 reversed", "mean of exp(−Δ) − 1 + Δ; policy_kl_error", lambda sums: sums.mean("k3_reverse")),
    Number("|Δ|", "mean, nats", lambda sums: sums.mean("abs"), "abs"),
    Number("|Δ| > 0.1", "share of tokens; geomask/mismatch_above_0.1", lambda sums: sums.mean("above_0.1")),
    Number("|Δ| > 1", "share of tokens; geomask/mismatch_above_1", lambda sums: sums.mean("above_1")),
    Number("Δ > 0", "share of tokens that the training engine finds likelier", lambda sums: sums.mean("positive")),
    Number("noise", "mean |Δ| (at most 1) in units of 1 − p", lambda sums: sums.mean("size", "model")),
    Number("surprise", "mean of −gen (at most 20), nats a token", lambda sums: sums.mean("surprise")),
    Number(
        "mean weight", "of exp(Δ); 1 where gen are those of the sampler", lambda sums: sums.mean("weight"), "weight"
    ),
    Number(
        "ESS, sequences",
        "of exp(Σ Δ)",
        _effective("sequence_weight", "sequence_weight_square", "sequences"),
    ),
    Number("ESS, sequence_mean", "of exp(mean Δ)", _effective("mean_weight", "mean_weight_square", "sequences")),
    Number("masked out", "share of sequences with a sample mask of 0", lambda sums: _masked_out(sums)),
    Number(
        "their |Δ|", "mean |Δ| (at most 1) of those", lambda sums: sums.mean("masked_out_size", "masked_out_tokens")
    ),
    Number("reward", "mean over sequences", lambda sums: sums.mean("reward", "rewarded")),
    Number(
        "response length",
        "mean over sequences, tokens, tool output included",
        lambda sums: sums.mean("response", "sequences"),
    ),
    Number("staleness", "mean, steps", lambda sums: sums.mean("staleness", "stale_known")),
)
REMOVED_SHARES = ("share of trained tokens that it removes", "share of the sum of |Δ| (each at most 1) that it removes")
"""What there is of each mask."""


def _masked_out(sums: StepSums) -> float:
    return sums.mean("masked_out", "all_sequences")


EXPECTED = "against expected"


class Measure(NamedTuple):
    """What a token's mismatch is in one part of the data.

    Attributes:
        name: in tables.
        definition: what it is.
        value: of the part's sums by the names of ``CELLS``, and of those of all parts.
    """

    name: str
    definition: str
    value: Callable[[Mapping[str, float], Mapping[str, float]], float]


MEASURES: tuple[Measure, ...] = (
    Measure("tokens", "share of the trained tokens", lambda part, whole: per(part["tokens"], whole["tokens"])),
    Measure("|Δ|", "mean, each at most 1, nats", lambda part, whole: per(part["size"], part["tokens"])),
    Measure(
        EXPECTED,
        "mean |Δ| over mean 1 − p, in units of that of all tokens: 1 where it is noise on the logits",
        lambda part, whole: per(per(part["size"], part["model"]), per(whole["size"], whole["model"])),
    ),
    Measure("k3", "mean of exp(Δ) − 1 − Δ, nats a token", lambda part, whole: per(part["k3"], part["tokens"])),
    Measure("k1", "mean of −Δ, nats a token", lambda part, whole: -per(part["delta"], part["tokens"])),
    Measure("Δ > 0", "share of the part's tokens", lambda part, whole: per(part["positive"], part["tokens"])),
)
"""Columns of the tables by position, length and so on."""


def measured(cells: Array) -> dict[int, dict[str, float]]:
    """By bin that holds tokens and by the name of each of ``MEASURES``."""
    whole = dict(zip(CELLS, cells.sum(axis=0).tolist(), strict=True))
    found = {}
    for place in np.flatnonzero(cells[:, CELLS.index("tokens")]).tolist():
        part = dict(zip(CELLS, cells[place].tolist(), strict=True))
        found[place] = {one.name: one.value(part, whole) for one in MEASURES}
    return found
