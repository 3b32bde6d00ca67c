"""The pages on the lab's runs say what their data say."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")
pytest.importorskip("matplotlib", reason="figures are drawn (demo extra)")

from nemo_geomask.tools.lab.outcome import final_reward, has_collapsed
from nemo_geomask.tools.lab.train_recipe import plan_runs
from nemo_geomask.tools.shared.flat_settings import flatten_settings
from nemo_geomask.tools.shared.intervals import mean_interval
from tests.evidence.lab.columns import EVIDENCE_SPECS, figure_look, figure_name
from tests.evidence.lab.regimes import read_regimes
from tests.evidence.lab.stages import check_stored_runs, load_tuned_runs, tuned_page
from tests.evidence.lab.untuned import PAGES, load_runs, rewrite_page

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "evidence"
TEXTS = {page: (FOLDER / page).read_text(encoding="utf-8") for page in (*PAGES, "tuned.md")}
DATA = {path.stem: load_runs(path) for path in sorted(FOLDER.glob("*.parquet"))}
REGIMES = read_regimes(FOLDER / "tuned.toml")


def test_the_published_tables_are_the_datas():
    for page in PAGES:
        assert rewrite_page(FOLDER / page) == TEXTS[page]
    for name in DATA.keys() | EVIDENCE_SPECS.keys():
        assert sum(f"<!-- {name}: begin -->" in text for text in TEXTS.values()) == 1, name
    drawn = {f"{name}.png" for name, spec in EVIDENCE_SPECS.items() if spec.curves}
    assert drawn == set(re.findall(r"\((\w+\.png)\)", "".join(TEXTS.values())))
    searched = {row["table"] for row in csv.DictReader((FOLDER / "search.csv").open(encoding="utf-8"))}
    assert all(f"<!-- {name}: begin -->" in TEXTS["untuned_runs.md"] for name in searched)
    assert tuned_page(FOLDER, REGIMES) == TEXTS["tuned.md"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", REGIMES)
def test_the_stored_runs_have_the_settings_of_the_plan(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_stored_runs(REGIMES[name], load_tuned_runs(FOLDER / "tuned" / f"{name}.parquet"))


def test_all_published_runs_are_whole_and_on_the_seeds_that_the_page_says():
    first = {"weight_and_mask": 401, **dict.fromkeys(("stale", "lag4", "quantized"), 101)}
    for name, curves in DATA.items():
        labels = {curve.label for curve in curves}
        seeds = range(first[name], first[name] + 10) if name in first else range(101, 106)
        assert sorted((curve.label, curve.seed) for curve in curves) == sorted(
            (label, seed) for label in labels for seed in seeds
        )
        assert all(curve.finished for curve in curves)
        assert not EVIDENCE_SPECS[name].rows or labels == set(EVIDENCE_SPECS[name].rows)


def differences(name, row, against, steps=slice(-10, None), *, other_steps=None):
    """Mean reward of a row of a table over some steps minus that of another row, by seed."""
    rows = EVIDENCE_SPECS[name].variants(DATA[name])
    ours, theirs = (
        {run.seed: fmean(run.series("reward")[part]) for run in rows[label]}
        for label, part in ((row, steps), (against, other_steps or steps))
    )
    return [reward - theirs[seed] for seed, reward in ours.items()]


SKIPPING = ("skipping", *("none, batches with k3 above 0.1 skipped",) * 2, slice(180, None))
WEIGHT, BOTH, MASK, NONE = EVIDENCE_SPECS["weight_and_mask"].rows.values()
# Intervals of the prose that are not in a table, computed from the data.
COMPUTED = [
    *(
        differences("late", f"{what}' weights, masked", f"{what}' weights, truncated")
        for what in ("tokens", "sequences")
    ),
    *(
        differences("two_lengths", masked, truncated)
        for truncated, masked in zip(*[iter(EVIDENCE_SPECS["two_lengths"].rows.values())] * 2, strict=True)
    ),
    *(differences(*SKIPPING, other_steps=slice(start, start + 20)) for start in (80, 140)),
    differences("weight_and_mask", BOTH, WEIGHT, slice(None)),
    differences("weight_and_mask", MASK, BOTH, slice(None)),
    differences("weight_and_mask", MASK, BOTH),
    differences("weight_and_mask", MASK, NONE),
]
# Of runs on another version of torch, whose data were not kept.
NOT_KEPT = {(0.005, -0.001, 0.01), (-0.012, -0.109, 0.084)}


def intervals(text, between=r"[^()|\d]{0,40}?"):
    """Estimates with their intervals in a text, as numbers."""
    number = r"([+−-]?\d+\.\d+)"
    found = re.findall(rf"{number}{between}\({number}(?: to |, ){number}\)", re.sub(r"\s+", " ", text))
    return {tuple(float(part.replace("−", "-")) for part in match) for match in found}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/background/evidence.md", "docs/evidence/claims.md", "docs/evidence/untuned_runs.md"]
)
def test_every_interval_that_a_page_names_is_in_a_table_or_computed_from_the_data(page):
    tables = "\n".join(line for text in TEXTS.values() for line in text.splitlines() if line.startswith(("|", "**")))
    known = intervals(tables, " ") | {
        tuple(round(value, 3) for value in (fmean(values), *mean_interval(values))) for values in COMPUTED
    }
    # A page may say by how much a variant is lower.
    known |= {(-mean, -high, -low) for mean, low, high in known} | NOT_KEPT
    text = (ROOT / page).read_text(encoding="utf-8")
    if "/evidence/" in page:
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    assert len(intervals(text)) >= (1 if page == "README.md" else 4)
    assert intervals(text) - known == set()


def rewards_by_bound(name):
    """Mean reward of the sensitivity stage by mask and bound, the published bounds, and that without a correction."""
    plan, rewards = REGIMES[name], {}
    for run in load_tuned_runs(FOLDER / "tuned" / f"{name}.parquet"):
        if run.seed in plan.search_seeds and run.cell.learning_rate == plan.search_rate:
            rewards.setdefault((run.cell.variant, run.cell.bound), []).append(run.reward)
    means = {
        mask: {bound: fmean(rewards[mask, bound]) for bound in variant.bounds}
        for mask, variant in plan.sensitivity.items()
    }
    without = max(fmean(values) for (variant, _), values in rewards.items() if variant == plan.baseline)
    return means, {mask: variant.published for mask, variant in plan.sensitivity.items()}, without


def test_what_the_page_of_masks_says_of_their_bounds():
    means, published, _ = rewards_by_bound("step_size")
    best = {mask: max(by_bound, key=by_bound.get) for mask, by_bound in means.items()}
    at_best = [means[mask][bound] for mask, bound in best.items()]
    at_published = [means[mask][bound] for mask, bound in published.items()]
    assert (round(min(at_best), 2), round(max(at_best), 2)) == (0.64, 0.70)
    assert (round(min(at_published), 2), round(max(at_published), 2)) == (0.48, 0.61)
    factors = [float(published[mask]) / float(bound) for mask, bound in best.items()]
    assert (round(min(factors)), round(max(factors))) == (4, 100)
    means, published, without = rewards_by_bound("stale")
    assert max(max(by_bound.values()) for by_bound in means.values()) - without < 0.0455
    shown = [f"({means[mask][published[mask]]:.3f})" for mask in ("geometric", "trust_region", "product", "vaco")]
    assert shown == ["(0.180)", "(0.163)", "(0.261)", "(0.102)"]
    assert all(reward < without for reward in means["sequence weight"].values())


def test_some_sentences_of_the_claims_and_the_older_runs():
    rows = EVIDENCE_SPECS["ranks"].variants(DATA["ranks"])
    one, four = ({run.seed: run.series("reward") for run in runs} for runs in rows.values())
    assert sum(one[seed] == four[seed] for seed in one) == 4
    (other,) = (seed for seed in one if one[seed] != four[seed])
    assert one[other][:6] == four[other][:6]
    documents = [runs for name, runs in EVIDENCE_SPECS["documents"].variants(DATA["documents"]).items()]
    assert [run.series("reward") for run in documents[1]] == [run.series("reward") for run in documents[2]]
    skipping = EVIDENCE_SPECS["skipping"].variants(DATA["skipping"])
    assert [sum(has_collapsed(run.series("reward")) for run in runs) for runs in skipping.values()] == [2, 0]
    stale = EVIDENCE_SPECS["stale"].variants(DATA["stale"])
    rewards = {
        name: {run.seed: final_reward(run.series("reward")) for run in stale[f"`clipped_pg:none{name}`"]}
        for name in ("", "+icepop", "+geometric")
    }
    assert all(rewards[name][seed] > rewards[""][seed] for name in ("+icepop", "+geometric") for seed in rewards[""])


def test_the_demo_trains_what_the_evidence_compares(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    flags = {"vary": (), "seeds": "1", "loss_from": None, "out": tmp_path}
    runs = plan_runs(Path("recipes/lab/demo.yaml"), [], compare=None, **flags)
    variants = REGIMES["mismatch_int4"].variants
    for run, name in zip(runs, ("none", "token weight"), strict=True):
        (expected,) = plan_runs(Path("recipes/lab/search.yaml"), [], compare=variants[name].compare, **flags)
        settings = flatten_settings(run.settings)
        assert settings.pop("loss_fn.record.dir")
        assert settings == {k: v for k, v in flatten_settings(expected.settings).items() if k != "loss_fn.record"}


def test_every_variant_that_a_figure_shows_has_its_colour():
    rows = [row for spec in EVIDENCE_SPECS.values() for row in spec.plotted_rows]
    rows += [name for plan in REGIMES.values() for name in plan.variants]
    looks = {figure_name(row): figure_look(figure_name(row)) for row in rows}
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    assert figure_name("`clipped_pg:none`") == figure_name("none") == "uncorrected"


def test_the_block_with_a_weight_of_1_passes_check_where_nemo_rl_requires_a_weight(tmp_path, capsys):
    pytest.importorskip("nemo_geomask.tools.check", reason="the tool was removed")
    from nemo_geomask.cli import main

    (block,) = re.findall(r"```yaml\n(loss_fn:\n.*?)```", TEXTS["untuned_runs.md"], re.DOTALL)
    (tmp_path / "recipe.yaml").write_text("grpo: {async_grpo: {enabled: true}}\n" + block)
    assert main(["check", str(tmp_path / "recipe.yaml"), "--strict"]) == 0, capsys.readouterr().out
