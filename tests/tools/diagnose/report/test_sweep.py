"""The replay equals plain loops, and reports the metrics that the loss reports."""

import math

import numpy as np
import pytest
import torch
import yaml

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch, replay, select_compatible
from nemo_geomask.tools.diagnose.report.sweep_candidates import (
    CANDIDATES,
    GRID,
    RECIPE_SOURCE,
    Candidate,
    recorded_loss,
    split_loss,
)
from nemo_geomask.tools.diagnose.report.sweep_command import (
    format_loss_block,
    pareto_front,
    recommend,
)
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape

NO_CORRECTION = CANDIDATES[0]
BY_NAME = {candidate.name: candidate for candidate in (*CANDIDATES, *GRID)}


def block(step=1, cause="precision", strength=15.0, **changes):
    return planted_step(5, step, cause, strength, shape=RunShape(prompts=3, samples=4, length=40, **changes))


@pytest.fixture(scope="module")
def batch():
    return padded_batch([block()])[0]


def measures_by_loops(batch, coefficient):
    """Return the measures by a plain loop; ``coefficient`` takes a token's Δ, its sequence's ΣΔ and token count."""
    n = removed = off = mass = square = whole = c1 = c2 = ca = a1 = 0.0
    for row in range(len(batch["sample_mask"])):
        places = [t for t in range(1, batch["token_mask"].shape[1]) if batch["token_mask"][row, t]]
        deltas = [float(batch["prev_logprobs"][row, t]) - float(batch["generation_logprobs"][row, t]) for t in places]
        for delta, place in zip(deltas, places, strict=True):
            a = float(batch["advantages"][row, place])
            if a == 0:
                continue
            c = coefficient(delta, sum(deltas), len(deltas))
            n, removed, off = n + 1, removed + (c == 0), off + abs(c - math.exp(delta)) * abs(a)
            mass, square, whole = mass + math.exp(delta) * abs(a), square + (c * a) ** 2, whole + a * a
            c1, c2, ca, a1 = c1 + c, c2 + c * c, ca + c * a, a1 + a
    return {
        "removed": removed / n,
        "bias": off / mass,
        "variance": square / whole,
        "ess": c1 * c1 / (n * c2),
        "advantage": ca / c1 - a1 / n,
    }


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [
        ("nothing", lambda delta, total, count: 1.0),
        ("weight token tis [0, 2]", lambda delta, total, count: min(math.exp(delta), 2.0)),
        ("weight token icepop [0.5, 5]", lambda delta, total, count: math.exp(delta) * (0.5 <= math.exp(delta) <= 5)),
        ("weight sequence_mean", lambda delta, total, count: math.exp(total / count)),
        ("mask geometric 0.9 1.1", lambda delta, total, count: float(0.9 <= math.exp(total / count) <= 1.1)),
        ("mask product 0.5 2", lambda delta, total, count: float(0.5 <= math.exp(total) <= 2)),
        ("mask icepop 0.5 2", lambda delta, total, count: float(0.5 <= math.exp(delta) <= 2)),
    ],
)
def test_measures_equal_those_of_plain_loops(batch, name, coefficient):
    _, outcome = replay([(1, batch)], [NO_CORRECTION, BY_NAME[name]])
    for key, value in measures_by_loops(batch, coefficient).items():
        assert outcome.value(key) == pytest.approx(value, rel=1e-4, abs=1e-6), key
        low, high = outcome.interval(key)
        assert low <= high


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_the_metrics_of_a_candidate_are_those_of_its_loss(batch, candidate):
    (outcome,) = replay([(3, batch)], [candidate])
    loss = build_loss({**candidate.settings, "reference_policy_kl_penalty": 0})
    decision = PrestepPass(loss.config)(batch)
    data = {**batch, **decision.changes}
    expected = dict(decision.metrics)
    if decision.train:
        expected |= loss(batch["prev_logprobs"][:, 1:], data, *valid_counts([data]))[1].copy()
    assert outcome.metrics[3] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_every_candidate_of_the_grid_is_a_loss():
    assert len({candidate.name for candidate in (*CANDIDATES, *GRID)}) == len(CANDIDATES) + len(GRID)
    for candidate in GRID:
        build_loss(candidate.settings)


def test_a_batch_that_a_veto_skips_is_named(batch):
    veto = Candidate("veto", {"batch_veto": {"estimator": "k3", "max": 1e-6, "max_in_a_row": 10}}, "test")
    _, outcome = replay([(4, batch), (9, batch)], [NO_CORRECTION, veto])
    assert outcome.skipped == [4, 9]
    assert math.isnan(outcome.value("bias"))


def test_values_at_masked_positions_have_no_effect(batch):
    expected = replay([(1, batch)], [NO_CORRECTION, BY_NAME["mask geometric 0.99 1.01"]])[1].sums
    for value in (math.nan, math.inf, 1e6):
        changed = dict(batch)
        for key in ("prev_logprobs", "generation_logprobs", "advantages"):
            changed[key] = torch.where(batch["token_mask"] != 0, batch[key], value)
        outcome = replay([(1, changed)], [NO_CORRECTION, BY_NAME["mask geometric 0.99 1.01"]])[1].sums
        assert outcome.tobytes() == expected.tobytes()


def test_blocks_of_a_step_are_one_batch_and_sequences_without_room_are_counted():
    whole, left = padded_batch([block(), block()])
    assert (len(whole["sample_mask"]), left) == (24, 0)
    width = whole["token_mask"].shape[1]
    assert padded_batch([block()], max_positions=5 * width)[1] > 0
    assert whole["token_mask"].sum() == 2 * block().tokens["mask"].sum()


def test_records_without_log_probs_are_refused():
    made = block()
    made.tokens.pop("prev")
    with pytest.raises(DataError, match="have no prev"):
        padded_batch([made])
    with pytest.raises(DataError, match="have no curr"):
        replay([(1, padded_batch([block()])[0])], [NO_CORRECTION], at="curr")
    with pytest.raises(DataError, match="hold no sequence"):
        padded_batch([])


def test_a_replay_at_curr_uses_the_current_log_probs():
    made = block()
    made.tokens["curr"] = made.tokens["prev"] + np.float32(0.05)
    batch, _ = padded_batch([made])
    (outcome,) = replay([(1, batch)], [NO_CORRECTION], at="curr")
    assert outcome.metrics[1]["probs_ratio"] == pytest.approx(math.exp(0.05), rel=1e-5)


def test_the_recommended_candidate_has_less_bias_at_an_allowed_variance(batch):
    outcomes = replay([(1, batch)])
    best, text = recommend(outcomes)
    assert best.interval("variance")[1] <= 2.0  # too few share a reply, so the pull is not testable
    assert best.value("bias") < outcomes[0].value("bias")
    settings = dict(line.strip().split(": ") for line in text.splitlines() if line.startswith("  "))
    assert settings["use_importance_sampling_correction"] == "true"
    assert "without correction" in text
    assert best in pareto_front(outcomes)


def test_a_candidate_that_skips_steps_is_not_recommended(batch):
    """Its measures are of the remaining steps, so they do not show the cost of skipping."""
    made = block()
    made.tokens["prev"][:] = made.tokens["gen"]
    veto = Candidate("veto", {**BY_NAME["weight token"].settings, "batch_veto": {"estimator": "k3", "max": 1e-3}}, "x")
    outcomes = replay([(1, padded_batch([made])[0]), (2, batch)], [NO_CORRECTION, veto])
    assert outcomes[1].skipped == [2]
    assert recommend(outcomes)[0].candidate is NO_CORRECTION


@pytest.mark.parametrize("rounding", [0.0, 1e-5])
def test_no_correction_is_recommended_where_engines_are_equal(rounding):
    made = block()
    noise = np.random.default_rng(3).normal(size=made.tokens["gen"].shape).astype(np.float32)
    made.tokens["prev"][:] = made.tokens["gen"] + rounding * noise
    best, text = recommend(replay([(1, padded_batch([made])[0])]))
    assert best.candidate is NO_CORRECTION
    assert text.endswith("loss_fn: {}")


def test_a_recipe_is_split_into_a_base_and_a_candidate():
    settings = {
        "name": "gspo",
        "ratio_clip_min": 0.1,
        "masks": [{"preset": "icepop", "min": 0.5, "max": 2.0}],
        "denominator": "kept",
        "record": {"dir": "x"},
    }
    base, own = split_loss(settings, RECIPE_SOURCE)
    assert base == {"name": "gspo", "ratio_clip_min": 0.1, "record": {"dir": "x"}}
    assert set(own.settings) == {"masks", "denominator"}
    assert split_loss({"name": "gspo"}, RECIPE_SOURCE) == ({"name": "gspo"}, None)
    LossConfig(**{**base, **own.settings})
    with pytest.raises(ConfigError):
        replay([], [NO_CORRECTION], {"no_such": 1})


TOKEN_WEIGHT = {"use_importance_sampling_correction": True, "is_correction_level": "token"}


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "gspo", "ratio_clip_min": 0.1},
        {"name": "clipped_pg", **TOKEN_WEIGHT, "masks": [{"preset": "icepop", "min": 0.5, "max": 5.0}]},
        {"name": "dppo", "options": {"delta": 0.2}, "masks": [{"preset": "veto", "min": 0.0001, "max": 100.0}]},
    ],
)
def test_the_recorded_loss_is_the_one_in_force(settings):
    """Without what it sets by default, and without the masks of the objective itself."""
    config = build_loss({**settings, "record": {"dir": "x"}}).config
    recorded = recorded_loss({"settings": config.model_dump(mode="json")})
    assert set(recorded) == set(settings)
    assert build_loss({**recorded, "record": {"dir": "x"}}).config == config


@pytest.mark.parametrize("name", ["os:system", "no_such", 5, None])
def test_a_record_starts_no_code_of_others(name):
    with pytest.raises(ConfigError, match="give --recipe"):
        recorded_loss({"settings": {"name": name}})


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ({}, "mask icepop 0.5 5", {"name": "clipped_pg"}),
        ({"name": "gspo", "record": {"dir": "x"}}, "weight token", {"name": "gspo", "record": {"dir": "x"}}),
        (
            {"name": "clipped_pg", "ratio_anchor": "gen", "audit_fraction": 0.1},
            "nothing",
            {"name": "clipped_pg", "ratio_anchor": "gen", "audit_fraction": 0.1},
        ),
        # The mask needs π_old of all sequences, so audit_fraction is left out.
        (
            {"name": "clipped_pg", "ratio_anchor": "gen", "audit_fraction": 0.1},
            "mask veto 0.0001 100",
            {"name": "clipped_pg", "ratio_anchor": "gen"},
        ),
    ],
)
def test_the_recommended_block_is_a_complete_loss_fn(batch, base, name, expected):
    outcomes = replay([(1, batch)], [NO_CORRECTION, BY_NAME[name]], base)
    block = yaml.safe_load(format_loss_block(outcomes[1], outcomes, base))["loss_fn"]
    build_loss(block)
    assert {key: value for key, value in block.items() if key not in BY_NAME[name].settings} == expected


@pytest.mark.parametrize(
    "base",
    [
        {"name": "clipped_pg", "ratio_anchor": "gen"},
        {"name": "clipped_pg", "force_on_policy_ratio": True},
        {"name": "dppo"},
        {"name": "ipo"},
        {"name": "vespo"},
    ],
    ids=str,
)
def test_candidates_that_contradict_the_base_are_left_out(base):
    compatible, errors = select_compatible(CANDIDATES, base)
    assert compatible[0] is NO_CORRECTION
    assert errors
    assert len(compatible) + len(errors) == len(CANDIDATES)
    for candidate in compatible:
        build_loss({**base, **candidate.settings})


def test_an_invalid_base_is_an_error():
    with pytest.raises(ConfigError, match="no_such"):
        select_compatible(CANDIDATES, {"no_such": 1})
    _, own = split_loss({"masks": [{"preset": "no_such"}]}, RECIPE_SOURCE)
    with pytest.raises(ConfigError, match="no_such"):
        select_compatible([NO_CORRECTION, own], {})


def test_a_ratio_against_the_generation_engine_corrects(batch):
    """Its gradient is A exp(Δ): that of an importance weight."""
    wide = {"ratio_clip_min": 0.999, "ratio_clip_max": 1e6}
    (anchored,) = replay([(1, batch)], [NO_CORRECTION], {"name": "clipped_pg", "ratio_anchor": "gen", **wide})
    _, weighted = replay([(1, batch)], [NO_CORRECTION, BY_NAME["weight token"]], {"name": "clipped_pg", **wide})
    for key in ("bias", "variance", "ess"):
        assert anchored.value(key) == pytest.approx(weighted.value(key), rel=1e-4, abs=1e-6), key


def test_tokens_with_an_advantage_of_zero_are_counted_apart(batch):
    """They have no gradient, so no measure is over them."""
    silent = {**batch, "advantages": batch["advantages"].clone()}
    silent["advantages"][:4] = 0.0
    trained = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:] != 0
    (outcome,) = replay([(1, silent)], [NO_CORRECTION])
    assert outcome.silent_tokens == trained[:4].sum() > 0
    assert outcome.tokens == trained[4:].sum()
