"""Faults that imitate others, each at one strength: what is named first is right."""

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from tests.evidence.diagnose.measure_mixtures import judge, survey
from tests.evidence.diagnose.mixtures import FAULTS, make_run
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape


@pytest.mark.parametrize(
    "name",
    [
        *("growing_noise", "growing_environment", "growing_tool_calls", "two_faults"),
        *("label_smoothing", "repetition_penalty", "missing_end"),
    ],
)
@pytest.mark.parametrize("strength", [0, 2])
def test_the_place_or_the_cause_is_right(name, strength):
    outcome = judge(name, FAULTS[name].strengths[strength], 5)
    assert outcome["is_place_right"], outcome["headline"]
    assert not outcome["is_cause_wrong"], outcome["headline"]


def test_both_of_two_faults_are_named():
    statistics = RunStatistics()
    for block in make_run(5, "two_faults", 20.0):
        statistics.add(survey_block(block))
    assert {shown.cause.id for shown in diagnose(statistics).shown} == {"tool_calls", "position"}


def with_current(change, steps=3):
    """Statistics of a clean run whose ``curr`` is ``prev`` with noise as large as an update's, and then changed."""
    statistics = RunStatistics()
    for step in range(1, steps + 1):
        block = planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=4))
        random = np.random.default_rng(step)
        rows = np.repeat(block.sequences["row"], np.diff(block.offsets))
        size = np.where(rows % 4 == 3, 0.005, 0.5) * -np.expm1(block.tokens["gen"])
        block.tokens["curr"] = (block.tokens["prev"] + size * random.standard_normal(len(size))).astype(np.float32)
        change(block, random)
        statistics.add(survey_block(block))
    return statistics


def shift(block, random):
    block.tokens["curr"][1:] = block.tokens["curr"][:-1].copy()


def blur(block, random):
    block.tokens["curr"] += (2 * random.standard_normal(len(block.tokens["curr"]))).astype(np.float32)


def test_a_policy_that_trains_and_is_not_the_recorded_one_is_named_first():
    healthy = diagnose(with_current(lambda block, random: None))
    assert (healthy.health, healthy.detections["current_policy"].state) == ("healthy", "ruled out")
    for change, text in (
        (shift, "fits a neighbouring token's prev better"),
        (blur, "up to 100% of a step's"),
    ):
        diagnosis = diagnose(with_current(change))
        assert (diagnosis.health, diagnosis.cause.id) == ("broken", "current_policy")
        assert text in diagnosis.headline
    assert diagnose(with_current(lambda block, random: block.tokens.pop("curr"))).detections["current_policy"].needs


def plant_in_rows(every, shift, seed=5):
    """Statistics of a clean run in which the last token of each ``every``-th row is shifted since step 5."""
    statistics = RunStatistics()
    for block in make_run(seed, None):
        rows = np.arange(every - 1, len(block.sequences["row"]), every)
        ends = [np.flatnonzero(block.tokens["mask"][: block.offsets[row + 1]])[-1] for row in rows]
        block.tokens["prev"][ends] -= shift * (block.sequences["step"][0] >= 5)
        statistics.add(survey_block(block))
    return statistics


@pytest.mark.parametrize("every", [4, 8])
def test_a_place_that_holds_nearly_all_outliers_is_named_however_few_of_its_tokens_are_worse(every):
    diagnosis = diagnose(plant_in_rows(every, 6.0))
    assert (diagnosis.cause.id, diagnosis.since) == ("end", 5), diagnosis.headline
    for cause in CAUSES:
        detection = diagnosis.detections[cause.id]
        assert detection.state != "ruled out" or not detection.value > cause.threshold


@pytest.mark.parametrize(
    ("name", "strength", "experts", "absent", "kept"),
    [
        ("random_token", 5.0, 0, ("expert routing", "--experts"), "single log-probs"),
        ("random_token", 5.0, 64, ("expert routing", "--experts"), "single log-probs"),
        ("random_token", 5.0, None, (), "expert routing"),
        ("every_fourth_step", 20.0, None, ("record weight versions",), "refit"),
    ],
)
def test_what_the_records_refute_is_not_likely(name, strength, experts, absent, kept):
    statistics = survey(make_run(5, name, strength), {})
    statistics.experts = experts
    advice = " ".join(diagnose(statistics).shown[0].advice)
    assert not any(text in advice for text in absent), advice
    assert kept in advice
