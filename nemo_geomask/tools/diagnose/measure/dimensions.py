"""Dimensions by which trained tokens are split into bins, and the mismatch of the tokens in each bin.

Sums are of the tokens of a :class:`TokenTable`. If that is a sample, they are unbiased estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.measure.token_table import TokenTable
from nemo_geomask.tools.diagnose.read.record_reader import Array

ENVIRONMENT = "environment"
"""Value of ``--by`` for the names of environments, which are not known in advance and so have no edges."""
SURPRISE_EDGES = np.array([1e-3, 1e-2, 0.1, 0.35, 0.7, 1.2, 2.0, 3.0, 4.6, 6.9])
"""Edges between the bins of a token's surprise −gen, in nats; above 4.6 its probability is below 1 %."""


@dataclass(frozen=True)
class Dimension:
    """A property of a token, or of its sequence, that the mismatch may depend on, by its name for ``--by``.

    Bin i holds the values from edges[i-1] up to but excluding edges[i]; counts are integers. ``requirement`` are the
    data that it needs besides log-probs.
    """

    name: str
    edges: Array
    unit: str
    read: Callable[[TokenTable], Array]  # [M], its value for each token; NaN where it was not recorded
    is_count: bool = True
    requirement: str = ""

    @property
    def bin_count(self) -> int:
        """Number of bins."""
        return len(self.edges) + 1

    def label(self, first: int, last: int) -> str:
        """Return the range of values in the bins ``first`` to ``last`` as text, such as "16 to 23" or "above 0"."""
        low, high = self._edge(first - 1), self._edge(last)
        if self.is_count:
            if low is None and high == 1:
                return "0"
        elif low == 0:
            return "0" if high == 0 else "above 0" if high is None else f"above 0 to {high:g}"
        if low is None:
            return f"below {high:g}"
        if high is None:
            return f"{low:g} and more"
        last_value = high - 1 if self.is_count else high
        return f"{low:g}" if low == last_value else f"{low:g} to {last_value:g}"

    def _edge(self, index: int) -> float | None:
        """Return an edge as it is printed, or None beyond the outermost edges.

        Edges of ±1e-6 put the value 0 into a separate bin; both are printed as 0.
        """
        if not 0 <= index < len(self.edges):
            return None
        return round(float(self.edges[index]), 5) + 0.0  # "+ 0.0" turns -0.0 into 0.0


def _of_sequence(name: str) -> Callable[[TokenTable], Array]:
    return lambda table: table.numbers[name][table.sequence]


# 16, 24, 32, 48, …, 131072: two bins for each doubling.
_HALF_OCTAVES = np.sort(np.concatenate([2.0 ** np.arange(4, 18), 3.0 * 2.0 ** np.arange(3, 17)]))
DIMENSIONS = (
    Dimension("probability", SURPRISE_EDGES, "nats of surprise", lambda table: table.surprise, is_count=False),
    Dimension("position", _HALF_OCTAVES, "tokens into the response", lambda table: table.position),
    Dimension(
        "turn",
        np.array([1.0, 2, 3, 4, 6, 8]),
        "earlier turns",
        lambda table: table.turn,
        requirement="responses of several turns",
    ),
    Dimension("length", _HALF_OCTAVES, "tokens", _of_sequence("after_prompt")),
    Dimension(
        "staleness",
        np.array([1.0, 2, 3, 4, 6, 8, 12, 16]),
        "steps",
        _of_sequence("staleness"),
        requirement="the flight recorder's weight versions, of asynchronous runs",
    ),
    Dimension(
        "reward", np.array([-1e-6, 1e-6, 0.25, 0.5, 0.75, 1.0]), "reward", _of_sequence("reward"), is_count=False
    ),
    Dimension("advantage", np.array([-1e-6, 1e-6]), "sign", lambda table: table.advantage, is_count=False),
    Dimension(
        "entropy",
        np.array([0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0]),
        "nats of entropy",
        lambda table: table.entropy,
        is_count=False,
        requirement="loss_fn.record.entropy: true",
    ),
)
DIMENSIONS_BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}

BIN_SUMS = (
    *("tokens", "capped_abs", "one_minus_p", "delta", "k3", "delta_positive"),
    *("capped_abs_squared", "capped_abs_times_one_minus_p", "one_minus_p_squared"),
)
"""Sums over the tokens of a bin, as in ``step_sums``; then products of one sequence's sums, over sequences."""
AGAINST_EXPECTED = "against expected"
BIN_DEFINITIONS = {
    "tokens": "share of the trained tokens",
    "|Δ|": "mean, each at most 1, nats",
    AGAINST_EXPECTED: "mean |Δ| over mean 1 − p, relative to that of all tokens: 1 if it is noise on the logits",
    "k3": "mean of exp(Δ) − 1 − Δ, nats a token",
    "k1": "mean of −Δ, nats a token",
    "Δ > 0": "share of the part's tokens",
}
"""Columns of the tables by position, length and the other dimensions, with their definitions."""


def sum_parts(table: TokenTable, names: Sequence[str]) -> Array:
    """Return [bins, len(BIN_SUMS)], the sums over each bin of a dimension, or each pair of bins of two dimensions.

    Bins of a pair are in the order of the first dimension's. Tokens without a recorded value are left out.
    """
    dimensions = [DIMENSIONS_BY_NAME[name] for name in names]
    bins, is_known, count = np.zeros(len(table), int), np.ones(len(table), bool), 1
    for dimension in dimensions:
        values = dimension.read(table)
        bins, count = bins * dimension.bin_count + np.digitize(values, dimension.edges), count * dimension.bin_count
        is_known &= np.isfinite(values)
    return sum_bins(table.select(is_known), bins[is_known], count)


def sum_environments(table: TokenTable, names: Sequence[str]) -> Array:
    """Return [len(names) + 1, len(BIN_SUMS)], the sums of each environment, then of all others together."""
    recorded = table.names[ENVIRONMENT]
    number = {name: index for index, name in enumerate(names)}
    of_sequence = np.array([-1 if name is None else number.get(name, len(names)) for name in recorded], int)
    bins = of_sequence[table.sequence]
    return sum_bins(table.select(bins >= 0), bins[bins >= 0], len(names) + 1)


def sum_bins(table: TokenTable, bins: Array, count: int) -> Array:
    """Return [count, len(BIN_SUMS)], the sums over the tokens of each bin; ``bins`` [M] is the bin of each token."""
    weight, size, expected = table.weight.astype(float), table.capped_abs, table.one_minus_p
    values = (np.ones(len(table)), size, expected, table.delta.astype(float), table.k3, table.delta > 0)
    sums = [np.bincount(bins, weight * value, minlength=count) for value in values]
    cells, cell = np.unique(table.sequence.astype(np.int64) * count + bins, return_inverse=True)
    own_size, own_expected = (np.bincount(cell, weight * value, minlength=len(cells)) for value in (size, expected))
    products = (own_size * own_size, own_size * own_expected, own_expected * own_expected)
    sums += [np.bincount(cells % count, product, minlength=count) for product in products]
    return np.stack(sums, axis=1)


class BinMeasures(NamedTuple):
    """Measures of the tokens in each bin of a dimension; NaN for a bin without tokens."""

    measures: dict[str, Array]  # by the names of BIN_DEFINITIONS, [bins]
    rate: Array  # [bins], mean |Δ| over mean 1 − p
    error: Array  # [bins], relative standard error of the rate, over sequences


def measure_bins(bin_sums: Array) -> BinMeasures:
    """Return the measures of bins from their sums [bins, len(BIN_SUMS)]."""
    tokens, capped_abs, one_minus_p, delta, k3, positive, abs_squared, product, expected_squared = bin_sums.T
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = capped_abs / one_minus_p
        values = (
            *(tokens / tokens.sum(), capped_abs / tokens, rate / (capped_abs.sum() / one_minus_p.sum())),
            *(k3 / tokens, -delta / tokens, positive / tokens),
        )
        # Delta method for the ratio of two sums over sequences.
        variance = abs_squared - 2 * rate * product + np.square(rate) * expected_squared
        error = np.sqrt(np.maximum(variance, 0.0)) / capped_abs
    return BinMeasures(dict(zip(BIN_DEFINITIONS, values, strict=True)), rate, error)
