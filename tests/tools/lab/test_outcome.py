"""The measures of a comparison, on curves that are made up."""

from __future__ import annotations

import math

import pytest

from nemo_geomask.tools.lab.outcome import (
    best_reward,
    final_reward,
    has_collapsed,
    has_died,
    summarize_variants,
)
from nemo_geomask.tools.lab.run_store import RunCurves

RISES = [0.1] * 10 + [0.1 + 0.01 * step for step in range(40)]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (RISES, False),
        ([*RISES, *[0.2] * 10], True),  # 0.345 gained, 0.245 of it lost
        ([*RISES, *[0.2] * 10, *[0.4] * 10], False),  # and got back
        ([*RISES, *[0.4] * 10], False),
        ([0.1] * 60, False),  # never learned
        ([0.1] * 10 + [0.14] * 10 + [0.1] * 10, False),  # a gain of 0.04 is none
        ([0.1] * 10 + [0.16] * 10 + [0.1] * 10, True),
        ([0.1] * 10 + [0.9] * 5 + [0.1] * 4, False),  # too short to say
        ([0.1] * 10 + [0.5] * 10 + [0.3] * 10, True),  # exactly half
    ],
)
def test_a_collapse_is_half_of_the_gain_lost_and_not_got_back(rewards, expected):
    assert has_collapsed(rewards) is expected


def test_a_final_reward_is_the_mean_of_ten_steps():
    assert final_reward([0.0] * 5 + [0.5] * 10) == 0.5


@pytest.mark.parametrize(
    ("rewards", "norms", "entropies", "expected"),
    [
        ([0.3] * 40, [2.0] * 40, [1.0] * 40, False),
        ([0.3] * 40, [2.0] * 30 + [0.0019] * 10, [1.0] * 40, True),
        ([0.3] * 40, [2.0] * 30 + [0.0021] * 10, [1.0] * 40, False),
        ([0.3] * 40, [2.0] * 30 + [0.0] * 9 + [0.03], [1.0] * 40, False),  # the mean of ten steps decides
        ([0.3] * 40, [2.0] * 10 + [0.0] * 20 + [2.0] * 10, [1.0] * 40, False),  # it came back to life
        ([0.3] * 40, [2.0] * 40, [1.0] * 30 + [0.009] * 10, True),
        ([0.3] * 40, [2.0] * 40, [1.0] * 30 + [0.011] * 10, False),
        ([0.3] * 30 + [0.5] * 10, [2.0] * 30 + [0.0] * 10, [0.0] * 40, False),  # done, not dead
        ([0.3] * 19, [2.0] * 10 + [0.0] * 9, [0.0] * 19, False),  # too short to say
        ([0.3] * 40, [math.nan] * 40, [math.nan] * 40, False),  # unknown
    ],
)
def test_a_run_died_if_it_can_learn_no_more_and_its_reward_is_low(rewards, norms, entropies, expected):
    columns = {"step": range(len(rewards)), "reward": rewards, "grad_norm": norms, "approx_entropy": entropies}
    assert has_died(RunCurves({}, columns)) is expected


def test_the_best_reward_is_of_ten_steps_in_a_row():
    assert best_reward([0.0] * 5 + [1.0] * 10 + [0.2] * 5) == 1.0
    assert best_reward([1.0] * 5 + [0.0] * 10) == 0.5
    assert best_reward([0.2, 0.4]) == pytest.approx(0.3)


def curve(label, seed, reward, *, finished=True, **columns):
    facts = {"label": label, "seed": seed, "variant": label, "finished": finished, "corrected": True}
    steps = len(reward)
    columns = {"step": list(range(1, steps + 1)), "reward": reward, "step_seconds": [2.0] * steps, **columns}
    return RunCurves(facts, columns)


def test_seeds_pair_and_what_is_not_finished_is_left_out():
    curves = [
        curve("a", 1, [0.2] * 20, **{"validation/reward": [math.nan] * 9 + [0.1] * 10 + [math.nan]}),
        curve("a", 2, [0.4] * 20, **{"validation/reward": [0.3] * 20}),
        curve("a", 3, [0.9] * 20),
        curve("b", 1, [0.3] * 20),
        curve("b", 2, [0.6] * 20),
        curve("b", 4, [0.0] * 20),
        curve("b", 3, [0.0] * 5, finished=False),
    ]
    a, b = (outcome.row for outcome in summarize_variants(curves))
    assert (a["seeds"], b["seeds"], b["unfinished"]) == ([1, 2, 3], [1, 2, 4], [3])
    assert (a["reward_last"], b["reward_last"]) == (pytest.approx(0.5), pytest.approx(0.3))
    assert b["difference"] == pytest.approx(0.15)  # Of seeds 1 and 2, which both have.
    assert b["interval"] == pytest.approx((0.15 - 12.706204736432095 * 0.05, 0.15 + 12.706204736432095 * 0.05))
    assert a["difference"] is None
    assert a["validation"] == pytest.approx(0.2)
    assert b["seconds"] == 40
    assert b["mismatch_abs"] is None
