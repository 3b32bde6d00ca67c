"""A planted cause is named, and a clean run is called healthy."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.verdict import diagnose
from nemo_geomask.tools.diagnose.measure import token_table
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_survey import survey_block
from nemo_geomask.tools.diagnose.report.json_report import diagnosis_json
from nemo_geomask.tools.diagnose.report.report_tables import diagnosis_tables
from tests.evidence.diagnose import detection_power
from tests.evidence.diagnose.planted_causes import PLANTED_CAUSES, planted_run, planted_step
from tests.evidence.diagnose.planted_logs import RunShape

BUGS = {cause.id for cause in CAUSES if cause.is_bug}


@pytest.mark.parametrize("cause", PLANTED_CAUSES)
def test_a_planted_cause_is_named_with_the_step_it_began_at(cause):
    diagnosis = diagnose(planted_run(11, cause, PLANTED_CAUSES[cause].strengths[1], onset=7))
    assert diagnosis.cause is not None
    assert diagnosis.cause.id == cause
    assert diagnosis.health == ("broken" if cause in BUGS else "drifting")
    assert diagnosis.since == 7
    assert f"since step 7: {diagnosis.shown[0].phrase}" in diagnosis.sentence


@pytest.mark.parametrize("cause", [cause for cause, plant in PLANTED_CAUSES.items() if plant.is_detectable_from_start])
def test_a_strong_cause_is_named_that_is_present_from_the_start(cause):
    shape = RunShape(steps=4, prompts=8)
    diagnosis = diagnose(planted_run(12, cause, PLANTED_CAUSES[cause].strengths[2], shape=shape))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.id, diagnosis.since) == (cause, None)


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_run_is_healthy(seed):
    diagnosis = diagnose(planted_run(seed))
    assert (diagnosis.health, diagnosis.cause, diagnosis.since) == ("healthy", None, None)
    assert diagnosis.sentence.startswith("healthy: token_mult_prob_error 1.0")
    assert "nats a token over the last 4 of 12 steps; " in diagnosis.sentence
    assert diagnosis.counted_steps == 4
    assert "ruled out: filtered, zero logprobs" in diagnosis.sentence


SMALL = RunShape(steps=4, prompts=8)


@pytest.mark.parametrize("cause", ["precision", "routing", "position", "low_probability"])
def test_a_cause_that_only_one_of_two_runs_has_is_named(cause):
    """Such as another machine or cascade attention: nothing changes within either run."""
    clean = planted_run(1, shape=SMALL)
    diagnosis = diagnose(planted_run(2, cause, PLANTED_CAUSES[cause].strengths[1], shape=SMALL), clean, "that")
    assert (diagnosis.health, diagnosis.since) == ("drifting", None)
    assert diagnosis.cause is not None
    assert diagnosis.cause.id == cause
    assert diagnosis.comparison.times > 1.2
    assert f"drifting, {diagnosis.comparison.times:.3g} times" in diagnosis.sentence
    assert "the mismatch of that: " in diagnosis.sentence
    assert "stale engine" in diagnosis.sentence.split("not testable in these records: ")[1]
    numbers, *others = diagnosis_tables(diagnosis)
    assert numbers.columns[1:3] == ("that", "this run")
    (by_position,) = (table for table in others if table.key == "position")
    assert by_position.columns[-2:] == ("against that", "95 % of that")
    assert diagnosis_json(diagnosis, "here")["against"]["times"] == pytest.approx(diagnosis.comparison.times)


def test_a_run_that_is_no_worse_than_another_is_healthy():
    clean, worse = planted_run(1, shape=SMALL), planted_run(2, "precision", 4.0, shape=SMALL)
    same, better = diagnose(planted_run(3, shape=SMALL), clean), diagnose(clean, worse)
    assert (same.health, better.health) == ("healthy", "healthy")
    assert same.comparison.low < 1.1
    assert same.comparison.high > 0.9
    assert better.comparison.high < 0.5
    with pytest.raises(DataError, match="that one: no sequence has a trained token"):
        diagnose(clean, RunStatistics(), "that one")


@pytest.mark.parametrize("cause", ["tool_calls", "group", "position"])
def test_a_part_that_stands_out_in_both_runs_is_a_cause_only_if_it_is_worse(cause):
    """Without the other run it is named."""
    strengths = PLANTED_CAUSES[cause].strengths
    here, worse, same = (
        planted_run(seed, cause, strengths[strength], shape=SMALL) for seed, strength in ((1, 1), (2, 2), (3, 1))
    )
    assert diagnose(here).cause.id == cause
    for other in (worse, same):
        diagnosis = diagnose(here, other)
        assert (diagnosis.health, diagnosis.cause) == ("healthy", None)
    diagnosis = diagnose(worse, here)
    assert (diagnosis.health, diagnosis.cause.id) == ("drifting", cause)


def test_the_table_of_a_dimension_has_intervals():
    diagnosis = diagnose(planted_run(5, "tool_calls", 5.0, shape=SMALL))
    (by_turn,) = diagnosis_tables(diagnosis, splits=[("turn",)])
    row = dict(zip(by_turn.columns, by_turn.rows[1], strict=True))
    low, high = map(float, row["95 %"].split(" to "))
    assert row[""] == "1"
    assert 1.5 < low < row["against expected"] < high < 3.5
    (nothing,) = diagnosis_tables(diagnosis, splits=[("entropy",)])
    assert nothing.title.startswith("--by entropy: not recorded (loss_fn.record.entropy: true)")
    assert not nothing.rows
    (steps,) = diagnosis_tables(diagnosis, splits=[("step",)])
    assert len(steps.rows) == 4


def run_of(*blocks):
    statistics = RunStatistics()
    for block in blocks:
        statistics.add(survey_block(block))
    return statistics


def test_one_bad_step_is_named():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "shifted" if step == 4 else None, 0.2, shape=shape) for step in range(1, 9)]
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.health, diagnosis.since, diagnosis.detections["shifted"].steps) == ("broken", 4, (4,))
    assert "in 1 of 8 steps" in diagnosis.sentence


def test_the_zeros_that_a_shift_leaves_are_part_of_the_shift():
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "shifted" if step > 3 else None, 0.5, shape=shape) for step in range(1, 9)]
    zeros = [(block.tokens["gen"] == 0) & block.tokens["mask"] for block in blocks]
    holes = np.add.reduceat(zeros[-1].astype(int), blocks[-1].offsets[:-1])
    assert holes.max() > 1  # a sequence of several turns has one at each
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.cause.id, diagnosis.since) == ("shifted", 4)
    assert not diagnosis.detections["zero_logprobs"].is_shown
    # Zeros of one step are shown, but say less than what all steps show.
    gen, row = blocks[-1].tokens["gen"], int(holes.argmin())
    unsure = np.flatnonzero(blocks[-1].tokens["mask"] & (blocks[-1].tokens["prev"] < -0.1))
    gen[unsure[unsure >= blocks[-1].offsets[row]][:8]] = 0
    diagnosis = diagnose(run_of(*blocks))
    assert diagnosis.detections["zero_logprobs"].steps == (8,)
    assert (diagnosis.cause.id, diagnosis.since) == ("shifted", 4)


def test_a_bug_of_all_steps_precedes_a_bug_of_one_step():
    """Both are bugs, and only one of them is judged step by step."""
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "temperature", 0.3, shape=shape) for step in range(1, 9)]
    blocks[2].tokens["gen"][np.flatnonzero(blocks[2].tokens["mask"])[0]] = np.inf
    diagnosis = diagnose(run_of(*blocks))
    assert diagnosis.detections["nonfinite"].steps == (3,)
    assert (diagnosis.cause.id, diagnosis.since) == ("temperature", None)
    # Shifted sequences look like another temperature, so no other cause is sought in them.
    blocks = [planted_step(0, step, "shifted" if step == 4 else None, 1.0, shape=shape) for step in range(1, 9)]
    diagnosis = diagnose(run_of(*blocks))
    assert not diagnosis.detections["temperature"].is_shown  # which the shifted sequences alone would show
    assert (diagnosis.cause.id, diagnosis.since) == ("shifted", 4)


@pytest.mark.parametrize(
    ("cause", "strength", "health", "bad"), [("filtered", 0.1, "broken", 6), ("precision", 15.0, "drifting", 1)]
)
def test_a_bug_that_only_earlier_steps_show_is_not_the_cause_of_a_change(cause, strength, health, bad):
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, cause if step > 8 else None, strength, shape=shape) for step in range(1, 13)]
    for block in blocks[:bad]:
        block.tokens["gen"][np.flatnonzero(block.tokens["mask"])[0]] = np.nan
    diagnosis = diagnose(run_of(*blocks))
    assert diagnosis.detections["nonfinite"].steps == tuple(range(1, bad + 1))
    assert (diagnosis.cause.id, diagnosis.health, diagnosis.since) == (cause, health, 9)


@pytest.mark.parametrize("first", [1, 6])
@pytest.mark.parametrize("cause", ["tool_calls", "temperature", "shifted", "filtered"])
def test_a_fault_that_has_ended_is_over(cause, first):
    """Whether or not it is there from the start, and whether or not it is judged step by step."""
    shape, strength = RunShape(prompts=6, samples=4), PLANTED_CAUSES[cause].strengths[-1]
    blocks = [
        planted_step(0, step, cause if first <= step < 14 else None, strength, shape=shape) for step in range(1, 21)
    ]
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.health, diagnosis.cause, diagnosis.since, diagnosis.counted_steps) == ("healthy", None, None, 6)
    assert diagnosis_tables(diagnosis)[0].columns[1] == "from 14"
    assert diagnose(run_of(*blocks[:15])).health != "healthy"  # two steps are too few to say so


def test_staleness_that_remains_is_no_cause_after_a_fault_has_ended():
    blocks = [
        planted_step(0, step, "precision" if 3 < step < 14 else None, 15.0, shape=RunShape(prompts=6, samples=4))
        for step in range(1, 21)
    ]
    for step, block in enumerate(blocks, 1):
        block.sequences["staleness"] = np.full(len(block), 2.0 if step > 3 else 0.0)
    assert diagnose(run_of(*blocks[:13])).cause.id == "staleness"
    assert diagnose(run_of(*blocks)).health == "healthy"


def test_a_fault_that_became_weaker_has_not_ended():
    """The mismatch fell, but not to its level before the fault."""
    blocks = steps_of(20, lambda step: 1.0 if step < 6 else 6.0 if step < 14 else 3.0)
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.health, diagnosis.since) == ("drifting", 6)


@pytest.mark.parametrize(("last", "first"), [(11, 12), (22, 1)], ids=["in the middle", "just ended"])
def test_a_fault_that_has_ended_is_over_after_three_steps(last, first):
    diagnosis = diagnose(run_of(*steps_of(23, lambda step: 15.0 if step <= last else 1.0)))
    assert diagnosis.evidence.first_step == first
    assert (diagnosis.health == "healthy") is (first == 12)


def steps_of(count, noise=lambda step: 1.0, *, prompts=6, samples=4):
    """Return clean blocks whose Δ is multiplied by ``noise(step)``."""
    shape = RunShape(prompts=prompts, samples=samples)
    blocks = [planted_step(0, step, None, 0.0, shape=shape) for step in range(1, count + 1)]
    for step, block in enumerate(blocks, 1):
        gen = block.tokens["gen"]
        block.tokens["prev"] = gen + noise(step) * (block.tokens["prev"] - gen)
    return blocks


def test_engines_that_agree_on_every_token_are_healthy():
    diagnosis = diagnose(run_of(*steps_of(6, lambda step: 0.0)))
    assert (diagnosis.health, diagnosis.cause, diagnosis.since) == ("healthy", None, None)
    assert diagnosis.detections["temperature"].value == 0
    assert diagnosis_tables(diagnosis)
    assert diagnose(run_of(*steps_of(6, lambda step: float(step > 1)))).health == "healthy"


@pytest.mark.parametrize("without", [(), (1,), (1, 4), (14,)])
def test_a_change_is_detected_beside_steps_without_mismatch(without):
    diagnosis = diagnose(run_of(*steps_of(14, lambda step: 0.0 if step in without else 4.0 if step >= 8 else 1.0)))
    assert (diagnosis.health, diagnosis.since) == ("drifting", 8)


def test_a_mismatch_after_steps_without_any_is_a_change():
    diagnosis = diagnose(run_of(*steps_of(12, lambda step: float(step > 6))))
    assert (diagnosis.health, diagnosis.since) == ("drifting", 7)


def test_missing_log_probs_of_the_engine_are_not_zeros():
    blocks = steps_of(2)
    for block in blocks:
        block.tokens["gen"][block.tokens["mask"]] = np.nan
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.cause.id, diagnosis.detections["zero_logprobs"].is_shown) == ("nonfinite", False)
    for block in blocks:
        block.tokens.pop("gen")
    diagnosis = diagnose(run_of(*blocks))
    assert (diagnosis.cause, diagnosis.unjudged_reason) == (
        None,
        "no sequence has a trained token with log-probs of both engines",
    )


def test_zeros_of_the_training_engine_are_said_to_be_its_own():
    for name, words in (
        ("prev", "exactly 0 from the training engine"),
        ("gen", "exactly 0 from the generation engine"),
    ):
        blocks = steps_of(2)
        for block in blocks:
            unsure = block.tokens["mask"] & (block.tokens["gen"] < -3) & (block.tokens["prev"] < -3)
            block.tokens[name][np.flatnonzero(unsure)[::5]] = 0
        diagnosis = diagnose(run_of(*blocks))
        assert diagnosis.cause.id == "zero_logprobs"
        assert diagnosis.detections["zero_logprobs"].description.endswith(words)
        # What NeMo-RL's trainer does under top-p is one reason.
        assert "sample with top_p: 1.0" in diagnosis.cause.action


def test_a_run_without_old_log_probs_is_not_judged():
    block = planted_step(0, 1, None, 0.0, shape=RunShape(prompts=2))
    block.tokens["prev"][:] = 0
    diagnosis = diagnose(run_of(block))
    assert diagnosis.unjudged_reason
    assert diagnosis.sentence.startswith("not judged: prev_logprobs are 0 throughout")
    assert np.isnan(diagnosis.detections["stale_engine"].value)
    (causes,) = (table for table in diagnosis_tables(diagnosis) if table.key == "causes")
    assert {row[1] for row in causes.rows} == {"not judged"}


def test_a_weight_version_that_never_changes_shows_a_stale_engine():
    shape = RunShape(prompts=4, samples=4)
    blocks = [planted_step(0, step, None, 0.0, shape=shape) for step in range(1, 7)]
    stuck = [
        dataclasses.replace(block, sequences={**block.sequences, "weight_version": np.full(len(block), 3.0)})
        for block in blocks
    ]
    diagnosis = diagnose(run_of(*stuck))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.id, diagnosis.health) == ("stale_engine", "broken")
    moving = [
        dataclasses.replace(block, sequences={**block.sequences, "weight_version": np.full(len(block), float(number))})
        for number, block in enumerate(blocks)
    ]
    assert diagnose(run_of(*moving)).health == "healthy"


def moving_policy(updates_behind, recorded_age):
    """Return a run of 24 steps whose samples are as many updates old as the first function of the step says."""
    run = RunStatistics()
    for step in range(1, 25):
        age = updates_behind(step)
        block = planted_step(7, step, "stale_engine" if age else None, 0.1, steps_since_onset=age)
        block.sequences["staleness"] = np.full(len(block), float(recorded_age(step)))
        run.add(survey_block(block))
    return run


@pytest.mark.parametrize("lag", [1, 8])
def test_a_recorded_staleness_that_explains_the_mismatch_leaves_a_stale_engine_open(lag):
    """Old samples correlate with the advantage, too, and no engine has to be stuck."""
    diagnosis = diagnose(moving_policy(lambda step: min(step - 1, lag), lambda step: min(step - 1, lag)))
    stale_engine = diagnosis.detections["stale_engine"]
    assert diagnosis.cause.id == "staleness"
    assert stale_engine.value > 3
    assert stale_engine.state == "not testable"
    assert "stale engine (needs the engine's weights, since the recorded staleness rose" in diagnosis.sentence


def test_a_staleness_that_rose_between_the_first_steps_is_enough():
    """The rise of the mismatch may be found late, when the samples before it are not all fresh."""
    behind = {1: 0, 2: 1, 3: 1}
    run = moving_policy(lambda step: 0 if step < 4 else step, lambda step: behind.get(step, 1))
    assert diagnose(run).detections["stale_engine"].state == "not testable"


def test_a_stale_engine_is_named_where_no_recorded_staleness_explains_it():
    for recorded in (lambda step: 2, lambda step: 1 + 0.2 * (step > 3), lambda step: math.nan):
        stuck = diagnose(moving_policy(lambda step: step - 1, recorded))
        assert stuck.cause.id == "stale_engine"


@pytest.mark.parametrize(
    ("fresh", "onset", "named"),
    [(1, 2, "staleness"), (4, 5, "staleness"), (1, 7, "precision"), (0, 1, "precision")],
    ids=["from step 2 on", "later", "numerics while all are stale", "nothing fresh to compare with"],
)
def test_stale_samples_are_compared_with_the_fresh_ones_of_the_whole_run(fresh, onset, named):
    run = RunStatistics()
    for step in range(1, 13):
        block = planted_step(5, step, "precision" if step >= onset else None, 15.0)
        block.sequences["staleness"] = np.full(len(block), 2.0 if step > fresh else 0.0)
        run.add(survey_block(block))
    assert diagnose(run).cause.id == named


@pytest.mark.parametrize(
    "cause", ["tool_calls", "position", "group", "filtered", "routing", "precision", "stale_engine"]
)
def test_a_sample_of_the_tokens_shows_the_same_cause(cause, monkeypatch):
    """Of a long run, the table of tokens is a sample, in which tokens without mismatch are rare."""
    monkeypatch.setattr(token_table, "MAX_TOKENS", 2**12)
    diagnosis = diagnose(planted_run(11, cause, PLANTED_CAUSES[cause].strengths[2], onset=7))
    assert (diagnosis.cause.id, diagnosis.since) == (cause, 7)
    assert len(diagnosis.evidence.statistics.tokens) <= 2**12


def test_fresh_samples_that_a_sample_hardly_keeps_are_compared_all_the_same(monkeypatch):
    monkeypatch.setattr(token_table, "MAX_TOKENS", 2**12)
    run = RunStatistics()
    for step in range(1, 13):
        block = planted_step(5, step, "precision" if step > 1 else None, 15.0)
        block.sequences["staleness"] = np.full(len(block), 2.0 if step > 1 else 0.0)
        run.add(survey_block(block))
    is_fresh = (run.tokens.numbers["staleness"] == 0)[run.tokens.sequence]
    assert 0 < is_fresh.sum() < 100 < run.tokens.weight[is_fresh].sum()
    assert diagnose(run).cause.id == "staleness"


def test_a_few_shifted_sequences_of_one_step_are_chance():
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
    for diagnosis in (few, many):
        error = diagnosis.readings["token_mult_prob_error"]
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
        diagnosis = diagnose(planted_run(12, "tool_calls", 20.0, shape=shape))
        assert diagnosis.detections["tool_calls"].is_shown
        assert (
            diagnosis.cause and diagnosis.cause.id,
            "unknown" if diagnosis.unjudged_reason else diagnosis.health,
        ) == (cause, health)
    clean, worse = (
        (lambda shape: planted_run(1, shape=shape)),
        (lambda shape: planted_run(2, "precision", 4.0, shape=shape)),
    )
    assert diagnose(worse(many), clean(many)).health == "drifting"
    for mine, other in ((few, many), (many, few)):
        diagnosis = diagnose(worse(mine), clean(other), "that")
        assert diagnosis.comparison.low > 1.5
        assert diagnosis.unjudged_reason.startswith(
            "only 24 sequences in the steps that count, at least 32 are needed; "
        )
        assert "times the mismatch of that" in diagnosis.unjudged_reason
    assert diagnose(planted_run(1, "shifted", 1.0, shape=few)).cause.id == "shifted"  # a bug needs none


def test_unrelated_log_probs_are_not_shifted():
    """Where every log-prob is wrong, a neighbour's sometimes fits better by chance."""
    blocks = [planted_step(1, step, None, 0.0, shape=RunShape(prompts=8, samples=8, length=40)) for step in (1, 2, 3)]
    for block in blocks:
        trained = np.flatnonzero(block.tokens["mask"])
        block.tokens["prev"][trained] = np.random.default_rng(0).permutation(block.tokens["prev"][trained])
    assert not diagnose(run_of(*blocks)).detections["shifted"].is_shown


def test_a_tilt_of_sure_tokens_is_not_a_filter():
    """Another temperature also makes every likely token less likely in the training engine."""
    blocks = [planted_step(0, step, "temperature", -0.3, shape=RunShape(prompts=8)) for step in range(1, 5)]
    for block in blocks:
        block.tokens["mask"] &= block.tokens["gen"] > -1.0
    diagnosis = diagnose(run_of(*blocks)).detections["filtered"]
    assert np.isnan(diagnosis.value)
    assert "a surprise of at least 2 nats" in diagnosis.description


def test_a_few_tokens_tilt_by_chance():
    for seed in range(20):
        block = planted_step(seed, 1, None, 0.0, shape=RunShape(prompts=2, samples=2, length=40))
        assert not diagnose(run_of(block)).detections["temperature"].is_shown


def test_a_prompt_group_is_a_place_from_two_and_a_half_times_the_mismatch_on():
    for strength, shown in ((1.0, False), (6.0, True)):
        diagnosis = diagnose(planted_run(3, "group", strength, shape=RunShape(steps=4, prompts=8)))
        assert diagnosis.detections["group"].is_shown is shown, strength


def test_two_tokens_do_not_make_a_prompt_stand_out():
    blocks = [planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=2, length=30)) for step in range(1, 6)]
    for block in blocks:
        block.tokens["prev"][np.flatnonzero(block.tokens["mask"])[:2]] -= 1
    diagnosis = diagnose(run_of(*blocks))
    assert not diagnosis.detections["group"].is_shown
    assert diagnosis.health == "healthy"


def test_a_policy_that_becomes_sure_is_not_a_rise_of_the_mismatch():
    """The mismatch of sure tokens grows in proportion to 1 − p, while it falls per token."""
    blocks = [planted_step(0, step, None, 0.0, shape=RunShape(prompts=6, samples=4)) for step in range(1, 13)]
    for block in blocks[6:]:
        delta = block.tokens["prev"] - block.tokens["gen"]
        block.tokens["gen"] *= 0.02
        block.tokens["prev"] = block.tokens["gen"] + 0.1 * delta
    diagnosis = diagnose(run_of(*blocks))
    steps = diagnosis.evidence.statistics.steps
    assert steps[12].mean("capped_abs", "one_minus_p") > 1.7 * steps[1].mean("capped_abs", "one_minus_p")
    assert (diagnosis.health, diagnosis.since) == ("healthy", None)


def test_no_step_is_an_error():
    with pytest.raises(DataError, match="no sequence"):
        diagnose(RunStatistics())


def test_the_tables_and_the_json_hold_the_same_values():
    diagnosis = diagnose(planted_run(0, "tool_calls", 20.0, onset=5, shape=RunShape(steps=8, prompts=6, samples=4)))
    shown = {table.key: table for table in diagnosis_tables(diagnosis, decode=lambda ids: "[bold]\x1b" * len(ids))}
    assert {"numbers", "causes", "steps", "turn", "worst_tokens"} <= set(shown)
    assert shown["worst_tokens"].rows[0][-1].startswith("'[bold]\\x1b")
    output = diagnosis_json(diagnosis, "run")
    assert (output["health"], output["cause"]["id"], output["since"]) == ("drifting", "tool_calls", 5)
    assert len(output["tables"]["turn"]) == len(shown["turn"].rows)
    assert {one["id"] for one in output["causes"]} == {cause.id for cause in CAUSES}


def test_the_page_has_the_recorded_measurements_and_the_thresholds_of_the_code():
    docs = Path(detection_power.__file__).parents[3] / "docs"
    text = (docs / "evidence" / "diagnosis.md").read_text(encoding="utf-8")
    measured = json.loads((docs / "diagnose" / "power.json").read_text(encoding="utf-8"))
    assert detection_power.rewrite(text, measured) == text, "run: make docs"
    mixtures = json.loads((docs / "evidence" / "mixtures.json").read_text(encoding="utf-8"))
    assert detection_power.rewrite_mixtures(text, mixtures) == text, "run: make docs"
    assert mixtures["wrong_cause"] <= 0.02 * mixtures["runs"]
    assert mixtures["place_right"] >= 0.95 * mixtures["major"] >= 250
    assert (mixtures["clean"], mixtures["not_healthy"]) == (100, 0)
    assert measured["seeds"] >= 20
    assert len(measured["false_alarms"]) <= 1
    for cause, rows in measured["planted"].items():
        assert rows[1]["named"].get(cause, 0) >= 0.95 * measured["seeds"], cause


def test_a_cause_without_anything_to_compare_is_not_ruled_out():
    """Nothing changes, there is no other run, and the records hold no weight versions."""
    diagnosis = diagnose(run_of(*steps_of(12, samples=8)))
    assert diagnosis.health == "healthy"
    for cause in ("few_tokens", "routing", "precision", "stale_engine"):
        assert diagnosis.detections[cause].state == "not testable"
        assert diagnosis.detections[cause].needs
    untested = diagnosis.sentence.split("not testable in these records: ")[1]
    assert "few tokens, precision (needs a step at which the mismatch rises, or another run (--against))" in untested
    assert "routing (needs whether the model has experts (--experts, or records of loss_fn.record))" in untested
    assert "routing" not in diagnosis.sentence.split("not testable")[0].split("ruled out: ")[1]
    # With something to compare, they are tested.
    compared = diagnose(run_of(*steps_of(12, samples=8)), planted_run(3))
    assert {compared.detections[cause].state for cause in ("few_tokens", "precision")} == {"ruled out"}
    versioned = [
        dataclasses.replace(block, sequences={**block.sequences, "weight_version": np.full(len(block), float(number))})
        for number, block in enumerate(steps_of(6, samples=8))
    ]
    assert diagnose(run_of(*versioned)).detections["stale_engine"].state == "ruled out"


@pytest.mark.parametrize("onset", [1, 7])
def test_the_cause_of_most_of_the_mismatch_is_named_before_a_bug_of_few_tokens(onset):
    blocks = [planted_step(4, step, "tool_calls" if step >= onset else None, 10.0) for step in range(1, 13)]
    for block in blocks:
        gen, prev = block.tokens["gen"], block.tokens["prev"]
        gen[block.tokens["mask"] & (prev < -0.05) & (prev > -0.12)] = 0
    diagnosis = diagnose(run_of(*blocks))
    first, *others = diagnosis.shown
    assert (first.cause.id, diagnosis.since) == ("tool_calls", None if onset == 1 else 7)
    assert "zero_logprobs" in {other.cause.id for other in others}
    assert diagnosis.health == "broken"
    zeros = next(other for other in others if other.cause.id == "zero_logprobs")
    for shares in (first.share, zeros.share):
        for share in shares:
            assert share.low <= share.value <= share.high
    assert first.share.k3.low > 0.6 > 0.3 > zeros.share.k3.high
    assert f"{zeros.cause.name} ({zeros.share.text}" in diagnosis.headline.split("; also ")[1]
    output = {cause["id"]: cause for cause in diagnosis_json(diagnosis, "run")["causes"]}
    assert output["tool_calls"]["share"]["k3"]["value"] == pytest.approx(first.share.k3.value)


def test_the_share_of_a_cause_is_what_it_adds_to_the_mismatch():
    """Against the same run without the cause."""
    for cause, strength in (
        ("tool_calls", 5.0),
        ("routing", 4.0),
        ("precision", 4.0),
        ("shifted", 0.1),
        ("staleness", 3.0),
    ):
        diagnosis = diagnose(planted_run(11, cause, strength, onset=7))
        planted, clean = (
            run.total(range(7, 13)) for run in (planted_run(11, cause, strength, onset=7), planted_run(11))
        )
        share = diagnosis.shown[0].share
        assert diagnosis.cause.id == cause
        assert share.k3.value == pytest.approx(1 - clean["k3"] / planted["k3"], abs=0.08), cause
        assert share.capped_abs.value == pytest.approx(1 - clean["capped_abs"] / planted["capped_abs"], abs=0.12), cause


def test_the_onset_is_that_of_the_named_cause():
    """The mismatch rises for another reason than that of most of it; tables are divided at the named cause's step."""
    blocks = [planted_step(2, step, "tool_calls" if step >= 5 else None, 20.0) for step in range(1, 15)]
    for block in blocks[9:]:
        gen = block.tokens["gen"]
        gen[block.tokens["mask"] & (np.arange(len(gen)) % 400 == 0)] = 0
    diagnosis = diagnose(run_of(*blocks))
    zeros = next(shown for shown in diagnosis.shown if shown.cause.id == "zero_logprobs")
    assert zeros.since == 10
    columns = diagnosis_tables(diagnosis)[0].columns
    assert columns[1:3] == (f"before {diagnosis.since}", f"from {diagnosis.since}")


def test_the_tail_alone_makes_a_run_worse_than_another():
    """k3 of a few tokens, while a typical token is the same."""
    worse = steps_of(4, prompts=12, samples=8)
    for block in worse:
        chosen = np.flatnonzero(block.tokens["mask"] & (block.tokens["gen"] < -0.5))[::250]
        block.tokens["prev"][chosen] -= np.random.default_rng(0).choice([-1.2, 1.2], len(chosen)).astype(np.float32)
    diagnosis = diagnose(run_of(*worse), planted_run(3, shape=RunShape(steps=4)))
    assert diagnosis.comparison.low < 1.5
    assert diagnosis.comparison.k3_low > 2
    assert (diagnosis.health, diagnosis.cause.id) == ("drifting", "few_tokens")


def test_a_sawtooth_is_named():
    sawtooth = steps_of(16, lambda step: 1.0 + (step - 1) % 4, samples=8)
    for block in sawtooth:
        del block.sequences["staleness"]
    diagnosis = diagnose(run_of(*sawtooth))
    assert diagnosis.evidence.period.steps == 4
    assert (diagnosis.health, diagnosis.cause.id) == ("drifting", "staleness")
    assert "repeats every 4 steps" in diagnosis.headline
    noisy = steps_of(16, lambda step: float(np.exp(0.3 * np.random.default_rng(step).standard_normal())), samples=8)
    assert diagnose(run_of(*noisy)).health == "healthy"


def test_a_mean_weight_that_is_not_1_is_named():
    shifted_up = steps_of(6, samples=8)
    for block in shifted_up:
        block.tokens["gen"] = block.tokens["gen"] - np.float32(0.14)
    diagnosis = diagnose(run_of(*shifted_up))
    assert (diagnosis.health, diagnosis.cause.id) == ("broken", "biased_weight")
    assert "the mean of exp(Δ) is 1.15 (1.15 to 1.15) where 1 is expected" in diagnosis.headline


@pytest.mark.parametrize(("steps", "since"), [(steps, since) for steps in range(2, 7) for since in range(2, steps + 1)])
def test_a_rise_within_a_few_steps_is_never_healthy(steps, since):
    diagnosis = diagnose(run_of(*steps_of(steps, lambda step: 5.0 if step >= since else 1.0, samples=8)))
    assert diagnosis.unjudged_reason.startswith("too short to judge") or diagnosis.health == "drifting"
    if diagnosis.health == "drifting" and not diagnosis.unjudged_reason:
        assert diagnosis.since == since


@pytest.mark.parametrize("steps", [5, 8, 12, 40])
def test_a_steady_growth_below_the_limits_is_not_healthy(steps):
    """k3 grows tenfold."""
    growth = steps_of(steps, lambda step: 10 ** (0.5 * (step - 1) / (steps - 1)))
    diagnosis = diagnose(run_of(*growth))
    assert all(reading.health == "healthy" for reading in diagnosis.readings.values())
    assert diagnosis.unjudged_reason.startswith("too short to judge") or diagnosis.health == "drifting"


def test_a_short_clean_run_says_that_it_is_too_short_for_a_change():
    assert "over 3 steps, too short to judge a change" in diagnose(run_of(*steps_of(3, samples=8))).sentence
    assert "too short" not in diagnose(run_of(*steps_of(8, samples=8))).sentence


def scaled(block, factor, certainty=1.0):
    """The same tokens with another size of the mismatch, and with smaller surprises."""
    gen = block.tokens["gen"] * certainty
    prev = gen + factor * (block.tokens["prev"] - block.tokens["gen"])
    return dataclasses.replace(block, tokens={**block.tokens, "gen": gen, "prev": prev})


@pytest.mark.parametrize("cause", ["tool_calls", "position", "length", "low_probability", "temperature", "precision"])
def test_a_mismatch_that_is_too_small_to_matter_needs_no_cause(cause):
    shape, strength = RunShape(steps=8, prompts=6, samples=4), PLANTED_CAUSES[cause].strengths[2]
    blocks = [planted_step(0, step, cause if step > 3 else None, strength, shape=shape) for step in range(1, 9)]
    assert diagnose(run_of(*blocks)).health != "healthy"
    diagnosis = diagnose(run_of(*(scaled(block, 1e-3) for block in blocks)))
    assert (diagnosis.health, diagnosis.unjudged_reason, diagnosis.shown) == ("healthy", "", ())


def test_a_bug_is_reported_however_small_the_mismatch_is():
    blocks = [scaled(planted_step(0, step, None, 0.0), 1e-3) for step in range(1, 5)]
    for block in blocks:
        block.tokens["gen"][: len(block.tokens["gen"]) // 10] = 0.0
    assert diagnose(run_of(*blocks)).cause.id == "zero_logprobs"


def test_steps_before_a_mismatch_that_no_longer_matters_are_not_judged():
    """Three such steps in a row; in fewer it may return."""
    shape = RunShape(prompts=6, samples=4)
    blocks = [planted_step(0, step, "tool_calls", 20.0, shape=shape) for step in range(1, 11)]
    small = [scaled(block, 1e-3) for block in blocks]
    ended = diagnose(run_of(*blocks[:7], *small[7:]))
    assert (ended.health, ended.unjudged_reason) == ("healthy", "")
    assert "over the last 3 of 10 steps" in ended.sentence
    assert diagnose(run_of(*blocks[:8], *small[8:])).health == "drifting"


def test_a_policy_that_has_hardly_any_choice_left_hides_a_mismatch():
    blocks = [scaled(planted_step(0, step, None, 0.0), 1e-4, certainty=1e-3) for step in range(1, 7)]
    assert "nearly certain of its tokens (mean surprise 0.00" in diagnose(run_of(*blocks)).sentence
    assert "nearly certain" not in diagnose(planted_run(0)).sentence
