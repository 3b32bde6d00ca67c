"""Where the excess is: planted mixtures of two sizes of noise, and what they must not be taken for."""

import math

import numpy as np
import pytest

from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.locate.factors import FACTORS, FACTORS_BY_ID, describe_steps, list_names
from nemo_geomask.tools.diagnose.locate.location import locate
from tests.evidence.diagnose.measure_mixtures import judge, judge_clean, named_first, survey
from tests.evidence.diagnose.mixtures import CLEAN, FAULTS, make_run

SMALL = {"steps": 8, "prompts": 12, "samples": 8, "length": 60.0}


REPRESENTATIVES = (
    "replica_unrecorded",
    "environment",
    "every_fourth_step",
    "ages_unrecorded",
    "first_token",
    "first_eight",
    "last_token",
    "random_token",
    "scaled",
    "replica_late",
    "flips_of_experts",
)
"""Kinds of faults that were once named as another cause."""


@pytest.mark.parametrize(
    "name", [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.long) for name in FAULTS]
)
def test_a_fault_is_named_where_it_is(name):
    """One strength of each; ``measure_mixtures`` has the others."""
    outcome = judge(name, FAULTS[name].strengths[1], 7)
    assert outcome["is_place_right"], outcome["headline"]
    assert not outcome["is_cause_wrong"], outcome["headline"]


@pytest.mark.parametrize("kind", range(len(CLEAN)))
def test_a_run_without_a_fault_is_healthy(kind):
    assert judge_clean(kind)["health"] == "healthy"


def test_two_faults_in_different_places_are_both_named():
    first, second = make_run(3, "last_token", 8.0, **SMALL), make_run(3, "environment", 20.0, **SMALL)
    for mine, other in zip(first, second, strict=True):
        delta = other.tokens["prev"] - other.tokens["gen"]
        is_last = np.abs(mine.tokens["prev"] - mine.tokens["gen"]) > 1
        mine.tokens["prev"] = np.where(is_last, mine.tokens["prev"], mine.tokens["gen"] + delta)
    diagnosis = diagnose(survey(first, {}))
    assert {shown.cause.id for shown in diagnosis.shown} >= {"end", "environment"}


def test_a_part_that_was_as_bad_before_is_expected():
    blocks = make_run(4, "environment", 20.0, **SMALL)
    table = survey(blocks, {}).tokens
    early, late = (table.select_sequences(flags) for flags in (table.step <= 4, table.step > 4))
    assert [region.id for region in locate(late).regions] == ["environment"]
    assert locate(late, early).regions == ()


def test_a_region_finds_its_tokens_in_other_steps():
    table = survey(make_run(5, "last_four", 60.0, **SMALL), {}).tokens
    (region,) = locate(table).regions
    assert (region.contains(table) == region.is_member).all()
    assert (region.contains(table) == (table.from_end < 4)).all()


def test_a_fault_of_one_environment_has_the_cause_of_its_tokens():
    """A filter in one environment is no other noise there."""
    blocks, filtered = make_run(6, None, **SMALL), make_run(6, "top_p", 0.3, **SMALL)
    for mine, other in zip(blocks, filtered, strict=True):
        is_code = np.repeat(mine.sequences["environment"] == "code", np.diff(mine.offsets))
        for name in ("gen", "prev"):
            mine.tokens[name] = np.where(is_code, other.tokens[name], mine.tokens[name])
    diagnosis = diagnose(survey(blocks, {}))
    assert {shown.cause.id for shown in diagnosis.shown} == {"filtered", "environment"}
    assert diagnosis.shown[0].phrase.endswith("in environment code") or diagnosis.shown[0].cause.id == "environment"


def test_routing_needs_a_model_with_experts():
    fault = FAULTS["flips_of_experts"]
    for options, named in (({"experts": True}, "routing"), ({}, "few_tokens")):
        diagnosis = diagnose(survey(make_run(8, "flips_of_experts", fault.strengths[2]), options))
        assert named_first(diagnosis)[0] == named
    dense = survey(make_run(8, "flips_of_experts", fault.strengths[2]), {})
    dense.experts = 0
    diagnosis = diagnose(dense)
    assert diagnosis.detections["routing"].description == "the model has no experts"
    assert "expert routing" not in " ".join(diagnosis.shown[0].advice)  # known, so it is no way to tell them apart


def test_every_factor_says_what_it_needs_or_divides_any_run():
    table = survey(
        make_run(9, None, steps=1, prompts=1, samples=1, length=30.0, options={"single_turn": True}), {}
    ).tokens
    for factor in FACTORS:
        assert factor.divide(table) is not None or factor.needs, factor.id


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([4], "step 4"),
        ([4, 5, 6], "steps 4 to 6"),
        ([4, 8, 12], "every 4th step (4, 8 and 12)"),
        ([1, 3, 5], "every second step (1, 3 and 5)"),
        ([2, 3, 9], "steps 2, 3 and 9 (3 of 12)"),
    ],
)
def test_steps_are_described_by_their_pattern(steps, text):
    assert describe_steps(steps, 12) == text


def test_a_range_is_described_by_its_ends():
    position, end, probability = (FACTORS_BY_ID[id_].describe for id_ in ("position", "from_end", "probability"))
    assert position([(0, 1)], 5) == "the first token of the response"
    assert position([(0, 1), (1, 8)], 5) == "the first 8 tokens of the response"
    assert position([(128, None)], 5) == "tokens late in the response (from position 128 on)"
    assert end([(0, 1)], 5) == "the last token of the response"
    assert probability([(4.6, None)], 5) == "low-probability tokens (below 0.01)"
    assert list_names(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"
    assert math.isfinite(FACTORS_BY_ID["length"].edges[-1])
