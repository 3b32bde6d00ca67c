"""The test of the vicious circle, on series whose coupling is known."""

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.measure.feedback import (
    MIN_STEPS,
    SERIES,
    measure_lagged_correlation,
    mismatch_feedback,
    summarize_feedback,
)
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums

STEPS = 80


def series(seed, there=0.0, back=0.0, trend=0.0):
    """Return two autoregressions: ``there`` couples the second to the first, ``back`` the first to the second."""
    random = np.random.default_rng(seed)
    one, other = np.zeros(STEPS), np.zeros(STEPS)
    for step in range(1, STEPS):
        one[step] = 0.5 * one[step - 1] + back * other[step - 1] + random.standard_normal()
        other[step] = 0.5 * other[step - 1] + there * one[step - 1] + random.standard_normal()
    return one + trend * np.arange(STEPS), other + trend * np.arange(STEPS)


def statistics(mismatch, surprise, model=(1.0,) * STEPS):
    statistics = RunStatistics()
    for step, (size, unlikely, expected) in enumerate(zip(mismatch, surprise, model, strict=False), 1):
        sums = statistics.steps[step] = StepSums()
        for name, value in {
            "tokens": 1.0,
            "capped_abs": size,
            "surprise": unlikely,
            "sequences": 1.0,
            "response_tokens": 7,
        }.items():
            sums[name] = value
        sums["one_minus_p"] = expected
    return statistics


def test_the_mismatch_is_relative_to_the_expected_mismatch():
    """Noise on the logits changes less likely tokens more, which must not count as a circle."""
    one, other = series(0, 0.48, 0.48)
    scale = np.exp(other / 4)
    assert mismatch_feedback(statistics(one * scale, other, scale)) == mismatch_feedback(statistics(one, other))


@pytest.mark.parametrize("trend", [0.0, 0.3])
def test_a_circle_is_detected(trend):
    shown = [summarize_feedback(mismatch_feedback(statistics(*series(seed, 0.48, 0.48, trend)))) for seed in range(20)]
    named = sum(text.startswith("A circle: the mismatch and surprise each predict") for text in shown)
    assert named >= (16 if not trend else 8)


def test_a_coupling_in_one_direction_or_one_that_damps_itself_is_no_circle():
    one_way, damped = (
        [summarize_feedback(mismatch_feedback(statistics(*series(seed, there, back)))) for seed in range(20)]
        for there, back in ((0.6, 0.0), (0.45, -0.45))
    )
    assert one_way.count("No circle; prediction in one direction only: mismatch predicts surprise.") >= 17
    assert not any("A circle" in text for text in (*one_way, *damped))


def test_a_common_trend_is_not_a_prediction():
    """Two rising series are correlated, but neither predicts the other."""
    correlations = [lead for seed in range(200) for lead in mismatch_feedback(statistics(*series(seed, trend=0.3)))]
    assert len(correlations) == 400
    assert sum(lead.is_shown for lead in correlations) <= 0.03 * len(correlations)


@pytest.mark.parametrize("kind", [np.exp, np.log1p, lambda time: 10.0 * (time > 3)])
def test_a_common_collapse_is_not_a_circle(kind):
    together = kind(np.arange(STEPS) / 10)
    correlations = [
        summarize_feedback(mismatch_feedback(statistics(*(one + together for one in series(seed)))))
        for seed in range(100)
    ]
    assert sum("A circle" in text for text in correlations) <= 2


def test_one_outlier_is_not_a_prediction():
    one, other = series(3)
    one[40], other[41] = 1e6, 1e6
    assert not measure_lagged_correlation("one", "other", one, other).is_shown


@pytest.mark.parametrize("steps", [0, 1, MIN_STEPS - 1])
def test_too_few_steps_are_not_tested(steps):
    one, other = series(0)
    correlations = mismatch_feedback(statistics(one[:steps], other[:steps]))
    assert correlations == []
    assert "fewer than 20 steps" in summarize_feedback(correlations)


def test_series_that_are_not_recorded_or_constant_are_left_out():
    correlations = mismatch_feedback(statistics(*series(1)))
    assert {(one.leader, one.follower) for one in correlations} == {("mismatch", "surprise"), ("surprise", "mismatch")}
    assert mismatch_feedback(statistics(np.ones(STEPS), series(1)[1])) == []
    assert {"entropy", "length", "reward"} < set(SERIES)
