"""What the records leave open: a remark where it is a part of the data, and else no verdict."""

import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from tests.evidence.diagnose.measure_mixtures import survey
from tests.evidence.diagnose.mixtures import make_run
from tests.evidence.diagnose.planted_causes import planted_run
from tests.evidence.diagnose.planted_logs import RunShape


def test_a_sure_difference_too_small_for_a_place_is_a_remark():
    diagnosis = diagnose(planted_run(31, "tool_calls", 1.4))
    assert (diagnosis.health, diagnosis.shown, diagnosis.unjudged_reason) == ("healthy", (), "")
    assert "1.6 times the mismatch of the other tokens" in diagnosis.detections["tool_calls"].description
    assert "remark: tokens after tool calls" in diagnosis.headline


def test_an_asynchronous_run_within_the_limits_is_healthy_with_a_remark():
    """Samples of age 1 have half as much mismatch again as fresh ones."""
    diagnosis = diagnose(survey(make_run(31, "ages_recorded", 1.2, options={"two_ages": True}), {}))
    assert (diagnosis.health, diagnosis.shown, diagnosis.unjudged_reason) == ("healthy", (), "")
    assert "remark: samples of age 1 and more" in diagnosis.headline


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
    assert diagnosis.cause is not None
    assert diagnosis.cause.id == "group"


def test_too_few_sequences_to_show_half_of_the_mismatch_leave_the_parts_open():
    diagnosis = diagnose(planted_run(35, shape=RunShape(steps=1, prompts=3, samples=2, length=40)))
    assert "not testable for" in diagnosis.unjudged_reason
    assert "more sequences: it would show from" in diagnosis.unjudged_reason


def test_the_same_difference_in_the_other_run_closes_the_question():
    run, other = planted_run(36, "tool_calls", 1.4), planted_run(37, "tool_calls", 1.4)
    diagnosis = diagnose(run, other, "the other run")
    assert (diagnosis.health, diagnosis.unjudged_reason) == ("healthy", "")


def test_the_verdict_says_from_which_share_on_a_part_would_show():
    diagnosis = diagnose(planted_run(38))
    share = diagnosis.detections["position"].detectable_share
    assert 0.1 <= share < 0.5
    assert f"position (from {share:.0%} of |Δ|)" in diagnosis.sentence
