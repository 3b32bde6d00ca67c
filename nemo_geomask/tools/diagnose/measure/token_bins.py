"""Splitting of a step's trained tokens into the bins of each dimension."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS, DIMENSIONS_BY_NAME, ENVIRONMENT, Dimension
from nemo_geomask.tools.diagnose.measure.run_statistics import (
    BIN_SUMS,
    MAX_ENVIRONMENTS,
    OTHER_ENVIRONMENTS,
    Window,
)
from nemo_geomask.tools.diagnose.measure.token_values import TrainedTokens
from nemo_geomask.tools.diagnose.read.record_reader import Array

__all__ = ["split_tokens"]

UNKNOWN = -1
"""Bin of tokens whose value in a dimension was not recorded."""


def split_tokens(
    trained: TrainedTokens, mask: Array, sequence: Array, dimension_pairs: Sequence[tuple[str, str]]
) -> Window:
    """Sum the tokens' values in each bin of each dimension, and over each environment.

    Args:
        trained: the tokens to split.
        mask: bool [N], the trained tokens of the block, finite or not; turns are counted from it.
        sequence: [N], the sequence of each token of the block.
        dimension_pairs: pairs of dimensions to split by together, in addition to every single dimension.
    """
    window = Window()
    values = _dimension_values(trained, mask, sequence)

    def bins_of(dimension: Dimension) -> Array | None:
        recorded = values[dimension.name]
        if recorded is None:
            return None
        return np.where(np.isfinite(recorded), np.digitize(recorded, dimension.edges), UNKNOWN)

    for dimension in DIMENSIONS:
        bins = bins_of(dimension)
        if bins is not None:
            _add_bins(window, dimension.name, trained, bins, dimension.bin_count)
    for names in dimension_pairs:
        first, second = (DIMENSIONS_BY_NAME[name] for name in names)
        first_bins, second_bins = bins_of(first), bins_of(second)
        if first_bins is not None and second_bins is not None:
            is_known = (first_bins != UNKNOWN) & (second_bins != UNKNOWN)
            bins = np.where(is_known, first_bins * second.bin_count + second_bins, UNKNOWN)
            _add_bins(window, ",".join(names), trained, bins, first.bin_count * second.bin_count)
    _add_environments(window, trained)
    return window


def _dimension_values(trained: TrainedTokens, mask: Array, sequence: Array) -> dict[str, Array | None]:
    """Return [M] each, the value of every token in each dimension; None if it was not recorded."""
    block, owner = trained.block, trained.sequence
    first_token = block.offsets[owner]
    length, prompt_length = trained.column("length"), trained.column("prompt_length")
    # A turn is a run of consecutive trained tokens: count the runs that have begun up to each token.
    begins_turn = mask & ~np.concatenate([[False], mask[:-1] & (sequence[1:] == sequence[:-1])])
    turns_begun = np.concatenate([[0], np.cumsum(begins_turn)])
    entropy = block.tokens.get("entropy")
    return {
        "probability": -trained.gen,
        "position": trained.index - first_token - prompt_length[owner],
        "turn": turns_begun[trained.index + 1] - turns_begun[first_token] - 1,
        "length": (length - prompt_length)[owner],
        "staleness": trained.column("staleness")[owner],
        "reward": trained.column("reward")[owner],
        "advantage": trained.advantages,
        "entropy": None if entropy is None else entropy[trained.index],
    }


def _add_bins(window: Window, name: str, trained: TrainedTokens, bins: Array, bin_count: int) -> None:
    """Write the sums of each bin, and the products of each sequence's sums."""
    is_known = bins != UNKNOWN
    if not is_known.any():
        return
    selection = slice(None) if is_known.all() else is_known  # a slice copies nothing
    bins, rows = bins[selection], trained.sequence[selection]
    window.bin_sums[name] = np.stack(
        [np.bincount(bins, trained.values[value][selection], minlength=bin_count) for value in BIN_SUMS], axis=1
    )
    shape = len(trained.block), bin_count

    def by_sequence(value: str) -> Array:
        weights = trained.values[value][selection]
        flat: Array = np.bincount(rows * bin_count + bins, weights, minlength=shape[0] * bin_count)
        by_row: Array = flat.reshape(shape)
        return by_row

    size, expected = by_sequence("capped_abs"), by_sequence("one_minus_p")
    window.bin_products[name] = np.stack([product.sum(axis=0) for product in _products(size, expected)], axis=1)


def _products(size: Array, expected: Array) -> tuple[Array, Array, Array]:
    """Return the products of a sequence's sums, in the order of ``BIN_PRODUCTS``."""
    return size * size, size * expected, expected * expected


def _add_environments(window: Window, trained: TrainedTokens) -> None:
    """Write the sums of each environment, and the products of its sequences' sums; a sequence is of one environment."""
    recorded = trained.block.sequences.get(ENVIRONMENT)
    if recorded is None:
        return
    rows = [row for row, name in enumerate(recorded) if name is not None]
    if not rows:
        return
    names, numbers = np.unique(recorded[rows], return_inverse=True)  # in the order of the names
    keys = names.tolist() if len(names) <= MAX_ENVIRONMENTS else [*names[:MAX_ENVIRONMENTS], OTHER_ENVIRONMENTS]
    numbers = np.minimum(numbers, MAX_ENVIRONMENTS)

    def add_up(values: Array) -> Array:
        """Return [keys], the sums of [S] values over the sequences of each environment."""
        sums: Array = np.bincount(numbers, values[rows], minlength=len(keys))
        return sums

    by_sequence = {name: trained.sum_per_sequence(name) for name in BIN_SUMS}
    sums = np.stack([add_up(values) for values in by_sequence.values()], axis=1)
    pairs = _products(by_sequence["capped_abs"], by_sequence["one_minus_p"])
    products = np.stack([add_up(product) for product in pairs], axis=1)
    window.environment_sums = dict(zip(keys, sums, strict=True))
    window.environment_products = dict(zip(keys, products, strict=True))
