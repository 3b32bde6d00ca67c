"""The statistics of ``diagnose`` against plain arithmetic: noise, changes, intervals, limits, draws, cycles."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys

import numpy as np
import pytest
import scipy.stats

from nemo_geomask.errors import MissingDependencyError
from nemo_geomask.tools.diagnose.locate.change_points import ChangePoint, change_at, find_change, step_noise
from nemo_geomask.tools.diagnose.locate.step_patterns import find_edge_rise, find_period
from nemo_geomask.tools.diagnose.measure.bootstrap_draws import poisson_draws
from nemo_geomask.tools.diagnose.measure.dimensions import BIN_SUMS, measure_bins
from nemo_geomask.tools.diagnose.measure.step_sums import (
    BOOTSTRAP_REPLICATES,
    BOOTSTRAP_SUMS,
    StepSums,
    ratio_or_nan,
)
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS, HealthLimit

LIMITS = {limit.name: limit for limit in HEALTH_LIMITS}


def noise(values):
    """Median absolute deviation of the differences, for a normal distribution, per value instead of per difference."""
    differences = [after - before for before, after in itertools.pairwise(values)]
    middle = statistics.median(differences)
    deviation = statistics.median([abs(difference - middle) for difference in differences])
    return deviation / 0.6744897501960817 / math.sqrt(2)


def drawn(count, scale, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(0.0, scale) for _ in range(count)]


# --------------------------------------------------------------------------- noise and changes


@pytest.mark.parametrize("count", [5, 8, 41])
def test_noise_is_that_of_one_value(count):
    values = drawn(count, 0.3)
    assert step_noise(np.asarray(values)) == pytest.approx(noise(values), rel=1e-12)


def test_a_steady_rise_is_no_noise():
    assert step_noise(np.arange(9.0)) == 0.0


@pytest.mark.parametrize("index", [1, 3, 6])
def test_a_change_is_measured_in_its_standard_errors(index):
    values = [*drawn(index, 0.2), *(2.0 + value for value in drawn(8 - index, 0.2, 1))]
    before, after = values[:index], values[index:]
    rise = sum(after) / len(after) - sum(before) / len(before)
    error = 0.05 * math.sqrt(1 / len(before) + 1 / len(after))
    change = change_at(np.asarray(values), index, 0.05)
    assert (change.first, change.is_gradual) == (index, False)
    assert (change.rise, change.score) == pytest.approx((rise, rise / error), rel=1e-12)
    assert change_at(np.asarray(values), index, 0.05, is_gradual=True) == change._replace(is_gradual=True)


def test_values_must_precede_and_follow_a_change():
    assert find_change([0.0, 0.0, 0.0, 1.0], 0.05) is None
    assert find_change([0.0, 0.0, 0.0, 1.0, 1.0], 0.05) == ChangePoint(
        3, 1.0, pytest.approx(1 / 0.05 / math.sqrt(5 / 6)), False
    )
    assert find_change([0.0, 0.0, 0.0, math.nan, 1.0, 1.0], 0.05) is None
    late = find_change([0.0] * 9 + [5.0], 0.05)
    assert late.first == 8  # two values follow at least
    assert find_change([0.0] * 9 + [5.0], 0.05, min_after=1).first == 9
    assert find_change([0.0, 5.0, 5.0, 5.0, 5.0, 5.0], 0.05).first == 3
    assert find_change([0.0, 5.0, 5.0, 5.0, 5.0, 5.0], 0.05, min_before=1).first == 1


def fitted(values, shape):
    """Squared residual of the best constant plus a multiple of a shape, by the normal equations."""
    count = len(values)
    mean_value, mean_shape = sum(values) / count, sum(shape) / count
    scale = sum((x - mean_shape) ** 2 for x in shape)
    slope = sum((x - mean_shape) * (y - mean_value) for x, y in zip(shape, values, strict=True)) / scale
    return sum((y - mean_value - slope * (x - mean_shape)) ** 2 for x, y in zip(shape, values, strict=True))


def best_fit(values, min_before=3, min_after=2):
    """Index of the change and whether it is gradual, by fits of every shape at every index, one after the other."""
    best = None
    for index in range(min_before, len(values) - min_after + 1):
        since = [max(0, step - index + 1) for step in range(len(values))]
        for shape, is_gradual in (
            ([float(x > 0) for x in since], False),
            (since, True),
            ([math.log1p(x) for x in since], True),
        ):
            residual = fitted(values, shape)
            if best is None or residual < best[0] * (0.8 if is_gradual else 1.0):
                best = residual, index, is_gradual
    return best[1:]


@pytest.mark.parametrize("offset", [0.0, -20.7, 1e6, -1e8])
@pytest.mark.parametrize("seed", range(20))
def test_a_change_is_the_best_fit_wherever_it_is_and_however_far_from_zero(seed, offset):
    generator = random.Random(seed)
    count, min_before, min_after = generator.randint(5, 70), generator.randint(1, 3), generator.randint(1, 2)
    first, scale = generator.randint(1, count), generator.choice([0.01, 0.3, 3.0])
    shape = generator.choice([bool, lambda since: 0.1 * since, math.log1p, lambda since: 50.0 * (since == 1)])
    values = [
        offset + value + shape(max(0, step - first + 1)) for step, value in enumerate(drawn(count, scale, seed + 1))
    ]
    found = find_change(values, 0.05, min_before=min_before, min_after=min_after)
    assert (found.first, found.is_gradual) == best_fit(values, min_before, min_after)
    rise = statistics.fmean(values[found.first :]) - statistics.fmean(values[: found.first])
    assert found.rise == pytest.approx(rise, rel=1e-6, abs=1e-15 * count * abs(offset))


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(
    ("shape", "is_gradual"), [(lambda since: np.sign(since) * 2.0, False), (np.log1p, True)], ids=["jump", "logarithm"]
)
def test_a_change_is_found_among_100_000_steps(shape, is_gradual, offset):
    noise_values = np.random.default_rng(0).normal(0.0, 0.05, 100_000)
    values = offset + noise_values + shape(np.maximum(0.0, np.arange(100_000) - 69_999))
    found = find_change(values, 0.05)
    assert (found.first, found.is_gradual) == (pytest.approx(70_000, abs=20 if is_gradual else 0), is_gradual)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1])
def test_equal_values_have_their_first_change_and_no_rise(value):
    found = find_change([value] * 1000, 0.05)
    assert (found.first, found.is_gradual) == (3, False)
    assert found.rise == pytest.approx(0.0, abs=1e-9)


# --------------------------------------------------------------------------- rises at an edge, cycles


def test_a_rise_at_an_edge():
    low, high = [0.0] * 7, [1.0]
    found = find_edge_rise([*low, *high], 0.05)
    assert (found.first, found.rise) == (7, 1.0)
    first = find_edge_rise([0.0, *[1.0] * 7], 0.05)
    assert (first.first, first.rise) == (1, 1.0)
    assert find_edge_rise([0.0] * 8 + [0.5] * 8, 0.01) is None  # find_change searches the middle
    assert find_edge_rise([1.0] * 7 + [0.0], 0.05) is None  # a fall
    short = find_edge_rise([0.0, 0.0, 1.0, 1.0], 0.05)
    assert (short.first, short.rise) == (2, 1.0)


def test_a_rise_at_an_edge_must_be_large_enough():
    least = math.log(1.5)
    assert find_edge_rise([0.0, least], 0.01).rise == least
    assert find_edge_rise([0.0, least - 1e-9], 0.01) is None
    # Six standard errors: one value on either side has an error of noise · √2.
    enough = 6 * 0.1 * math.sqrt(2)
    assert find_edge_rise([0.0, enough + 1e-9], 0.1) is not None
    assert find_edge_rise([0.0, enough - 1e-9], 0.1) is None
    # Exactly six standard errors are enough: two values on either side have an error of the noise.
    assert find_edge_rise([0.0, 0.0, 6.0, 6.0], 1.0) == change_at(np.array([0.0, 0.0, 6.0, 6.0]), 2, 1.0)


@pytest.mark.parametrize("first", [1, 11])
def test_the_error_of_a_rise_is_that_of_both_means(first):
    enough = 6 * 0.1 * math.sqrt(1 / 11 + 1)
    for rise, is_found in ((enough + 1e-9, True), (enough - 1e-9, False)):
        found = find_edge_rise([0.0] * first + [rise] * (12 - first), 0.1)
        assert (found is not None) == is_found


def test_a_long_series_is_searched_at_its_edges_alone():
    # find_change searches the rest; with five values there is one index for it, the fourth value.
    long = find_edge_rise([0.0] * 10 + [3.0] * 2, 0.05)
    assert (long.first, long.rise) == (11, pytest.approx(3 - 3 / 11))
    five = find_edge_rise([0.0, 0.0, 3.0, 3.0, 3.0], 0.05)
    assert (five.first, five.rise) == (1, pytest.approx(9 / 4))


def test_the_noise_of_a_long_series_is_its_own():
    noisy = [0.0, 0.6, 0.0, 0.8, 0.1, 0.7, 0.0, 1.5]
    assert find_edge_rise(noisy, 0.01) is None
    assert find_edge_rise(noisy[:1] * 7 + noisy[-1:], 0.01) is not None
    # Four values are too few to tell noise from a rise; five are not.
    assert find_edge_rise([0.0, 0.6, 0.0, 1.2], 0.01) is not None
    assert find_edge_rise([0.0, 0.6, 0.0, 0.8, 1.2], 0.01) is None


def test_of_equal_rises_the_first_is_meant():
    assert find_edge_rise([0.0, 1.5, 1.5, 3.0], 0.01).first == 1


def test_a_cycle_is_found_with_its_length_and_phases():
    values = [0.02 * step + (0.0, 0.4, 1.2)[step % 3] + value for step, value in enumerate(drawn(18, 0.03))]
    period = find_period(values, range(5, 23), 0.05)
    assert (period.steps, period.lowest) == (3, 0)
    assert period.phases == {5 + step: step % 3 for step in range(18)}
    # The trend is that of the values, the cycle included.
    slope, level = np.polyfit(range(18), values, 1)
    level_values = [value - slope * step - level for step, value in enumerate(values)]
    means = [statistics.fmean(level_values[phase::3]) for phase in range(3)]
    assert period.times == pytest.approx(math.exp(max(means) - min(means)), rel=1e-9)


def chance_of_alternation(values, lengths, min_noise):
    """Probability, over all lengths, that noise alternates as strongly: an F test after removal of a trend."""
    count = len(values)
    slope, level = np.polyfit(range(count), values, 1)
    rest = [value - slope * step - level for step, value in enumerate(values)]
    means = [statistics.fmean(rest[phase::2]) for phase in range(2)]
    within = sum((value - means[step % 2]) ** 2 for step, value in enumerate(rest)) / (count - 3)
    between = sum(means[step % 2] ** 2 for step in range(count))
    return scipy.stats.f.sf(between / max(within, min_noise**2), 1, count - 3) * lengths


@pytest.mark.parametrize(("scale", "min_noise"), [(0.3, 0.05), (0.01, 0.2)])
def test_a_cycle_is_found_from_the_strength_on_that_noise_seldom_has(scale, min_noise):
    noise_of_steps = drawn(12, scale, seed=3)

    def alternating(size):
        return [value + size * (step % 2) for step, value in enumerate(noise_of_steps)]

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if chance_of_alternation(alternating(middle), 3, min_noise) < 1e-5 else (middle, high)
    assert find_period(alternating(1.01 * high), range(12), min_noise).steps == 2
    assert find_period(alternating(0.99 * high), range(12), min_noise) is None


def test_a_cycle_must_be_repeated_three_times():
    assert find_period([0.0, 3.0, 3.0, 0.0] * 3, range(12), 0.05).steps == 4
    values = ([0.0, 3.0, 0.0, -3.0] * 3)[:11]  # 2.75 times, and so strong that three would be found
    assert find_period(values, range(11), 0.05) is None


def test_no_cycle_without_one():
    assert find_period(drawn(30, 0.3), range(30), 0.05) is None
    cycle = [0.0, 1.0] * 6
    assert find_period(cycle, range(12), 0.05).steps == 2
    assert find_period(cycle[:5], range(5), 0.001) is None  # three times each, at least
    assert find_period([], [], 0.001) is None
    assert find_period(cycle, [*range(11), 12], 0.05) is None  # a step is missing
    small = [0.0, math.log(1.4)] * 6
    assert find_period(small, range(12), 0.001) is None  # less than a factor of 1.5


def test_without_scipy_the_error_names_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingDependencyError, match=r"the search for a cycle needs .*nemo-geomask\[diagnose\]"):
        find_period([0.0, 1.0] * 6, range(12), 0.05)


# --------------------------------------------------------------------------- limits and intervals


def sums_of(mean_of_prob_error, *, spread=0.0, tokens=10.0, sequences=40.0):
    """Sums of a step whose mean of exp|Δ| is known, with replicates spread evenly around it."""
    sums = StepSums()
    sums["tokens"], sums["sequences"] = tokens, sequences
    sums["prob_error"] = mean_of_prob_error * tokens
    sums["weight"], sums["weight_squared"] = tokens, tokens / 0.5
    means = np.linspace(mean_of_prob_error - spread, mean_of_prob_error + spread, BOOTSTRAP_REPLICATES)
    columns = {name: BOOTSTRAP_SUMS.index(name) for name in ("tokens", "prob_error", "weight", "weight_squared")}
    sums.bootstrap[:, columns["tokens"]] = sums.bootstrap[:, columns["weight"]] = tokens
    sums.bootstrap[:, columns["prob_error"]] = means * tokens
    sums.bootstrap[:, columns["weight_squared"]] = tokens / np.linspace(0.4, 0.6, BOOTSTRAP_REPLICATES)
    return sums


@pytest.mark.parametrize(
    ("value", "spread", "health"),
    [
        *((1.04, 0.0, "healthy"), (1.05, 0.0, "healthy"), (1.2, 0.0, "drifting"), (1.5, 0.0, "drifting")),
        *((1.6, 0.0, "broken"), (1.1, 0.1, "healthy"), (1.2, 0.1, "drifting"), (1.55, 0.1, "drifting")),
        (1.7, 0.1, "broken"),
    ],
)
def test_a_maximum_is_exceeded_by_the_whole_interval(value, spread, health):
    # The interval is value ± 0.95 times the spread; its lower end is the one that counts.
    reading = LIMITS["token_mult_prob_error"].read(sums_of(value, spread=spread))
    assert (reading.low, reading.high) == pytest.approx((value - 0.95 * spread, value + 0.95 * spread))
    assert (reading.value, reading.health) == (pytest.approx(value), health)


@pytest.mark.parametrize(
    ("drifting", "broken", "health"), [(0.58, 0.3, "healthy"), (0.62, 0.3, "drifting"), (0.9, 0.62, "broken")]
)
def test_a_minimum_is_judged_by_the_upper_end(drifting, broken, health):
    share = LIMITS["effective sample size, tokens"]
    assert share.is_minimum
    limit = HealthLimit("share", "", share.value, drifting, broken, "", is_minimum=True)
    reading = limit.read(sums_of(1.0))
    assert reading.value == pytest.approx(0.5)
    assert (reading.low, reading.high) == pytest.approx((0.405, 0.595))
    assert reading.health == health


def test_few_sequences_are_not_judged():
    limit = LIMITS["token_mult_prob_error"]
    assert limit.read(sums_of(9.0, sequences=31.0)).health == "healthy"
    assert limit.read(sums_of(9.0, sequences=32.0)).health == "broken"
    empty = limit.read(StepSums())
    assert math.isnan(empty.value)
    assert math.isnan(empty.low)
    assert math.isnan(empty.high)
    assert empty.health == "healthy"


def test_a_limit_itself_is_not_beyond_it():
    limit = LIMITS["token_mult_prob_error"]
    assert (limit.is_beyond(1.05), limit.is_beyond(1.0501), limit.is_beyond(math.nan)) == (False, True, False)
    share = LIMITS["effective sample size, tokens"]
    assert (share.is_beyond(0.7), share.is_beyond(0.6999), share.is_beyond(math.nan)) == (False, True, False)
    assert (limit.sign, share.sign) == (">", "<")
    # The same holds for the limit from which a number is broken.
    exact = HealthLimit("x", "", lambda sums: sums["prob_error"] / sums["tokens"], 3.0, 2.0, "", is_minimum=True)
    assert exact.read(sums_of(2.0)).health == "drifting"
    assert exact.read(sums_of(1.75)).health == "broken"


def test_values_of_the_limits():
    deltas = [0.3, -0.2, 0.05, -0.4]
    sums = {
        "tokens": 4.0,
        "prob_error": sum(math.exp(abs(x)) for x in deltas),
        "k3": sum(math.exp(x) - 1 - x for x in deltas),
        "weight": sum(math.exp(x) for x in deltas),
        "weight_squared": sum(math.exp(2 * x) for x in deltas),
    }
    weights = [math.exp(x) for x in deltas]
    mean_square = sum(weight**2 for weight in weights) / 4
    assert LIMITS["token_mult_prob_error"].value(sums) == pytest.approx(sum(math.exp(abs(x)) for x in deltas) / 4)
    assert LIMITS["geomask/mismatch_k3"].value(sums) == pytest.approx(sum(math.exp(x) - 1 - x for x in deltas) / 4)
    share = LIMITS["effective sample size, tokens"].value(sums)
    assert share == pytest.approx((sum(weights) / 4) ** 2 / mean_square)
    assert LIMITS["chi2_token"].value(sums) == pytest.approx(mean_square - 1)


def test_the_interval_of_a_mean_leaves_out_replicates_without_a_token():
    sums = StepSums()
    tokens, delta = (BOOTSTRAP_SUMS.index(name) for name in ("tokens", "delta"))
    sums.bootstrap[:, tokens] = np.arange(BOOTSTRAP_REPLICATES)
    sums.bootstrap[:, delta] = np.arange(BOOTSTRAP_REPLICATES) * 3.0
    assert len(sums.replicates()["delta"]) == BOOTSTRAP_REPLICATES - 1
    assert sums.interval("delta") == pytest.approx((3.0, 3.0))
    assert all(math.isnan(end) for end in StepSums().interval("delta"))


# --------------------------------------------------------------------------- sums, bins and draws


def test_sums_add_up():
    first, second = StepSums(), StepSums()
    for number, sums in ((1.0, first), (10.0, second)):
        sums["tokens"], sums["k3"] = 2 * number, 3 * number
        sums.bootstrap += number
        sums.maskable = np.array([4 * number, 5 * number])
        sums.removed = {"veto": np.array([number, 2 * number])}
    second.removed["icepop"] = np.array([6.0, 7.0])
    first.versions, second.versions = (3.0, 4.0), (2.0, 9.0)
    first.add(second)
    assert (first["tokens"], first["k3"]) == (22.0, 33.0)
    assert (first.bootstrap == 11.0).all()
    assert first.maskable.tolist() == [44.0, 55.0]
    assert {label: sums.tolist() for label, sums in first.removed.items()} == {
        "veto": [11.0, 22.0],
        "icepop": [6.0, 7.0],
    }
    assert first.versions == (2.0, 9.0)
    third = StepSums(versions=(5.0, 6.0))
    third.add(StepSums(versions=(5.5, 5.5)))
    assert third.versions == (5.0, 6.0)
    assert first.mean("k3") == 1.5
    assert first.mean("tokens", "k3") == pytest.approx(2 / 3)
    assert first.removed_share("veto") == 0.25
    assert first.removed_share("veto", "capped_abs") == 0.4
    assert first.removed_share("geometric") == 0.0
    assert math.isnan(StepSums().removed_share("veto"))
    assert math.isnan(ratio_or_nan(1.0, 0.0))


def test_a_bins_rate_has_the_error_of_a_ratio_of_sums():
    bins = np.zeros((4, len(BIN_SUMS)))
    # Three sequences in one bin: their sums of capped |Δ| and of 1 − p.
    sequences = [(0.3, 2.0), (0.5, 3.0), (0.1, 1.5)]
    sizes, expected = (sum(column) for column in zip(*sequences, strict=True))
    sums = {
        "capped_abs": sizes,
        "one_minus_p": expected,
        "capped_abs_squared": sum(a * a for a, _ in sequences),
        "capped_abs_times_one_minus_p": sum(a * b for a, b in sequences),
        "one_minus_p_squared": sum(b * b for _, b in sequences),
    }
    bins[2] = [sums.get(name, 0.0) for name in BIN_SUMS]
    bins[3, BIN_SUMS.index("capped_abs")] = 0.5
    with np.errstate(all="raise"):  # a bin without tokens is no reason for a warning
        _, rate, error = measure_bins(bins)
    ratio = sizes / expected
    residuals = sum((a - ratio * b) ** 2 for a, b in sequences)
    assert rate[2] == pytest.approx(ratio)
    assert error[2] == pytest.approx(math.sqrt(residuals) / sizes)
    assert math.isnan(rate[0])
    assert math.isinf(rate[3])


def splitmix(step, row, replicate, replicates):
    """A draw of a Poisson variable of mean 1, in whole numbers modulo 2^64."""
    size, gamma = 2**64, 0x9E3779B97F4A7C15
    bits = ((row + step * gamma) * replicates + replicate + gamma) % size
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % size
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % size
    uniform = ((bits ^ (bits >> 31)) >> 11) / 2**53
    count = total = 0
    for count in range(13):
        total += math.exp(-1) / math.factorial(count)
        if uniform < total:
            return count
    return count


def test_bootstrap_draws_are_those_of_splitmix64():
    with np.errstate(all="raise"):  # overflow is part of the hash
        draws = poisson_draws(7, np.array([0, 3, 1000]), 50)
    expected = [[splitmix(7, row, replicate, 50) for row in (0, 3, 1000)] for replicate in range(50)]
    assert draws.tolist() == expected
    assert draws.dtype == np.float64


def test_bootstrap_draws_are_poisson_and_depend_on_step_row_and_replicate_alone():
    rows = np.arange(4000)
    draws = poisson_draws(3, rows, 20)
    assert draws.shape == (20, 4000)
    for count in range(5):
        assert (draws == count).mean() == pytest.approx(math.exp(-1) / math.factorial(count), abs=0.006)
    assert draws.mean() == pytest.approx(1.0, abs=0.01)
    assert draws.var() == pytest.approx(1.0, abs=0.02)
    backwards = poisson_draws(3, rows[::-1], 20)
    assert (backwards[:, ::-1] == draws).all()
    assert (poisson_draws(4, rows, 20) != draws).mean() > 0.5
    # Neighbouring rows and replicates are independent.
    for first, second in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
