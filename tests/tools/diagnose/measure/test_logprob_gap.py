"""Measures of a gap equal plain loops, and a shift and an exchange of rows are told from noise."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_geomask.tools.diagnose.measure.logprob_gap import (
    LogprobPairs,
    exchanged_share,
    measure_gap,
    select_pairs,
    shifted_share,
)
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock

logprobs = st.floats(-12.0, 0.0)


@given(st.lists(st.tuples(logprobs, logprobs), min_size=2, max_size=30))
def test_measures_are_those_of_plain_loops(pairs):
    noises, ratios, k3s, deltas = [], [], [], []
    for first, second in pairs:
        delta = second - first
        noises.append(abs(delta) / max(1 - math.exp(first), 1e-3))
        ratios.append(math.exp(delta))
        k3s.append(math.exp(delta) - 1 - delta)
        deltas.append(delta)
    gap = measure_gap(*map(np.array, zip(*pairs, strict=True)), noise=0.1, far_noise=0.5)
    assert gap.tokens == len(pairs)
    assert gap.noise == pytest.approx(statistics.median(noises), rel=1e-9, abs=1e-12)
    assert gap.far == pytest.approx(sum(noise > 0.5 for noise in noises) / len(pairs))
    assert gap.ratio == pytest.approx(statistics.fmean(ratios))
    assert gap.k3 == pytest.approx(statistics.fmean(k3s), rel=1e-9, abs=1e-12)
    above = [noise > 0.1 and delta > 0 for noise, delta in zip(noises, deltas, strict=True)]
    assert gap.above == pytest.approx(sum(above) / len(pairs))
    sides = list(zip(*pairs, strict=True))
    if all(statistics.pstdev(values) > 1e-6 for values in (deltas, *sides)):
        tilts = [statistics.correlation(deltas, side) for side in sides]
        tilt = min(tilts, key=abs) if tilts[0] * tilts[1] > 0 else 0.0
        assert gap.tilt == pytest.approx(tilt, abs=1e-6)


def pairs_of(first, second):
    """Pairs of [S, T] log-probs."""
    sequence, column = np.indices(first.shape)
    return LogprobPairs(*(array.ravel() for array in (first, second, sequence, column)))


@pytest.fixture
def made():
    random = np.random.default_rng(3)
    first = -random.exponential(2.0, size=(8, 14))
    return first, first + 0.005 * random.normal(size=first.shape)


def test_noise_is_neither_a_shift_nor_an_exchange(made):
    assert shifted_share(pairs_of(*made)) == exchanged_share(pairs_of(*made)) == 0


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_in_some_sequences(made, by):
    first, second = made
    second[2:4] = np.roll(second[2:4], by, axis=1)
    assert shifted_share(pairs_of(first, second)) == 2 / 8
    assert exchanged_share(pairs_of(first, second)) == 0


def test_exchanged_rows(made):
    first, second = made
    second[[1, 5, 6]] = second[[5, 6, 1]]
    assert exchanged_share(pairs_of(first, second)) == 3 / 8
    assert shifted_share(pairs_of(first, second)) == 0


def test_no_pair():
    empty = LogprobPairs(*(np.zeros(0, dtype) for dtype in (float, float, int, int)))
    assert measure_gap(empty.first, empty.second, noise=1.0, far_noise=1.0).tokens == 0
    assert shifted_share(empty) == exchanged_share(empty) == 0


def test_pairs_are_the_finite_trained_tokens_of_the_counted_sequences():
    tokens = {
        "mask": np.array([False, True, True, False, True, True]),
        "prev": np.array([0.0, -1.0, -2.0, 0.0, -3.0, np.nan]),
        "curr": np.array([np.nan, -1.5, np.nan, np.nan, -3.5, -4.0]),
    }
    block = RecordBlock({}, tokens, np.array([0, 3, 6]))
    pairs = select_pairs(block, "prev", "curr")
    assert [values.tolist() for values in pairs] == [[-1.0, -3.0], [-1.5, -3.5], [0, 1], [1, 1]]
    assert select_pairs(block, "prev", "curr", np.array([False, True])).first.tolist() == [-3.0]
    assert not len(select_pairs(block, "gen", "curr").first)
