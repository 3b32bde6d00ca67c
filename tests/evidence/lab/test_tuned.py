"""The comparison with tuned baselines: choice on search seeds, differences, tests, and the data file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.outcome import has_collapsed, has_died
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.shared.intervals import mean_interval
from tests.evidence.lab.choice import Cell, TunedRun, choose, choose_bounds, choose_rates
from tests.evidence.lab.columns import EVIDENCE_SPECS, figure_look, figure_name
from tests.evidence.lab.comparison import compare_tuned_runs, differences
from tests.evidence.lab.regimes import Regime, TunedVariant, read_regimes
from tests.evidence.lab.stages import (
    check_settings,
    check_stored_runs,
    load_tuned_runs,
    plan_stage,
    rewrite_bound_tables,
    rewrite_tables,
    with_missing_steps,
    write_tuned_runs,
)
from tests.evidence.lab.tables import comparison_tables, sensitivity_table
from tests.evidence.lab.untuned import load_runs

ROOT = Path(__file__).parents[3]
RATES, SEARCH, CONFIRM, PRIMARY = (1e-3, 2e-3), (1, 2), tuple(range(301, 311)), tuple(range(301, 317))


def regime(published="0", bounds="0", names=("none", "KL term", "OPSM")):
    variants = {
        name: TunedVariant(name, f"clipped_pg:{name}", {bound: [] for bound in bounds}, published, name == "OPSM")
        for name in names
    }
    return Regime("example", "recipe.yaml", [], variants, RATES, 2e-3, SEARCH, CONFIRM, PRIMARY)


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


def test_a_missing_run_is_named():
    runs = [run("a", "0", 2e-3, 1, 0.4)]
    with pytest.raises(ConfigError, match=r"'a bound=0 lr=0\.002' is missing on seeds \[2\]"):
        choose_bounds(runs, regime(names="a"))


def test_a_published_bound_that_is_not_tried_is_an_error():
    with pytest.raises(ConfigError, match=r"'a' has no bound '3'; its bounds are \['0'\]"):
        regime(published="3", names="a")


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


def test_runs_of_a_seed_from_two_machines_can_not_be_paired():
    runs = confirmed_runs()
    runs[-1].curves.facts["machine"] = "another"
    with pytest.raises(ConfigError, match="the runs of seed 310 come from several machines"):
        compare_tuned_runs(runs, regime())


def test_the_page_gets_tables_and_a_figure_or_says_that_data_are_missing(tmp_path):
    (tmp_path / "background").mkdir()
    (tmp_path / "evidence" / "tuned").mkdir(parents=True)
    page = tmp_path / "background" / "evidence.md"
    page.write_text("<!-- tuned_example: begin -->\n<!-- tuned_example: end -->\n", encoding="utf-8")
    data = tmp_path / "evidence" / "tuned" / "example.parquet"
    regimes = {"example": regime(), "without_marks": regime()}
    assert "Not enough data: the run of 'none bound=0 lr=0.002' is missing" in rewrite_tables(tmp_path, regimes)
    assert not data.with_suffix(".png").exists()
    write_tuned_runs(confirmed_runs(), data)
    text = rewrite_tables(tmp_path, regimes)
    assert "**OPSM minus KL term**" in text
    assert "| OPSM | correction | 0 | 0.431 (0.430) |" in text
    assert data.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
    planned = {name: plan_stage(regime, "bound", [], tmp_path, seeds=[1]) for name, regime in regimes.items()}
    assert {name: len(cells) for name, cells in planned.items()} == {
        "step_size": 20,
        "lag_8": 7,
    }
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


def test_the_missing_steps_of_a_run_that_failed_have_no_reward():
    curves = with_missing_steps(run("none", "0", 1e-3, 1, 0.5, steps=15).curves, 20)
    assert curves.finished
    assert curves.series("reward") == [0.5] * 15 + [0.0] * 5
    assert curves.series("step") == list(range(1, 21))


def test_every_variant_that_a_figure_shows_has_its_colour():
    regimes = read_regimes(ROOT / "docs" / "evidence" / "tuned.toml")
    rows = [row for spec in EVIDENCE_SPECS.values() for row in spec.plotted_rows]
    rows += [name for plan in regimes.values() for name in plan.variants]
    looks = {figure_name(row): figure_look(figure_name(row)) for row in rows}
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    assert figure_name("`clipped_pg:none`") == figure_name("none") == "uncorrected"


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


def test_a_run_without_its_machine_can_not_be_paired():
    runs = confirmed_runs()
    del runs[-1].curves.facts["machine"]
    with pytest.raises(ConfigError, match="on seed 310 does not say where it was trained"):
        compare_tuned_runs(runs, regime())


@pytest.mark.long
@pytest.mark.slow
def test_the_stored_runs_have_the_settings_of_the_plan(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, plan in read_regimes(ROOT / "docs" / "evidence" / "tuned.toml").items():
        check_stored_runs(plan, load_tuned_runs(ROOT / "docs" / "evidence" / "tuned" / f"{name}.parquet"))


def test_the_published_tables_are_the_datas(tmp_path):
    shutil.copytree(ROOT / "docs" / "evidence" / "tuned", tmp_path / "evidence" / "tuned")
    page = tmp_path / "background" / "evidence.md"
    page.parent.mkdir()
    shutil.copy(ROOT / "docs" / "background" / "evidence.md", page)
    regimes = read_regimes(ROOT / "docs" / "evidence" / "tuned.toml")
    assert rewrite_tables(tmp_path, regimes) == page.read_text(encoding="utf-8")
    masks = ROOT / "docs" / "reference" / "masks.md"
    assert rewrite_bound_tables(ROOT / "docs", regimes) == masks.read_text(encoding="utf-8")


def published(name):
    """The comparison of a regime, and the texts of the page and of README."""
    plan = read_regimes(ROOT / "docs" / "evidence" / "tuned.toml")[name]
    found = compare_tuned_runs(load_tuned_runs(ROOT / "docs" / "evidence" / "tuned" / f"{name}.parquet"), plan)
    pages = ("docs/background/evidence.md", "README.md")
    return found, *(" ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)


def test_what_the_pages_say_of_stale_samples():
    found, page, readme = published("stale")
    plan = found.regime
    primary = found.primary
    assert (found.choice.correction, found.choice.alternative) == ("token weight", "none")
    assert primary.verdict == "not detected"
    low, high = primary.interval
    higher = sum(value > 0 for value in primary.by_seed.values())
    assert (
        f"is {primary.mean:.3f} higher ({low:.3f} to +{high:.3f}) over 16 seeds, and higher on {higher} of them" in page
    )
    assert f"both with PPO's clip | {primary.mean:+.3f} ({low:.3f} to {high:.3f}): not detected |" in readme
    added = [value for seed, value in primary.by_seed.items() if seed not in plan.confirmation_seeds]
    below, above = mean_interval(added)
    assert f"it is {-fmean(added):.3f} lower ({below:.3f} to +{above:.3f})" in page
    assert 0.8 * stdev(primary.by_seed.values()) == pytest.approx(0.05, abs=0.003)
    rows = {(measure, row.variant): row for measure, answers in found.answers.items() for row in answers}
    assert {key for key, row in rows.items() if row.verdict == "gain"} == {
        ("tuned against tuned", "token weight"),
        ("mean over the learning rates", "token weight"),
        ("worst learning rate", "token weight"),
        ("mean over the learning rates", "IcePop"),
    }

    def said(measure, variant, words=""):
        row = rows[measure, variant]
        return f"{row.mean:.3f} {words}({row.interval[0]:.3f} to {row.interval[1]:.3f})"

    assert f"the token weight is {said('tuned against tuned', 'token weight', 'higher ')}, which counts" in page
    assert f"over the four rates by {said('mean over the learning rates', 'token weight')}" in page
    assert f"at the worst rate by {said('worst learning rate', 'token weight')}" in page
    assert f"mean over the rates is {said('mean over the learning rates', 'IcePop', 'higher ')}" in page
    assert set(found.choice.worst_rates.values()) == {5e-4}
    grid = {
        variant: {rate: fmean(run.reward for run in by_seed.values()) for rate, by_seed in by_rate.items()}
        for variant, by_rate in found.grid.items()
    }
    none, weight = grid["none"], grid["token weight"]
    assert all(weight[rate] > none[rate] for rate in plan.learning_rates)
    assert f"most at 4e-3 ({weight[4e-3]:.3f} against {none[4e-3]:.3f})" in page
    assert max(plan.learning_rates, key=lambda rate: weight[rate] - none[rate]) == 4e-3
    assert (found.choice.bounds["none"], found.choice.rates["none"], found.choice.rates["token weight"]) == (
        "0.1 and 0.14",
        2e-3,
        4e-3,
    )
    assert f"{none[2e-3]:.3f} at a clip of 0.1 and 0.14 and 2e-3" in page
    by_rate = found.grid["none"]
    lower = [by_rate[2e-3][seed].reward - by_rate[4e-3][seed].reward for seed in plan.confirmation_seeds]
    below, above = mean_interval(lower)
    assert f"2e-3 exceeds 4e-3 by {fmean(lower):.3f} ({below:.3f} to +{above:.3f})" in page
    for variant, by_rate in found.grid.items():
        for by_seed in by_rate.values():
            runs = [run.curves for run in by_seed.values()]
            assert fmean(fmean(run.series("reward")[-10:]) - fmean(run.series("reward")[-20:-10]) for run in runs) > 0
            assert not any(has_died(run) or has_collapsed(run.series("reward")) for run in runs), variant
    assert sum(len(by_seed) for by_rate in found.grid.values() for by_seed in by_rate.values()) == 200


def rewards_by_bound(name):
    """Mean reward of the sensitivity stage by mask and bound, the published bounds, and that without a correction."""
    plan = read_regimes(ROOT / "docs" / "evidence" / "tuned.toml")[name]
    rewards = {}
    for run in load_tuned_runs(ROOT / "docs" / "evidence" / "tuned" / f"{name}.parquet"):
        if run.seed in plan.search_seeds and run.cell.learning_rate == plan.search_rate:
            rewards.setdefault((run.cell.variant, run.cell.bound), []).append(run.reward)
    means = {
        mask: {bound: fmean(rewards[mask, bound]) for bound in variant.bounds}
        for mask, variant in plan.sensitivity.items()
    }
    assert all(len(rewards[mask, bound]) == 5 for mask, by_bound in means.items() for bound in by_bound)
    without = max(fmean(values) for (variant, _), values in rewards.items() if variant == plan.baseline)
    return means, {mask: variant.published for mask, variant in plan.sensitivity.items()}, without


def test_what_the_page_of_masks_says_of_their_bounds():
    means, published, without = rewards_by_bound("step_size")
    best = {mask: max(by_bound, key=by_bound.get) for mask, by_bound in means.items()}
    at_best = [means[mask][bound] for mask, bound in best.items()]
    at_published = [means[mask][bound] for mask, bound in published.items()]
    assert (round(min(at_best), 2), round(max(at_best), 2)) == (0.64, 0.70)
    assert (round(min(at_published), 2), round(max(at_published), 2)) == (0.48, 0.61)
    factors = [float(published[mask]) / float(bound) for mask, bound in best.items()]
    assert (round(min(factors)), round(max(factors))) == (4, 100)
    gains = {(mask, bound): reward - without for mask, rewards in means.items() for bound, reward in rewards.items()}
    assert {cell for cell, gain in gains.items() if gain < 0} == {("OPSM", "1.5"), ("vaco", "0.5")}
    assert min(gain for gain in gains.values() if gain > 0) > 0.05

    means, published, without = rewards_by_bound("stale")
    assert len(means) == 12
    assert max(max(by_bound.values()) for by_bound in means.values()) - without < 0.0455
    text = " ".join((ROOT / "docs" / "reference" / "masks.md").read_text(encoding="utf-8").split())
    for mask, words in {
        "geometric": "`geometric` from 0.99 to 1.01 ({:.3f})",
        "trust_region": "`trust_region` at 0.01 ({:.3f})",
        "product": "`product` from 0.5 to 2 ({:.3f})",
        "vaco": "`vaco` at 0.2 ({:.3f})",
    }.items():
        assert words.format(means[mask][published[mask]]) in text
    assert all(reward < without for reward in means["sequence weight"].values())


def test_what_the_pages_say_of_samples_eight_updates_old():
    found, page, readme = published("lag_8")
    primary = found.primary
    low, high = primary.interval
    assert (found.choice.correction, found.choice.alternative, primary.verdict) == ("DPPO", "none", "gain")
    assert all(value > 0 for value in primary.by_seed.values())
    assert len(primary.by_seed) == 16
    assert f"rate**: by {primary.mean:.3f} ({low:.3f} to {high:.3f}) over 16 seeds, on all of them" in page
    assert f"**+{primary.mean:.3f} ({low:.3f} to {high:.3f})**: higher on all 16" in page
    assert f"can't act there | {primary.mean:+.3f} ({low:.3f} to {high:.3f}), higher on 16 of 16 seeds |" in readme
    rows = {(measure, row.variant): row for measure, answers in found.answers.items() for row in answers}
    assert len(rows) == 6
    for row in rows.values():
        assert row.verdict == "gain"
        assert all(value > 0 for value in row.by_seed.values())

    def said(row, words=""):
        return f"{row.mean:.3f} {words}({row.interval[0]:.3f} to {row.interval[1]:.3f})"

    tuned_rows = {name: rows["tuned against tuned", name] for name in ("OPSM", "DPPO")}
    assert f"OPSM was {said(tuned_rows['OPSM'])} higher over ten" in page
    assert f"on which DPPO's mask was {tuned_rows['DPPO'].mean:.3f} higher" in page
    mean = "mean over the learning rates"
    assert f"DPPO's mask is {said(rows[mean, 'DPPO'], 'higher ')} and OPSM {said(rows[mean, 'OPSM'])}, each" in page
    corrected, without = found.primary_runs
    pairs = [(run.curves, without[seed].curves) for seed, run in corrected.items()]

    def advantage(steps):
        rewards = ((ours.series("reward")[steps], theirs.series("reward")[steps]) for ours, theirs in pairs)
        return [fmean(ours) - fmean(theirs) for ours, theirs in rewards]

    first, last = (fmean(advantage(slice(end - 10, end))) for end in (20, 240))
    assert f"from {first:.3f} at step 20 to {last:.3f} at step 240 and {primary.mean:.3f} at step 250" in page
    below, above = mean_interval(advantage(slice(None)))
    assert f"Over all steps it is {fmean(advantage(slice(None))):.3f} ({below:.3f} to {above:.3f})" in page

    def validation(ours, theirs):
        return [
            ours[seed].curves.series("validation/reward")[-1] - run.curves.series("validation/reward")[-1]
            for seed, run in theirs.items()
            if seed in ours
        ]

    values = validation(corrected, without)
    below, above = mean_interval(values)
    assert f"DPPO's mask is {fmean(values):.3f} higher ({below:.3f} to +{above:.3f}) over 16" in page
    assert below < 0 < above
    assert "On validation prompts, no difference was shown in the other rows" in readme
    tuned = {name: by_rate[found.choice.rates[name]] for name, by_rate in found.grid.items()}
    values = validation(tuned["OPSM"], tuned["none"])
    below, above = mean_interval(values)
    assert f"OPSM {fmean(values):.3f} ({below:.3f} to +{above:.3f}) over ten" in page
    apart = [run.reward - tuned["DPPO"][seed].reward for seed, run in tuned["OPSM"].items()]
    below, above = mean_interval(apart)
    assert f"no difference was seen ({fmean(apart):.3f}, {below:.3f} to +{above:.3f})" in page
    assert found.choice.rates == {"none": 5e-4, "DPPO": 1e-3, "OPSM": 2e-3}
    means = {
        name: [fmean(run.reward for run in by_seed.values()) for by_seed in by_rate.values()]
        for name, by_rate in found.grid.items()
    }
    more = {
        name: [ours - theirs for ours, theirs in zip(means[name], means["none"], strict=True)]
        for name in ("DPPO", "OPSM")
    }
    assert min(min(values) for values in more.values()) > 0
    assert f"by {more['DPPO'][0]:.3f} (DPPO) and {more['OPSM'][0]:.3f} (OPSM) at 5e-4" in page
    assert f"and by {more['DPPO'][3]:.3f} and {more['OPSM'][3]:.3f} at 4e-3" in page
    rises = [
        fmean(
            fmean(run.curves.series("reward")[200:250]) - fmean(run.curves.series("reward")[150:200])
            for run in runs.values()
        )
        for runs in (without, corrected)
    ]
    assert f"uncorrected training rose by {rises[0]:.3f} and DPPO's mask by {rises[1]:.3f}" in page
    failed = {
        name: [
            [sum(map(judge, runs)) for judge in (has_died, lambda run: has_collapsed(run.series("reward")))]
            for runs in [[run.curves for by_seed in by_rate.values() for run in by_seed.values()]]
        ]
        for name, by_rate in found.grid.items()
    }
    assert failed == {"none": [[2, 4]], "DPPO": [[0, 0]], "OPSM": [[0, 0]]}
    bounds = found.choice.bound_rewards
    searched = bounds["none"]["–"]
    assert min(min(by_bound.values()) for by_bound in bounds.values()) == searched
    assert f"All are above uncorrected training ({searched:.3f})" in page
    assert (
        f"has {bounds['DPPO']['0.05']:.3f} at 0.05, {bounds['DPPO']['0.15']:.3f} at its published 0.15 and "
        f"{bounds['DPPO']['0.45']:.3f} at 0.45; OPSM has {bounds['OPSM']['0.15']:.3f} at 0.15, "
        f"{bounds['OPSM']['0.5']:.3f} at 0.5 and {bounds['OPSM']['1.5']:.3f} at 1.5" in page
    )
    assert found.choice.bounds == {"none": "–", "DPPO": "0.45", "OPSM": "0.5"}
    (cell,) = found.below_grid
    assert cell.learning_rate == 2.5e-4
    text = f"its mean is {found.below_grid[cell]:.3f} on the search seeds, against"
    assert f"{text} {found.choice.search_rewards['none']:.3f} at 5e-4" in page


def test_what_the_page_says_of_the_step_size():
    found, page, readme = published("step_size")
    primary = found.primary
    low, high = primary.interval
    higher = sum(value > 0 for value in primary.by_seed.values())
    assert f"by {primary.mean:.3f} ({low:.3f} to {high:.3f}) over 16 seeds, and higher on {higher} of them" in page
    assert f"PPO's clip | {primary.mean:+.3f} ({low:.3f} to {high:.3f}), higher on {higher} of 16 seeds |" in readme
    gains = {row.variant: row.mean for row in found.answers["tuned against tuned"] if row.verdict == "gain"}
    assert "PPO's clip by {PPO's clip:.3f}, OPSM by {OPSM:.3f} and DPPO's mask by {DPPO:.3f}".format_map(gains) in page
    assert len(gains) == 3
    lowest = {
        variant: min(fmean(run.reward for run in by_seed.values()) for by_seed in by_rate.values())
        for variant, by_rate in found.grid.items()
    }
    said = (
        "DPPO's mask is {DPPO:.3f}, that of OPSM {OPSM:.3f}, of PPO's clip {PPO's clip:.3f} and of uncorrected "
        "training {none:.3f}"
    )
    assert said.format_map(lowest) in page
    said = "was {DPPO:.3f} with DPPO's mask, {PPO's clip:.3f} with PPO's clip and {none:.3f} without either"
    assert said.format_map(lowest) in readme
    deaths = {
        variant: sum(has_died(run.curves) for by_seed in by_rate.values() for run in by_seed.values())
        for variant, by_rate in found.grid.items()
    }
    assert [deaths.pop(name) for name in ("none", "CISPO", "KL term", "one step")] == [13, 13, 12, 4]
    assert not any(deaths.values())


def test_the_runs_of_the_demo_are_those_of_the_evidence_bit_for_bit():
    """They were trained anew, days later, with validation and records as in the demo."""
    stored = {
        (run.cell.variant, run.cell.bound, run.cell.learning_rate): run.curves
        for run in load_tuned_runs(ROOT / "docs" / "evidence" / "tuned" / "lag_8.parquet")
        if run.seed == 1
    }
    demo = load_runs(ROOT / "docs" / "evidence" / "demo.parquet")
    assert len(demo) == 4
    for run in demo:
        variant = ("DPPO", "0.45") if "dppo_tv" in run.label else ("none", "–")
        rate = float(run.label.rpartition("=")[2])
        for metric in ("reward", "approx_entropy", "grad_norm"):
            expected = stored[*variant, rate].series(metric)
            assert torch.equal(torch.tensor(run.series(metric)), torch.tensor(expected))
