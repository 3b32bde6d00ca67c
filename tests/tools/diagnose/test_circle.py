"""Whether mismatch and likelihood feed each other, in series where it is known."""

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.feedback import (
    MIN_STEPS,
    SERIES,
    measure_lagged_correlation,
    mismatch_feedback,
    summarize_feedback,
)
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.step_sums import StepSums

STEPS = 80


def series(seed, there=0.0, back=0.0, trend=0.0):
    """Two autoregressions, the second of which follows the first by ``there``, and the first it by ``back``."""
    random = np.random.default_rng(seed)
    one, other = np.zeros(STEPS), np.zeros(STEPS)
    for step in range(1, STEPS):
        one[step] = 0.5 * one[step - 1] + back * other[step - 1] + random.standard_normal()
        other[step] = 0.5 * other[step - 1] + there * one[step - 1] + random.standard_normal()
    return one + trend * np.arange(STEPS), other + trend * np.arange(STEPS)


def statistics(mismatch, surprise, model=(1.0,) * STEPS):
    found = RunStatistics()
    for step, (size, unlikely, expected) in enumerate(zip(mismatch, surprise, model, strict=False), 1):
        sums = found.steps[step] = StepSums()
        for name, value in {
            "tokens": 1.0,
            "capped_abs": size,
            "surprise": unlikely,
            "sequences": 1.0,
            "response_tokens": 7,
        }.items():
            sums[name] = value
        sums["one_minus_p"] = expected
    return found


def test_the_mismatch_is_that_beyond_what_the_probabilities_let_one_expect():
    """Noise on the logits is larger in log-probs where tokens are less likely: that alone would be a circle."""
    one, other = series(0, 0.48, 0.48)
    scale = np.exp(other / 4)
    assert mismatch_feedback(statistics(one * scale, other, scale)) == mismatch_feedback(statistics(one, other))


@pytest.mark.parametrize("trend", [0.0, 0.3])
def test_a_circle_is_seen(trend):
    shown = [summarize_feedback(mismatch_feedback(statistics(*series(seed, 0.48, 0.48, trend)))) for seed in range(20)]
    named = sum(text.startswith("A circle: the mismatch and surprise each predict") for text in shown)
    assert named >= (16 if not trend else 8)


def test_one_way_is_no_circle():
    said = [summarize_feedback(mismatch_feedback(statistics(*series(seed, there=0.6)))) for seed in range(20)]
    assert (
        sum(text == "No circle; prediction in one direction only: mismatch predicts surprise." for text in said) >= 17
    )
    assert not any("A circle" in text for text in said)


def test_what_damps_itself_is_no_circle():
    assert not any(
        "A circle" in summarize_feedback(mismatch_feedback(statistics(*series(seed, 0.45, -0.45))))
        for seed in range(20)
    )


def test_trends_alone_lead_nowhere():
    """Two series that rise go together; neither says what the other will be."""
    found = [lead for seed in range(200) for lead in mismatch_feedback(statistics(*series(seed, trend=0.3)))]
    assert len(found) == 400
    assert sum(lead.is_shown for lead in found) <= 0.03 * len(found)


@pytest.mark.parametrize("kind", [np.exp, np.log1p, lambda time: 10.0 * (time > 3)])
def test_a_collapse_that_both_see_is_no_circle(kind):
    together = kind(np.arange(STEPS) / 10)
    said = [
        summarize_feedback(mismatch_feedback(statistics(*(one + together for one in series(seed)))))
        for seed in range(100)
    ]
    assert sum("A circle" in text for text in said) <= 2


def test_one_wild_step_is_not_taken_for_a_lead():
    one, other = series(3)
    one[40], other[41] = 1e6, 1e6
    assert not measure_lagged_correlation("one", "other", one, other).is_shown


@pytest.mark.parametrize("steps", [0, 1, MIN_STEPS - 1])
def test_too_few_steps_say_nothing(steps):
    one, other = series(0)
    found = mismatch_feedback(statistics(one[:steps], other[:steps]))
    assert found == []
    assert "fewer than 20 steps" in summarize_feedback(found)


def test_what_is_not_recorded_or_does_not_change_is_left_out():
    found = mismatch_feedback(statistics(*series(1)))
    assert {(one.leader, one.follower) for one in found} == {("mismatch", "surprise"), ("surprise", "mismatch")}
    assert mismatch_feedback(statistics(np.ones(STEPS), series(1)[1])) == []
    assert {"entropy", "length", "reward"} < set(SERIES)
