"""A cause that the records could show, and leave open, keeps a run from being called healthy."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.tools.diagnose.explain import verdict
from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.locate.location_detectors import MIN_LIFT, MIN_SCORE, smallest_detectable_share
from nemo_geomask.tools.diagnose.locate.run_evidence import Detection
from nemo_geomask.tools.diagnose.planted_logs import RunShape
from tests.evidence.diagnose.planted_causes import planted_run


def test_a_sure_difference_too_small_for_a_cause_leaves_it_open():
    diagnosis = diagnose(planted_run(31, "tool_calls", 1.4))
    assert diagnosis.cause is None
    assert diagnosis.detections["tool_calls"].state == "not testable"
    assert diagnosis.headline.startswith(
        "not judged: within the limits, but not testable for tool calls (turn 1 and more"
    )
    assert "needs another run (--against)" in diagnosis.headline


def test_an_asynchronous_run_within_the_limits_is_healthy_with_a_remark(monkeypatch):
    open_staleness = Detection(0.2, "staleness 1 and more: 1.4 times", needs="another run (--against)", is_open=True)
    causes = [
        replace(cause, detect=lambda *_: open_staleness) if cause.id == "staleness" else cause for cause in CAUSES
    ]
    monkeypatch.setattr(verdict, "CAUSES", causes)
    diagnosis = diagnose(planted_run(31))
    assert (diagnosis.health, diagnosis.unjudged_reason) == ("healthy", "")
    assert diagnosis.headline.endswith(
        "; older samples differ more, as expected of an asynchronous run (staleness 1 and more: 1.4 times)"
    )


def test_a_weak_tilt_leaves_the_temperature_open():
    diagnosis = diagnose(planted_run(32, "temperature", 0.01, onset=7))
    assert diagnosis.unjudged_reason.startswith("within the limits, but not testable for temperature (")


def test_a_part_is_judged_from_the_step_on_at_which_it_became_worse():
    """It is too small for the whole mismatch to rise, and over the whole run the steps before hide it."""
    diagnosis = diagnose(planted_run(33, "tool_calls", 2.0, onset=7))
    assert diagnosis.cause is not None
    assert diagnosis.cause.id == "tool_calls"
    assert diagnosis.since is not None
    assert abs(diagnosis.since - 7) <= 1
    assert not diagnosis.unjudged_reason


def test_a_prompt_group_is_judged_by_the_last_steps_in_which_it_is_the_highest():
    diagnosis = diagnose(planted_run(34, "group", 4.0, onset=7))
    assert diagnosis.cause is not None or "not testable for group (group 3: " in diagnosis.unjudged_reason
    assert "group 3" in diagnosis.detections["group"].description


def test_too_few_sequences_to_show_half_of_the_mismatch_leave_the_parts_open():
    diagnosis = diagnose(planted_run(35, shape=RunShape(steps=1, prompts=3, samples=2, length=40)))
    assert "not testable for" in diagnosis.unjudged_reason
    assert "more sequences: below" in diagnosis.unjudged_reason


def test_the_same_difference_in_the_other_run_closes_the_question():
    run, other = planted_run(36, "tool_calls", 1.4), planted_run(37, "tool_calls", 1.4)
    diagnosis = diagnose(run, other, "the other run")
    assert (diagnosis.health, diagnosis.unjudged_reason) == ("healthy", "")


def test_the_verdict_says_from_which_share_on_a_part_would_show():
    diagnosis = diagnose(planted_run(38))
    share = diagnosis.detections["position"].detectable_share
    assert 0.1 < share < 0.5
    assert f"position (from {share:.0%} of |Δ|)" in diagnosis.sentence


@pytest.mark.parametrize("expected_share", [0.02, 0.2, 0.6])
@pytest.mark.parametrize("error", [0.01, 0.15, 0.4])
def test_thedetectable_share_is_where_all_thresholds_are_reached(expected_share, error):
    threshold = 0.1

    def is_shown(share):
        """Spread a mismatch of 1: the share, and the rest in proportion to the expected mismatch."""
        inside = share + (1 - share) * expected_share
        lift = inside / expected_share / ((1 - inside) / (1 - expected_share))
        is_sure = math.log(lift) > MIN_SCORE * error
        return lift > MIN_LIFT and is_sure and inside - expected_share > threshold

    detectable = smallest_detectable_share(expected_share, error, threshold)
    assert is_shown(detectable * 1.001)
    assert not is_shown(detectable * 0.999)
