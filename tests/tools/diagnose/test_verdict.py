"""A planted cause is named, and nothing is named where nothing is wrong."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose import detection_power
from nemo_geomask.tools.diagnose.causes import CAUSES
from nemo_geomask.tools.diagnose.change_points import find_change
from nemo_geomask.tools.diagnose.json_report import diagnosis_json
from nemo_geomask.tools.diagnose.planted_logs import PLANTED_CAUSES, RunShape, planted_run, planted_step
from nemo_geomask.tools.diagnose.report_tables import diagnosis_tables
from nemo_geomask.tools.diagnose.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.step_survey import survey_block
from nemo_geomask.tools.diagnose.verdict import diagnose

BUGS = {cause.id for cause in CAUSES if cause.is_bug}


@pytest.mark.parametrize("cause", PLANTED_CAUSES)
def test_a_planted_cause_is_named_with_the_step_it_began_at(cause):
    found = diagnose(planted_run(11, cause, PLANTED_CAUSES[cause].strengths[1], onset=7))
    assert found.cause is not None
    assert found.cause.id == cause
    assert found.health == ("broken" if cause in BUGS else "drifting")
    assert found.since == 7
    assert f"since step 7: {found.cause.name}" in found.sentence


@pytest.mark.parametrize("cause", [cause for cause, plant in PLANTED_CAUSES.items() if plant.is_detectable_from_start])
def test_a_strong_one_is_named_that_was_there_from_the_start(cause):
    shape = RunShape(steps=4, prompts=8)
    found = diagnose(planted_run(12, cause, PLANTED_CAUSES[cause].strengths[2], shape=shape))
    assert found.cause is not None
    assert (found.cause.id, found.since) == (cause, None)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_named_where_nothing_is_wrong(seed):
    found = diagnose(planted_run(seed))
    assert (found.health, found.cause, found.since) == ("healthy", None, None)
    assert found.sentence.startswith("healthy: token_mult_prob_error 1.0")
    assert "nats a token over the last 4 of 12 steps; " in found.sentence
    assert found.counted_steps == 4
    assert "ruled out: filtered, zero logprobs" in found.sentence


SMALL = RunShape(steps=4, prompts=8)


@pytest.mark.parametrize("cause", ["precision", "routing", "position", "low_probability"])
def test_what_one_run_has_and_another_has_not_is_named(cause):
    """Two machines, top-p or cascade attention on and off: nothing changes within either run."""
    clean = planted_run(1, shape=SMALL)
    found = diagnose(planted_run(2, cause, PLANTED_CAUSES[cause].strengths[1], shape=SMALL), clean, "that")
    assert (found.health, found.since) == ("drifting", None)
    assert found.cause is not None
    assert found.cause.id == cause
    assert found.comparison.times > 1.2
    assert f"drifting, {found.comparison.times:.3g} times" in found.sentence
    assert "the mismatch of that: " in found.sentence
    assert "stale engine" in found.sentence.split("not in these records: ")[1]
    numbers, *others = diagnosis_tables(found)
    assert numbers.columns[1:3] == ("that", "this run")
    (by_position,) = (table for table in others if table.key == "position")
    assert by_position.columns[-2:] == ("against that", "95 % of that")
    assert diagnosis_json(found, "here")["against"]["times"] == pytest.approx(found.comparison.times)


def test_a_run_like_another_or_better_is_healthy():
    clean, worse = planted_run(1, shape=SMALL), planted_run(2, "precision", 4.0, shape=SMALL)
    same, better = diagnose(planted_run(3, shape=SMALL), clean), diagnose(clean, worse)
    assert (same.health, better.health) == ("healthy", "healthy")
    assert same.comparison.low < 1.1
    assert same.comparison.high > 0.9
    assert better.comparison.high < 0.5
    with pytest.raises(DataError, match="that one: no sequence has a trained token"):
        diagnose(clean, RunStatistics(), "that one")


@pytest.mark.parametrize("cause", ["tool_calls", "group", "position"])
def test_what_stands_out_in_both_is_no_cause_of_a_run_that_is_better(cause):
    """Less of it than there is no fault, and as much neither; alone it is named."""
    strengths = PLANTED_CAUSES[cause].strengths
    here, worse, same = (
        planted_run(seed, cause, strengths[strength], shape=SMALL) for seed, strength in ((1, 1), (2, 2), (3, 1))
    )
    assert diagnose(here).cause.id == cause
    for other in (worse, same):
        found = diagnose(here, other)
        assert (found.health, found.cause) == ("healthy", None)
    found = diagnose(worse, here)
    assert (found.health, found.cause.id) == ("drifting", cause)


def test_a_part_that_stands_out_has_an_interval_that_says_so():
    found = diagnose(planted_run(5, "tool_calls", 5.0, shape=SMALL))
    (by_turn,) = diagnosis_tables(found, splits=[("turn",)])
    row = dict(zip(by_turn.columns, by_turn.rows[1], strict=True))
    low, high = map(float, row["95 %"].split(" to "))
    assert row[""] == "1"
    assert 1.5 < low < row["against expected"] < high < 3.5
    (nothing,) = diagnosis_tables(found, splits=[("entropy",)])
    assert nothing.title.startswith("--by entropy: not recorded (loss_fn.record.entropy: true)")
    assert not nothing.rows
    steps, follows = diagnosis_tables(found, splits=[("step",)])
    assert len(steps.rows) == 4
    assert "fewer than 20 steps" in follows.title


def run_of(*blocks):
    found = RunStatistics()
    for block in blocks:
        found.add(survey_block(block))
    return found


def test_one_bad_step_is_named():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "shifted" if step == 4 else None, 0.2, shape=shape) for step in range(1, 9)]
    found = diagnose(run_of(*blocks))
    assert (found.health, found.since, found.detections["shifted"].steps) == ("broken", 4, (4,))
    assert "in 1 of 8 steps" in found.sentence


def test_the_hole_that_a_shift_leaves_is_no_cause_of_its_own():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "shifted" if step > 3 else None, 0.5, shape=shape) for step in range(1, 9)]
    zeros = [(block.tokens["gen"] == 0) & block.tokens["mask"] for block in blocks]
    holes = np.add.reduceat(zeros[-1].astype(int), blocks[-1].offsets[:-1])
    assert holes.max() > 1  # a sequence of several turns has one at each
    found = diagnose(run_of(*blocks))
    assert (found.cause.id, found.since) == ("shifted", 4)
    assert not found.detections["zero_logprobs"].is_shown
    # Zeros of one step are shown, but say less than what all steps show.
    gen, row = blocks[-1].tokens["gen"], int(holes.argmin())
    unsure = np.flatnonzero(blocks[-1].tokens["mask"] & (blocks[-1].tokens["prev"] < -0.1))
    gen[unsure[unsure >= blocks[-1].offsets[row]][:8]] = 0
    found = diagnose(run_of(*blocks))
    assert found.detections["zero_logprobs"].steps == (8,)
    assert (found.cause.id, found.since) == ("shifted", 4)


def test_what_one_step_shows_is_less_than_what_all_show():
    """Both are bugs, and only one of them is told step by step."""
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "temperature", 0.3, shape=shape) for step in range(1, 9)]
    blocks[2].tokens["gen"][np.flatnonzero(blocks[2].tokens["mask"])[0]] = np.inf
    found = diagnose(run_of(*blocks))
    assert found.detections["nonfinite"].steps == (3,)
    assert (found.cause.id, found.since) == ("temperature", None)
    # A shift looks like another temperature where it is, and it is in no other step.
    blocks = [planted_step(0, step, "shifted" if step == 4 else None, 1.0, shape=shape) for step in range(1, 9)]
    found = diagnose(run_of(*blocks))
    assert found.detections["temperature"].is_shown
    assert (found.cause.id, found.since) == ("shifted", 4)


def test_steps_before_the_change_do_not_outvote_those_from_then_on():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "filtered" if step > 8 else None, 0.1, shape=shape) for step in range(1, 13)]
    for block in blocks[:6]:
        block.tokens["gen"][np.flatnonzero(block.tokens["mask"])[0]] = np.nan
    found = diagnose(run_of(*blocks))
    assert (len(found.detections["nonfinite"].steps), len(found.detections["filtered"].steps)) == (6, 4)
    assert (found.cause.id, found.since) == ("filtered", 9)


def test_a_bug_that_was_seen_only_before_the_change_is_not_its_cause():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "precision" if step > 8 else None, 15.0, shape=shape) for step in range(1, 13)]
    blocks[0].tokens["gen"][np.flatnonzero(blocks[0].tokens["mask"])[0]] = np.nan
    found = diagnose(run_of(*blocks))
    assert found.detections["nonfinite"].steps == (1,)
    assert (found.cause.id, found.health, found.since) == ("precision", "drifting", 9)


@pytest.mark.parametrize("first", [1, 6])
@pytest.mark.parametrize("cause", ["tool_calls", "temperature", "shifted", "filtered"])
def test_a_fault_that_has_ended_is_over(cause, first):
    """Whether it was there from the start, and whether it is told step by step."""
    shape, strength = RunShape(prompts=6, samples=4), PLANTED_CAUSES[cause].strengths[-1]
    blocks = [
        planted_step(0, step, cause if first <= step < 14 else None, strength, shape=shape) for step in range(1, 21)
    ]
    found = diagnose(run_of(*blocks))
    assert (found.health, found.cause, found.since, found.counted_steps) == ("healthy", None, None, 6)
    assert diagnosis_tables(found)[0].columns[1] == "from 14"
    assert diagnose(run_of(*blocks[:15])).health != "healthy"  # two steps are too few to say so


def test_samples_that_are_stale_as_before_are_no_cause_once_the_fault_has_ended():
    blocks = [
        planted_step(0, step, "precision" if 3 < step < 14 else None, 15.0, shape=RunShape(prompts=6, samples=4))
        for step in range(1, 21)
    ]
    for step, block in enumerate(blocks, 1):
        block.sequences["staleness"] = np.full(len(block), 2.0 if step > 3 else 0.0)
    assert diagnose(run_of(*blocks[:13])).cause.id == "staleness"
    assert diagnose(run_of(*blocks)).health == "healthy"


def test_a_fault_that_is_less_than_it_was_has_not_ended():
    """It fell, and not to what it was before."""
    blocks = steps_of(20, lambda step: 1.0 if step < 6 else 6.0 if step < 14 else 3.0)
    found = diagnose(run_of(*blocks))
    assert (found.health, found.since) == ("drifting", 6)


def run_in_windows(*blocks, width):
    """As of a long run: several steps a window."""
    found = RunStatistics(width=width)
    found.add(run_of(*blocks))
    return found


def test_a_change_within_the_first_window_has_nothing_to_be_held_against():
    found = diagnose(run_in_windows(*steps_of(24, lambda step: 15.0 if step > 4 else 1.0), width=8))
    assert (found.since, found.cause.id) == (5, "precision")
    assert "nan" not in found.detections["precision"].description
    assert diagnosis_tables(found)


@pytest.mark.parametrize(("last", "first"), [(11, 16), (21, 1)], ids=["in the middle", "in the last window"])
def test_a_window_that_holds_the_end_of_a_fault_does_not_count(last, first):
    blocks = steps_of(23, lambda step: 15.0 if step <= last else 1.0)
    found = diagnose(run_in_windows(*blocks, width=8))
    assert found.evidence.first_step == first
    assert (found.health == "healthy") is (first == 16)


def steps_of(count, noise=lambda step: 1.0):
    """Healthy blocks whose Δ is ``noise(step)`` times the usual."""
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, None, 0.0, shape=shape) for step in range(1, count + 1)]
    for step, block in enumerate(blocks, 1):
        gen = block.tokens["gen"]
        block.tokens["prev"] = np.where(noise(step) == 0, gen, gen + noise(step) * (block.tokens["prev"] - gen))
    return blocks


def test_engines_that_agree_on_every_token_are_healthy():
    found = diagnose(run_of(*steps_of(6, lambda step: 0.0)))
    assert (found.health, found.cause, found.since) == ("healthy", None, None)
    assert found.detections["temperature"].value == 0
    assert diagnosis_tables(found)
    assert diagnose(run_of(*steps_of(6, lambda step: float(step > 1)))).health == "healthy"


@pytest.mark.parametrize("without", [(), (1,), (1, 4), (14,)])
def test_a_change_is_found_beside_steps_without_mismatch(without):
    found = diagnose(run_of(*steps_of(14, lambda step: 0.0 if step in without else 4.0 if step >= 8 else 1.0)))
    assert (found.health, found.since) == ("drifting", 8)


def test_a_mismatch_that_begins_from_none_is_a_change():
    found = diagnose(run_of(*steps_of(12, lambda step: float(step > 6))))
    assert (found.health, found.since) == ("drifting", 7)


def test_no_log_probs_of_the_engine_are_not_log_probs_of_0():
    blocks = steps_of(2)
    for block in blocks:
        block.tokens["gen"][block.tokens["mask"]] = np.nan
    found = diagnose(run_of(*blocks))
    assert (found.cause.id, found.detections["zero_logprobs"].is_shown) == ("nonfinite", False)
    for block in blocks:
        block.tokens.pop("gen")
    found = diagnose(run_of(*blocks))
    assert (found.cause, found.unjudged_reason) == (
        None,
        "no sequence has a trained token with log-probs of both engines",
    )


def test_a_run_without_old_log_probs_is_not_judged():
    block = planted_step(0, 1, None, 0.0, shape=RunShape(prompts=2))
    block.tokens["prev"][:] = 0
    found = diagnose(run_of(block))
    assert found.unjudged_reason
    assert found.sentence.startswith("not judged: prev_logprobs are 0 throughout")
    assert np.isnan(found.detections["stale_engine"].value)
    (causes,) = (table for table in diagnosis_tables(found) if table.key == "causes")
    assert {row[1] for row in causes.rows} == {"not judged"}


def test_weights_that_stand_still_are_seen_in_their_number():
    shape = RunShape(prompts=4, samples=4)
    blocks = [planted_step(0, step, None, 0.0, shape=shape) for step in range(1, 7)]
    stuck = [
        dataclasses.replace(block, sequences={**block.sequences, "weight_version": np.full(len(block), 3.0)})
        for block in blocks
    ]
    found = diagnose(run_of(*stuck))
    assert found.cause is not None
    assert (found.cause.id, found.health) == ("stale_engine", "broken")
    moving = [
        dataclasses.replace(block, sequences={**block.sequences, "weight_version": np.full(len(block), float(number))})
        for number, block in enumerate(blocks)
    ]
    assert diagnose(run_of(*moving)).health == "healthy"


@pytest.mark.parametrize(
    ("fresh", "onset", "named"),
    [(1, 2, "staleness"), (4, 5, "staleness"), (1, 7, "precision"), (0, 1, "precision")],
    ids=["from step 2 on", "later", "numerics while all are stale", "nothing fresh to compare with"],
)
def test_samples_that_are_nearly_all_stale_are_held_against_the_fresh_ones(fresh, onset, named):
    run = RunStatistics()
    for step in range(1, 13):
        block = planted_step(5, step, "precision" if step >= onset else None, 15.0)
        block.sequences["staleness"] = np.full(len(block), 2.0 if step > fresh else 0.0)
        run.add(survey_block(block))
    assert diagnose(run).cause.id == named


def test_a_few_sequences_of_one_step_fit_a_neighbour_by_chance():
    run = planted_run(3)
    run.steps[5]["shifted_later"] = 0.02 * run.steps[5]["sequences_checked_for_shift"]
    assert diagnose(run).health == "healthy"
    run.steps[6]["shifted_later"] = 0.02 * run.steps[6]["sequences_checked_for_shift"]
    assert diagnose(run).cause.id == "shifted"


def test_limits_need_more_than_a_few_sequences():
    def run(prompts):
        shape = RunShape(prompts=prompts, samples=3, length=60)
        return diagnose(run_of(*(planted_step(4, step, "precision", 30.0, shape=shape) for step in (1, 2))))

    few, many = run(3), run(12)
    assert few.sentence.startswith("not judged: only 18 sequences in the steps that count, at least 32 are needed; ")
    assert "token_mult_prob_error 1." in few.unjudged_reason
    for found in (few, many):
        error = found.readings["token_mult_prob_error"]
        assert 1.05 < error.low < error.value < error.high
    assert (few.readings["token_mult_prob_error"].health, many.health, many.unjudged_reason) == (
        "healthy",
        "drifting",
        "",
    )
    assert many.cause.id == "precision"


def test_causes_and_comparisons_need_more_than_a_few_sequences():
    few, many = RunShape(steps=2, prompts=3, samples=4), RunShape(steps=2, prompts=3, samples=16)
    for shape, cause, health in ((few, None, "unknown"), (many, "tool_calls", "drifting")):
        found = diagnose(planted_run(12, "tool_calls", 20.0, shape=shape))
        assert found.detections["tool_calls"].is_shown
        assert (found.cause and found.cause.id, "unknown" if found.unjudged_reason else found.health) == (cause, health)
    clean, worse = (
        (lambda shape: planted_run(1, shape=shape)),
        (lambda shape: planted_run(2, "precision", 4.0, shape=shape)),
    )
    assert diagnose(worse(many), clean(many)).health == "drifting"
    for mine, other in ((few, many), (many, few)):
        found = diagnose(worse(mine), clean(other), "that")
        assert found.comparison.low > 1.5
        assert found.unjudged_reason.startswith("only 24 sequences in the steps that count, at least 32 are needed; ")
        assert "times the mismatch of that" in found.unjudged_reason
    assert diagnose(planted_run(1, "shifted", 1.0, shape=few)).cause.id == "shifted"  # a bug needs none


def test_engines_that_have_nothing_in_common_are_not_shifted():
    """Where every log-prob is off, a neighbour's fits better now and then."""
    blocks = [planted_step(1, step, None, 0.0, shape=RunShape(prompts=8, samples=8, length=40)) for step in (1, 2, 3)]
    for block in blocks:
        trained = np.flatnonzero(block.tokens["mask"])
        block.tokens["prev"][trained] = np.random.default_rng(0).permutation(block.tokens["prev"][trained])
    assert not diagnose(run_of(*blocks)).detections["shifted"].is_shown


def test_a_tilt_of_sure_tokens_is_no_filter():
    """Of another temperature, too, every likely token is less likely in the training engine."""
    blocks = [planted_step(0, step, "temperature", -0.3, shape=RunShape(prompts=8)) for step in range(1, 5)]
    for block in blocks:
        block.tokens["mask"] &= block.tokens["gen"] > -1.0
    found = diagnose(run_of(*blocks)).detections["filtered"]
    assert np.isnan(found.value)
    assert "a surprise of at least 2 nats" in found.description


def test_a_few_tokens_tilt_by_chance():
    for seed in range(20):
        block = planted_step(seed, 1, None, 0.0, shape=RunShape(prompts=2, samples=2, length=40))
        assert not diagnose(run_of(block)).detections["temperature"].is_shown


def test_the_highest_of_many_prompts_is_high_by_chance_in_a_few_steps():
    for steps, shown in ((2, False), (4, False), (15, True)):
        found = diagnose(planted_run(3, "group", 6.0, shape=RunShape(steps=steps, prompts=8)))
        assert found.detections["group"].is_shown is shown, steps


def test_two_odd_tokens_are_no_odd_prompt():
    blocks = [planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=2, length=30)) for step in range(1, 6)]
    for block in blocks:
        block.tokens["prev"][np.flatnonzero(block.tokens["mask"])[:2]] -= 1
    found = diagnose(run_of(*blocks))
    assert not found.detections["group"].is_shown
    assert found.health == "healthy"


def test_a_policy_that_becomes_sure_is_no_engine_that_comes_apart():
    """What rounding leaves to sure tokens weighs more and more in proportion, while there is less and less of it."""
    blocks = [planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=4)) for step in range(1, 13)]
    for block in blocks[6:]:
        delta = block.tokens["prev"] - block.tokens["gen"]
        block.tokens["gen"] *= 0.02
        block.tokens["prev"] = block.tokens["gen"] + 0.1 * delta
    found = diagnose(run_of(*blocks))
    steps = found.evidence.statistics.steps
    assert steps[12].mean("capped_abs", "one_minus_p") > 1.7 * steps[1].mean("capped_abs", "one_minus_p")
    assert (found.health, found.since) == ("healthy", None)


def test_no_step_is_an_error():
    with pytest.raises(DataError, match="no sequence"):
        diagnose(RunStatistics())


@pytest.mark.parametrize("scale", [0.05, 0.2])
def test_a_change_is_found_where_it_is(scale):
    noise = scale * np.random.default_rng(1).standard_normal(40)
    jump = find_change(noise + 2 * (np.arange(40) >= 25), 0.01)
    assert (jump.first, jump.is_gradual) == (25, False)
    assert jump.score > 20
    slope = find_change(noise + 0.5 * np.maximum(np.arange(40) - 24, 0), 0.01)
    assert slope.is_gradual
    assert abs(slope.first - 25) <= 2


def test_no_change_is_found_in_noise():
    for seed in range(20):
        found = find_change(np.random.default_rng(seed).standard_normal(30), 0.01)
        assert abs(found.score) < 6
    assert find_change([1.0] * 4, 0.01) is None
    assert find_change([1.0, 2.0, np.nan, 1.0, 2.0, 3.0], 0.01) is None


def test_what_is_printed_and_what_programs_get_are_the_same():
    found = diagnose(planted_run(0, "tool_calls", 20.0, onset=5, shape=RunShape(steps=8, prompts=6, samples=4)))
    shown = {table.key: table for table in diagnosis_tables(found, decode=lambda ids: "[bold]\x1b" * len(ids))}
    assert {"numbers", "causes", "steps", "turn", "worst_tokens"} <= set(shown)
    assert shown["worst_tokens"].rows[0][-1].startswith("'[bold]\\x1b")
    told = diagnosis_json(found, "run")
    assert (told["health"], told["cause"]["id"], told["since"]) == ("drifting", "tool_calls", 5)
    assert len(told["tables"]["turn"]) == len(shown["turn"].rows)
    assert {one["id"] for one in told["causes"]} == {cause.id for cause in CAUSES}


def test_the_page_says_what_was_measured_and_what_the_code_looks_for():
    docs = Path(detection_power.__file__).parents[3] / "docs"
    text = (docs / "diagnose.md").read_text(encoding="utf-8")
    measured = json.loads((docs / "diagnose" / "power.json").read_text(encoding="utf-8"))
    assert detection_power.rewrite(text, measured) == text, "run: make docs"
    assert measured["seeds"] >= 20
    assert len(measured["false_alarms"]) <= 1
    for cause, rows in measured["planted"].items():
        assert rows[1]["named"].get(cause, 0) >= 0.95 * measured["seeds"], cause
