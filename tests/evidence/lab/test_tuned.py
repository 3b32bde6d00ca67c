"""The comparison with tuned baselines: choice on search seeds, differences, tests, and the data file."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from statistics import fmean

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.run_store import RunCurves
from tests.evidence.lab.choice import Cell, TunedRun, choose, choose_bounds, choose_rates
from tests.evidence.lab.comparison import compare_tuned_runs, differences
from tests.evidence.lab.regimes import Regime, TunedVariant, read_regimes
from tests.evidence.lab.stages import (
    check_settings,
    draw_regimes,
    load_tuned_runs,
    plan_stage,
    tuned_page,
    with_missing_steps,
    write_tuned_runs,
)
from tests.evidence.lab.tables import comparison_tables, sensitivity_table

ROOT = Path(__file__).parents[3]
RATES, SEARCH, CONFIRM, PRIMARY = (1e-3, 2e-3), (1, 2), tuple(range(301, 311)), tuple(range(301, 317))


def regime(published="0", bounds="0", names=("none", "KL term", "OPSM")):
    variants = {
        name: TunedVariant(name, f"clipped_pg:{name}", {bound: [] for bound in bounds}, published, name == "OPSM")
        for name in names
    }
    return Regime("example", "An example", "recipe.yaml", [], variants, RATES, 2e-3, SEARCH, CONFIRM, PRIMARY)


def run(variant, bound, rate, seed, reward, *, steps=20, norm=1.0):
    columns = {
        "step": list(range(1, steps + 1)),
        "reward": [reward] * steps,
        "validation/reward": [math.nan] * (steps - 1) + [reward / 2],
        "approx_entropy": [1.0] * steps,
        "grad_norm": [1.0] * 10 + [norm] * (steps - 10),
    }
    facts = {
        "label": variant,
        "seed": seed,
        "finished": True,
        "machine": f"machine of {seed}",
        "versions": {"torch": "2"},
        "chance": 0.25,
    }
    return TunedRun(Cell(variant, bound, rate), RunCurves(facts, columns))


def test_the_bound_is_chosen_at_the_search_rate_and_then_the_learning_rate_at_that_bound():
    runs = [
        run("a", bound, 2e-3, seed, reward)
        for bound, reward in zip("012", (0.2, 0.5, 0.3), strict=True)
        for seed in SEARCH
    ]
    runs += [run("a", "1", 1e-3, seed, 0.6) for seed in SEARCH]
    runs += [run("a", "2", 1e-3, seed, 0.9) for seed in SEARCH]  # never looked at: another bound
    plan = regime(bounds="012", names="a")
    bounds = choose_bounds(runs, plan)
    assert bounds == {"a": "1"}
    assert choose_rates(runs, plan, bounds) == {"a": 1e-3}


def test_a_tie_goes_to_the_published_bound_and_to_the_lower_rate():
    runs = [run("a", bound, rate, seed, 0.4) for bound in "012" for rate in RATES for seed in SEARCH]
    plan = regime(published="2", bounds="012", names="a")
    assert choose_bounds(runs, plan) == {"a": "2"}
    runs += [run("mask", bound, rate, seed, 0.5) for bound in "012" for rate in RATES for seed in SEARCH]
    variants = {**plan.variants, "mask": TunedVariant("mask", "clipped_pg:mask", plan.variants["a"].bounds, "2", True)}
    choice = choose(runs, dataclasses.replace(plan, variants=variants))
    assert choice.bound_rewards == {"a": dict.fromkeys("012", 0.4), "mask": dict.fromkeys("012", 0.5)}
    assert choose_rates(runs, plan, {"a": "2"}) == {"a": 1e-3}


def test_differences_are_paired_and_corrected_for_their_number():
    base = {seed: 0.01 * seed for seed in CONFIRM}
    better = {seed: value + 0.1 + 0.001 * (seed % 3) for seed, value in base.items()}
    mixed = {seed: value + (0.1 if seed % 2 else -0.1) for seed, value in base.items()}
    ((gain, none),) = differences({"tuned": {"none": base, "better": better, "mixed": mixed}}, "none").values()
    values = [better[seed] - base[seed] for seed in CONFIRM]
    extreme = sum(
        abs(fmean(s * v for s, v in zip(signs, values, strict=True))) >= fmean(values) - 1e-12
        for signs in itertools.product((1, -1), repeat=10)
    )
    assert gain.p == extreme / 1024 == 2 / 1024
    assert gain.adjusted_p == 2 * gain.p
    assert gain.verdict == "gain"
    assert none.verdict == "not detected"
    assert none.adjusted_p == 1.0
    ((loss, _),) = differences({"tuned": {"none": better, "worse": base, "mixed": mixed}}, "none").values()
    assert loss.verdict == "loss"


def test_a_gain_needs_nine_of_ten_seeds():
    base = dict.fromkeys(CONFIRM, 0.0)
    eight = {seed: -0.001 if seed < 303 else 0.5 for seed in CONFIRM}
    nine = {seed: -0.001 if seed < 302 else 0.5 for seed in CONFIRM}
    ((of_eight, of_nine),) = differences({"tuned": {"none": base, "eight": eight, "nine": nine}}, "none").values()
    assert of_eight.adjusted_p < 0.05
    assert of_eight.verdict == "not detected"
    assert of_nine.verdict == "gain"


def confirmed_runs():
    """Runs in which the mask of the search is no better than the best alternative, the KL term."""
    rewards = {
        ("none", 1e-3): 0.4,
        ("none", 2e-3): 0.1,
        ("KL term", 1e-3): 0.2,
        ("KL term", 2e-3): 0.45,
        ("OPSM", 1e-3): 0.4,
        ("OPSM", 2e-3): 0.35,
    }
    runs = [run(name, "0", rate, seed, reward) for (name, rate), reward in rewards.items() for seed in SEARCH]
    # On the confirmation seeds the other learning rate of OPSM would have been better.
    confirmed = {**rewards, ("OPSM", 2e-3): 0.45}
    return runs + [
        run(name, "0", rate, seed, reward + seed * 1e-4, norm=0.0 if name == "none" and rate == 2e-3 else 1.0)
        for (name, rate), reward in confirmed.items()
        for seed in PRIMARY
        # Seeds of the primary comparison alone have its two cells alone.
        if seed in CONFIRM or (name, rate) in (("KL term", 2e-3), ("OPSM", 1e-3))
    ]


def row(table, name):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_search_chooses_both_sides_of_the_primary_comparison():
    choice = choose(confirmed_runs(), regime())
    assert (choice.correction, choice.alternative) == ("OPSM", "KL term")
    assert choice.rates == {"none": 1e-3, "KL term": 2e-3, "OPSM": 1e-3}
    assert choice.worst_rates == {"none": 2e-3, "KL term": 1e-3, "OPSM": 2e-3}
    assert len(choice.confirmation) == len(set(choice.confirmation)) == 3 * 2 * 10 + 2 * 6
    assert (Cell("OPSM", "0", 1e-3), 316) in choice.confirmation
    assert (Cell("OPSM", "0", 2e-3), 316) not in choice.confirmation


def test_the_tables_use_search_seeds_for_the_choice_alone():
    text = comparison_tables(compare_tuned_runs(confirmed_runs(), regime()))
    primary, _, course, _, rewards, _, bounds, _, others, _, tuned, _, over_rates, _, against = text.split("\n\n")
    assert primary == (
        "**OPSM minus KL term**, both tuned, over 16 seeds: -0.050 (-0.050 to -0.050); higher on 0 of 16; "
        "p 3.05e-05: loss."
    )
    # Twenty steps of one reward each; validation is half of the reward.
    assert course.splitlines()[0] == "| step 20 | all steps | validation |"
    assert [cell.split(" ")[0] for cell in course.splitlines()[2].split(" | ")] == ["|", "-0.050", "-0.025"]
    # A reward is its search value plus the seed's 0.0301 to 0.0310; in brackets the lowest seed's.
    assert row(rewards, "none") == ["alternative", "0", "0.431 (0.430)", "0.131 (0.130)", "0.001", "0.002"]
    assert row(rewards, "OPSM") == ["correction", "0", "0.431 (0.430)", "0.481 (0.480)", "0.001", "0.002"]
    assert bounds.splitlines()[2:] == []  # one bound each
    # At its chosen rate no run died, at the other one all; validation is half of the reward.
    assert row(others, "none") == ["0.431", "0.431", "0.215", "1.000", "1.00", "0 of 10", "10 of 20", "0 of 20"]
    (best,) = row(tuned, "OPSM")
    assert best.startswith("+0.000")
    assert best.endswith(": not detected")
    mean, worst = row(over_rates, "OPSM")
    assert mean.startswith("+0.175")
    # The worst rate of OPSM is that of the search, although the other one is worse here.
    assert worst.startswith("+0.350")
    assert mean.endswith(": gain")
    assert worst.endswith(": gain")
    assert [cell.split(" ")[0] for cell in row(against, "OPSM")] == ["+0.100", "+0.250"]


def test_incomplete_data_are_an_error():
    names = ("none", "KL term", "OPSM")
    runs = [run(name, "0", rate, seed, 0.3) for name in names for rate in RATES for seed in SEARCH]
    with pytest.raises(ConfigError, match="72 runs of the confirmation are missing"):
        compare_tuned_runs(runs, regime())
    with pytest.raises(ConfigError, match=r"the run of 'none bound=0 lr=0\.002'"):
        compare_tuned_runs([], regime())


@pytest.mark.parametrize(
    ("machine", "message"),
    [("another", "the runs of seed 310 come from several machines"), (None, "on seed 310 does not")],
)
def test_runs_of_a_seed_from_two_machines_or_none_can_not_be_paired(machine, message):
    runs = confirmed_runs()
    runs[-1].curves.facts["machine"] = machine
    with pytest.raises(ConfigError, match=message):
        compare_tuned_runs(runs, regime())


def test_the_data_file_keeps_curves_and_each_runs_machine(tmp_path):
    runs = [run("mask", "1", 2e-3, seed, 0.25) for seed in (302, 301)]
    write_tuned_runs(runs, tmp_path / "regime.parquet")
    loaded = load_tuned_runs(tmp_path / "regime.parquet")
    assert [entry.seed for entry in loaded] == [301, 302]
    assert [entry.curves.facts["machine"] for entry in loaded] == ["machine of 301", "machine of 302"]
    assert loaded[0].cell == Cell("mask", "1", 2e-3)
    assert loaded[0].curves.series("reward") == [0.25] * 20
    assert loaded[0].curves.series("validation/reward")[-1] == 0.125
    assert load_tuned_runs(tmp_path / "absent.parquet") == []


@pytest.mark.long
@pytest.mark.slow
def test_the_protocols_regimes_can_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    regimes = read_regimes(ROOT / "docs" / "evidence" / "tuned.toml")
    stale = regimes.pop("stale")
    planned = {
        name: plan_stage(regime, "bound", [], tmp_path, seeds=regime.search_seeds[:1])
        for name, regime in regimes.items()
    }
    assert {name: len(cells) for name, cells in planned.items()} == {
        "step_size": 20,
        "lag_8": 7,
        "mismatch_int4": 15,
        **dict.fromkeys((name for name in regimes if name.startswith("mismatch_") and name != "mismatch_int4"), 2),
    }
    engines = {name: next(iter(cells.values()))[0].recipe for name, cells in planned.items()}
    quantized = {name: recipe.policy.generation.quantization for name, recipe in engines.items()}
    assert quantized["mismatch_equal"] is quantized["mismatch_temperature"] is None
    assert quantized["mismatch_int4"] == quantized["mismatch_no_luck"] != quantized["mismatch_float8"]
    # In the stale regime, corrections run at the clip that was chosen without one.
    assert {cell.variant for cell in plan_stage(stale, "baseline", [], tmp_path)} == {"none"}
    with pytest.raises(ConfigError, match="the run of 'none bound=0.1 and 0.14 lr=0.002' is missing"):
        plan_stage(stale, "bound", [], tmp_path, seeds=[1])
    clips = dict(zip(stale.variants["none"].bounds, (0.3, 0.2, 0.1), strict=True))
    tried = [run("none", bound, 2e-3, seed, reward) for bound, reward in clips.items() for seed in range(1, 6)]
    for cell, (plan, *_) in plan_stage(stale, "bound", tried, tmp_path, seeds=[1]).items():
        assert (plan.recipe.loss_fn["ratio_clip_max"] == 0.14) == (cell.bound not in ("0.2 and 0.28", "0.4 and 0.56"))
    step_size = regimes["step_size"]
    planned = plan_stage(step_size, "bound", [], tmp_path, seeds=[2])
    settings = {(cell.variant, cell.bound): runs[0].recipe for cell, runs in planned.items()}
    assert settings["OPSM", "1.5"].loss_fn["masks"] == [{"preset": "opsm", "delta": 1.5}]
    assert settings["PPO's clip", "0.1 and 0.14"].loss_fn["ratio_clip_max"] == 0.14
    assert not settings["PPO's clip", "0.1 and 0.14"].loss_fn["disable_ppo_ratio"]
    assert {recipe.grpo.seed for recipe in settings.values()} == {2}
    assert {recipe.policy.lr for recipe in settings.values()} == {2e-3}
    search = [
        run(name, bound, 2e-3, seed, 0.1 * index)
        for name, variant in step_size.variants.items()
        for index, bound in enumerate(variant.bounds)
        for seed in range(1, 6)
    ]
    by_rate = plan_stage(step_size, "rate", search, tmp_path, seeds=[1])
    assert {(cell.variant, cell.bound) for cell in by_rate} == {
        (name, list(variant.bounds)[-1]) for name, variant in step_size.variants.items()
    }
    assert len(by_rate) == 28
    with pytest.raises(ConfigError, match="is missing on seeds"):
        plan_stage(step_size, "confirm", search, tmp_path)
    with pytest.raises(ConfigError, match=r"\[301\] are not seeds of the stage 'rate'"):
        plan_stage(step_size, "rate", search, tmp_path, seeds=[301])
    # A stored run that was trained with other settings is named with them.
    cell, (plan, *_) = next(iter(planned.items()))
    stored = run(cell.variant, cell.bound, cell.learning_rate, 2, 0.3)
    stored.curves.facts["settings"] = plan.settings
    check_settings([stored], planned)
    stored.curves.facts["settings"] = {**plan.settings, "env": {**plan.settings["env"], "modulus": 5}}
    with pytest.raises(ConfigError, match=r"on seed 2 has other settings than the plan: env\.modulus: 5 instead of 7"):
        check_settings([stored], planned)


def test_a_variant_that_both_stages_run_has_the_same_bounds_in_both():
    for plan in read_regimes(ROOT / "docs" / "evidence" / "tuned.toml").values():
        for name in plan.sensitivity.keys() & plan.variants.keys():
            assert plan.variants[name].bounds.items() <= plan.sensitivity[name].bounds.items()


def test_the_table_of_bounds_has_what_was_run():
    bounds = {bound: [] for bound in ("0", "1", "2")}
    weight = TunedVariant("a weight", "x:token", {"0": []}, "0", True)
    absent = TunedVariant("absent", "x:none+veto", {"0": []}, "0", True)
    variants = {"OPSM": TunedVariant("OPSM", "x:none+opsm", bounds, "0", True), "a weight": weight, "absent": absent}
    plan = dataclasses.replace(regime(), sensitivity=variants)
    runs = [run("OPSM", "0", 2e-3, seed, 0.1 * seed) for seed in SEARCH] + [run("OPSM", "1", 2e-3, 1, 0.7)]
    assert sensitivity_table(runs, plan).startswith("Not enough data")
    assert sensitivity_table([], plan).startswith("Not enough data")
    runs += [run("none", "0", 2e-3, seed, 0.3 + 0.1 * seed) for seed in SEARCH]
    runs += [run("OPSM", "2", 1e-3, 1, 0.9), run("OPSM", "2", 2e-3, 301, 0.9)]  # another rate, another seed
    runs += [run("a weight", "0", 2e-3, seed, 0.5) for seed in SEARCH]
    text = sensitivity_table(runs, plan)
    assert text.startswith("Without a correction: 0.450.\n")
    assert "| `opsm` | 0 | 0: 0.150 |" in text  # a bound that was run on one of two seeds is left out
    assert "| `is_correction_level: token` | 0 | 0: 0.500 |" in text
    assert "veto" not in text


def test_a_run_that_failed_is_named_and_its_missing_steps_are_in_no_other_measure():
    runs = confirmed_runs()
    (failed,) = (entry for entry in runs if entry.cell == Cell("OPSM", "0", 1e-3) and entry.seed == 303)
    columns = {name: failed.curves.series(name)[:15] for name in ("reward", "validation/reward", "grad_norm")}
    columns |= {"step": list(range(1, 16)), "approx_entropy": [9.0] * 15}
    curves = with_missing_steps(RunCurves({**failed.curves.facts, "error": "no memory"}, columns), 20)
    runs[runs.index(failed)] = TunedRun(failed.cell, curves)
    comparison = compare_tuned_runs(runs, regime())
    assert comparison.primary.by_seed[303] == pytest.approx((0.4 + 0.0303) / 2 - (0.45 + 0.0303))
    text = comparison_tables(comparison)
    assert "Runs that raised an error, with a reward of 0 in their missing steps: OPSM at 0.001 on seed 303." in text
    assert row(text.partition("Other measures")[2].partition("Question 1")[0], "OPSM")[3] == "1.000"


def test_learning_rates_below_the_grid_are_reported_and_choose_nothing():
    plan = dataclasses.replace(regime(), below_grid=[5e-4])
    below = [Cell("none", "0", 5e-4), Cell("OPSM", "0", 5e-4)]  # the KL term's best rate is not the lowest
    choice = choose(confirmed_runs(), plan)
    assert choice.below_grid == below
    assert "Below the grid" not in comparison_tables(compare_tuned_runs(confirmed_runs(), plan))
    added = [run(cell.variant, "0", 5e-4, seed, 0.9) for cell in below for seed in SEARCH]
    comparison = compare_tuned_runs([*confirmed_runs(), *added[:-1]], plan)
    assert comparison.choice == choice
    assert (
        "Below the grid, on the search seeds: none 0.900 at 0.0005. There, at the lowest rate of the grid: none 0.400, "
        "OPSM 0.400. This changes no choice."
    ) in comparison_tables(comparison)


def test_the_page_gets_tables_and_a_figure_or_says_that_data_are_missing(tmp_path):
    (tmp_path / "tuned").mkdir()
    data = tmp_path / "tuned" / "example.parquet"
    regimes = {"example": regime()}
    assert "Not enough data: the run of 'none bound=0 lr=0.002' is missing" in tuned_page(tmp_path, regimes)
    draw_regimes(tmp_path, regimes)
    assert not data.with_suffix(".png").exists()
    write_tuned_runs(confirmed_runs(), data)
    text = tuned_page(tmp_path, regimes)
    assert "## An example\n\n![Rewards by learning rate, and differences](tuned/example.png)" in text
    assert "| OPSM | correction | 0 | 0.431 (0.430) |" in text
    draw_regimes(tmp_path, regimes)
    assert data.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
