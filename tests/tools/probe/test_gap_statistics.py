"""Statistics of gaps against float64 loops."""

import math

import numpy
import pytest

from nemo_geomask.tools.probe.gap_statistics import change_between, gap, k3_of


def vectors(seed=0, size=400, scale=0.3):
    generator = numpy.random.default_rng(seed)
    first = -generator.exponential(2.0, size)
    return first, first + scale * generator.standard_normal(size)


def test_gap_is_that_of_a_loop():
    first, second = vectors()
    result = gap(first, second)
    deltas = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
    k3 = [math.exp(delta) - 1 - delta for delta in deltas]
    assert result.k3 == pytest.approx(math.fsum(k3) / len(k3), rel=1e-12)
    assert result.large == sum(abs(delta) > 0.1 for delta in deltas) / len(deltas)
    assert result.very_large == sum(abs(delta) > math.log(2) for delta in deltas) / len(deltas)
    assert result.largest == max(map(abs, deltas))
    assert result.tokens == 400


def test_k3_is_exact_near_zero_and_capped_far_away():
    delta = 1e-7
    assert float(k3_of([delta])[0]) == pytest.approx(delta**2 / 2 + delta**3 / 6, rel=1e-6)
    assert float(k3_of([300.0])[0]) == pytest.approx(math.expm1(5) - 5)
    assert float(k3_of([-300.0])[0]) == pytest.approx(math.expm1(-5) + 5)


def test_change_is_the_difference_of_the_means_and_its_interval_encloses_it():
    first, second = vectors()
    prompts = numpy.repeat(numpy.arange(20), 20)
    before, after = first - second, 0.5 * (first - second)
    change = change_between(before, after, prompts)
    expected = math.fsum(math.exp(a) - 1 - a - (math.exp(b) - 1 - b) for a, b in zip(after, before, strict=True))
    assert change.value == pytest.approx(expected / 400, rel=1e-10)
    assert change.low < change.value < change.high < 0
    assert change.p < 0.01


def test_p_values_are_uniform_where_nothing_changes():
    """The share of false positives at 5 % is about 5 %: two arms with noise of the same size."""
    prompts = numpy.repeat(numpy.arange(30), 10)
    hits = 0
    for seed in range(200):
        generator = numpy.random.default_rng(seed)
        before, after = generator.normal(0, 0.3, (2, 300))
        hits += change_between(before, after, prompts).p < 0.05
    assert 2 <= hits <= 22  # binomial(200, 0.05): 10 ± 3.1, four standard deviations


def test_bootstrap_resamples_prompts_and_not_tokens():
    """One prompt carries the change: over prompts the interval is wide, whatever the number of its tokens."""
    prompts = numpy.repeat(numpy.arange(10), 100)
    before = numpy.zeros(1000)
    after = numpy.where(prompts == 0, 1.0, 0.0)
    change = change_between(before, after, prompts)
    assert change.low == 0.0
    assert change.high > 2.5 * change.value
