"""Splitting of a step's trained tokens into the bins of each dimension."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS, DIMENSIONS_BY_NAME, ENVIRONMENT
from nemo_geomask.tools.diagnose.measure.run_statistics import MAX_ENVIRONMENTS, OTHER_ENVIRONMENTS, Window
from nemo_geomask.tools.diagnose.measure.thresholds import BIN_SUMS
from nemo_geomask.tools.diagnose.measure.token_table import TokenTable
from nemo_geomask.tools.diagnose.measure.token_values import TrainedTokens
from nemo_geomask.tools.diagnose.read.record_reader import Array

UNKNOWN = -1
"""Bin of tokens whose value in a dimension was not recorded."""


def split_tokens(trained: TrainedTokens, table: TokenTable, dimension_pairs: Sequence[tuple[str, str]]) -> Window:
    """Sum the tokens' values in each bin of each dimension and of pairs of them, and over each environment.

    ``table`` has all of the tokens, in their order.
    """
    bins = {}
    for name, values in _dimension_values(trained, table).items():
        bin_of_value = np.digitize(values, DIMENSIONS_BY_NAME[name].edges)
        bins[name] = np.where(np.isfinite(values), bin_of_value, UNKNOWN)
    counts = {dimension.name: dimension.bin_count for dimension in DIMENSIONS}
    for first, second in dimension_pairs:
        if first in bins and second in bins:
            is_known = (bins[first] != UNKNOWN) & (bins[second] != UNKNOWN)
            name, counts[name] = f"{first},{second}", counts[first] * counts[second]
            bins[name] = np.where(is_known, bins[first] * counts[second] + bins[second], UNKNOWN)
    window = Window()
    for name, bin_of_token in bins.items():
        if (bin_of_token != UNKNOWN).any():
            window.bin_sums[name] = _sum_bins(trained, bin_of_token, counts[name])
    window.environment_sums = _sum_environments(trained)
    return window


def _dimension_values(trained: TrainedTokens, table: TokenTable) -> dict[str, Array]:
    """Return [M] each, the value of every token in each dimension; without those that no block recorded."""
    by_sequence = {
        "length": trained.column("length") - trained.column("prompt_length"),
        "staleness": trained.column("staleness"),
        "reward": trained.column("reward"),
    }
    values = {"probability": -trained.gen, "position": table.position, "turn": table.turn}
    values |= {name: column[trained.sequence] for name, column in by_sequence.items()}
    if trained.advantages is not None:
        values["advantage"] = trained.advantages
    if "entropy" in trained.block.tokens:
        values["entropy"] = trained.block.tokens["entropy"][trained.index]
    return values


def _sum_bins(trained: TrainedTokens, bins: Array, bin_count: int) -> Array:
    """Return [bins, len(BIN_SUMS)], the sums of each bin, and the products of each sequence's sums."""
    is_known = bins != UNKNOWN
    selection = slice(None) if is_known.all() else is_known  # a slice copies nothing
    bins, shape = bins[selection], (len(trained.block), bin_count)
    cells = trained.sequence[selection] * bin_count + bins

    def by_sequence(name: str) -> Array:
        flat: Array = np.bincount(cells, trained.values[name][selection], minlength=shape[0] * bin_count)
        return flat.reshape(shape)

    size, expected = by_sequence("capped_abs"), by_sequence("one_minus_p")
    sums = [np.bincount(bins, trained.values[name][selection], minlength=bin_count) for name in BIN_SUMS[:-3]]
    products = [product.sum(axis=0) for product in (size * size, size * expected, expected * expected)]
    return np.stack([*sums, *products], axis=1)


def _sum_environments(trained: TrainedTokens) -> dict[str, Array]:
    """Return the sums of each environment, by its name."""
    recorded = trained.block.sequences.get(ENVIRONMENT)
    rows = [] if recorded is None else [row for row, name in enumerate(recorded) if name is not None]
    if recorded is None or not rows:
        return {}
    names, numbers = np.unique(recorded[rows], return_inverse=True)  # in the order of the names
    keys = names.tolist() if len(names) <= MAX_ENVIRONMENTS else [*names[:MAX_ENVIRONMENTS], OTHER_ENVIRONMENTS]
    bins = np.full(len(recorded), UNKNOWN)
    bins[rows] = np.minimum(numbers, MAX_ENVIRONMENTS)
    return dict(zip(keys, _sum_bins(trained, bins[trained.sequence], len(keys)), strict=True))
