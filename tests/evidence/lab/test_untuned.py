"""The pages on the lab's runs say what their data say, and the data are what runs were."""

import bisect
import csv
import math
import re
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.outcome import best_reward, final_reward, has_collapsed
from nemo_geomask.tools.lab.run_store import Run, RunCurves, read_curves, write_steps
from nemo_geomask.tools.shared.intervals import mean_interval
from tests.evidence.lab.columns import EVIDENCE_SPECS, EvidenceSpec, SeedMean
from tests.evidence.lab.untuned import PAGES, collect_runs, load_runs, rewrite_page, search_table, split_runs
from tests.tools.lab.tiny_recipe import TINY, merged

pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")
DOCS = Path(__file__).parents[3] / "docs"
TEXTS = {page: (DOCS / "reference" / page).read_text(encoding="utf-8") for page in PAGES}
FACTS = {"corrected": False, "chance": 0.1, "sampler": "copy", "precision": "float32", "versions": {}}


DATA = {path.stem: load_runs(path) for path in sorted((DOCS / "evidence").glob("*.parquet"))}


def by_label(name):
    """Runs by seed, by what the table calls them."""
    rows = EVIDENCE_SPECS[name].variants(DATA[name])
    return {label.strip("`"): {run.seed: run for run in runs} for label, runs in rows.items()}


def mean(series):
    return sum(series) / len(series)


def highest(runs):
    """First and last step with which the mean of ten rewards is at its highest."""
    rewards = [run.series("reward") for run in runs.values()]
    ends = [max(range(10, len(one) + 1), key=lambda end: mean(one[end - 10 : end])) for one in rewards]
    return min(ends), max(ends)


def test_the_published_tables_are_the_datas():
    for page, text in TEXTS.items():
        assert rewrite_page(DOCS / "reference" / page) == text
    for name in DATA.keys() | EVIDENCE_SPECS.keys():
        assert sum(f"<!-- {name}: begin -->" in text for text in TEXTS.values()) == 1, name
    drawn = {f"evidence/{name}.png" for name, spec in EVIDENCE_SPECS.items() if spec.curves}
    assert drawn == set(re.findall(r"\(\.\./(evidence/\w+\.png)\)", "".join(TEXTS.values())))


def test_what_was_searched_is_data_too():
    rows = list(csv.DictReader((DOCS / "evidence" / "search.csv").open(encoding="utf-8")))
    assert all(f"<!-- {name}: begin -->" in TEXTS["untuned_runs.md"] for name in {row["table"] for row in rows})
    assert {int(row["seed"]) for row in rows} == {1, 2, 3, 4, 5}


def test_a_table_of_what_was_searched():
    rewards = {"none": (0.1, 0.2, 0.6), "token": (0.2, 0.4, 0.6)}
    rows = [
        {"setting": "int4", "lr": "1e-3", "variant": variant, "seed": str(seed), "reward": str(reward)}
        for variant, values in rewards.items()
        for seed, reward in enumerate(values)
    ]
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert search_table([*rows, {**rows[0], "setting": "float8", "reward": "0.5"}]).splitlines() == [
        "|  | lr | none | `token` |",
        "|---|---|---|---|",
        f"| int4 | 1e-3 | 0.300 | 0.400 ({0.1 - half:+.3f} to {0.1 + half:+.3f}) |",
        "| float8 | 1e-3 | 0.500 | – |",
    ]


def test_all_published_runs_are_whole_and_on_the_seeds_that_the_page_says():
    for name, curves in DATA.items():
        labels = {curve.label for curve in curves}
        ten = {"weight_and_mask": 401, **dict.fromkeys(("stale", "lag4", "quantized"), 101)}
        seeds = range(ten[name], ten[name] + 10) if name in ten else [1] if name == "demo" else range(101, 106)
        assert sorted((curve.label, curve.seed) for curve in curves) == sorted(
            (label, seed) for label in labels for seed in seeds
        )
        assert all(curve.finished for curve in curves)
        assert not EVIDENCE_SPECS[name].rows or labels == set(EVIDENCE_SPECS[name].rows)


def test_what_the_page_says_of_stale_samples():
    runs = by_label("stale")
    none = runs["clipped_pg:none"]
    rewards = {
        label: {seed: final_reward(run.series("reward")) for seed, run in found.items()}
        for label, found in runs.items()
    }
    for label in ("clipped_pg:none+icepop", "clipped_pg:none grpo.async_grpo.enabled=False"):
        assert all(rewards[label][seed] > rewards["clipped_pg:none"][seed] for seed in none)
    # Up to step 40, and down.
    means = [mean([run.series("reward")[step] for run in none.values()]) for step in range(60)]
    assert max(range(60), key=means.__getitem__) == pytest.approx(39, abs=2)
    assert mean(means[-5:]) < 0.85 * mean(means[37:42])
    for run in none.values():
        k3 = run.series("geomask/mismatch_k3")
        assert mean(k3[30:40]) > mean(k3[20:30])
    assert highest(none) == (43, 59)


def test_what_the_page_says_of_ranks_and_of_documents():
    one, four = by_label("ranks").values()
    equal = [seed for seed in one if one[seed].series("reward") == four[seed].series("reward")]
    assert len(equal) == 4
    for seed in equal:
        assert one[seed].series("grad_norm") == pytest.approx(four[seed].series("grad_norm"), rel=5e-6)
    (other,) = one.keys() - set(equal)
    assert one[other].series("reward")[:6] == four[other].series("reward")[:6]
    runs = by_label("documents")
    norms = SeedMean("", "grad_norm")
    documents = list(runs["documents"].values())
    assert norms.estimate(documents, documents)[0] / norms.estimate(list(runs["sequences"].values()), documents)[0] == (
        pytest.approx(23, abs=0.5)
    )
    drawn = runs["documents`, `docs_per_step: 64"]
    assert all(drawn[run.seed].series("reward") == run.series("reward") for run in documents)


def test_what_the_page_says_of_masked_weights():
    runs = by_label("late")
    less = SeedMean("", "reward", last_steps=10, is_paired=True)
    for kind, said in (
        ("tokens", "0.039 more than truncated ones (−0.057 to +0.136)"),
        ("sequences", "0.028 more (−0.059 to +0.116)"),
    ):
        masked, truncated = (list(runs[f"{kind}' weights, {how}"].values()) for how in ("masked", "truncated"))
        found, (low, high) = less.estimate(masked, truncated)
        assert re.search(rf"{found:.3f} more[^(]*\(−{-low:.3f} to \+{high:.3f}\)", said)
        assert said in TEXTS["claims.md"].replace("\n  ", " ")


def estimate(name, metric, row, against=None, **settings):
    """Mean over seeds of a metric in a row of a table, and its interval; minus those of another row."""
    runs = by_label(name)
    measure = SeedMean("", metric, is_paired=against is not None, **settings)
    return measure.estimate(list(runs[row].values()), list(runs[against or row].values()))


def claims():
    return re.sub(r"\s+", " ", TEXTS["claims.md"])


def test_what_the_page_says_of_where_the_mismatch_is():
    unlikely = "below 0.01"
    for weights in ("count", ""):
        mean, (low, high) = estimate("probability", "against_expected", unlikely, weights=weights)
        assert (high < 1) == (not weights)
        assert f"{mean:.2f} times" in claims()
        assert f"({low:.2f} to {high:.2f})" in claims()
    first, later, equal = "before any tool output", "after some", "after some, at the probabilities of the first row"
    mean, (low, high) = estimate("turn", "geomask/mismatch_abs", later, first)
    assert f"the mean |Δ| is {mean:.3f} larger ({low:.3f} to {high:.3f})" in claims()
    assert low > 0
    mean, (low, high) = estimate("turn_matched", "geomask/mismatch_abs", equal, first)
    assert f"Over all steps, {mean:.3f} remains ({low:.3f} to {high:+.3f})" in claims()
    assert low < 0 < high
    mean, (low, high) = estimate("turn_matched", "geomask/mismatch_abs", equal, first, last_steps=3)
    assert f"{mean:.4f} more ({low:.4f} to {high:.4f})" in claims()
    for name, row, times in (("turn", later, 4), ("turn_matched", equal, 2)):
        means = [estimate(name, "geomask/mismatch_abs", part, last_steps=3)[0] for part in (first, row)]
        assert means[1] / means[0] == pytest.approx(times, abs=0.2)


def test_what_the_page_says_of_entropy():
    *_, middle, highest = by_label("entropy")
    for row in (middle, highest):
        assert estimate("entropy", "delta", row, weights="count")[1][1] < 0
    low, high = estimate("entropy", "delta", highest)[1]
    assert low < 0 < high
    for row in by_label("entropy"):
        low, high = estimate("entropy", "delta_plus_k3", row, weights="count")[1]
        assert low < 0 < high


def test_what_the_page_says_of_small_weights_and_of_larger_penalties():
    weight, _ = estimate("small_weights", "geomask/weight_mean", "sequence")
    assert weight < 0.1
    norms = [estimate("small_weights", "grad_norm", row)[0] for row in ("none", "sequence")]
    assert f"{norms[0] / norms[1]:.1f} times smaller" in claims()
    runs = by_label("small_weights")
    by_seed = [
        mean(runs["none"][seed].series("grad_norm")) / mean(run.series("grad_norm"))
        for seed, run in runs["sequence"].items()
    ]
    assert (round(min(by_seed)), round(max(by_seed))) == (4, 18)
    assert estimate("small_weights", "grad_norm", "sequence", "none")[1][1] < 0
    change, (low, high) = estimate("small_weights", "geomask/policy_abs", "sequence", "none")
    assert f"differs by {change:.3f} ({low:.3f} to {high:+.3f})" in claims()
    assert -low / estimate("small_weights", "geomask/policy_abs", "none")[0] < 1 / 3
    for beta in ("0.03", "0.1", "0.3", "1"):
        low, high = estimate("kl_beta", "reference_kl", f"k1, β {beta}", "none", last_steps=10)[1]
        assert low < 0 < high


def test_what_the_page_says_of_masked_weights_at_two_lengths():
    names = list(by_label("two_lengths"))
    for truncated, masked in zip(names[::2], names[1::2], strict=True):
        mean, (low, high) = estimate("two_lengths", "reward", masked, truncated, last_steps=10)
        assert f"{mean:+.3f} ({low:.3f} to {high:+.3f})" in claims()
        assert (high < 0) == (masked == "96: sequences' weights, masked")


def test_what_the_page_says_of_longer_runs_with_skipped_batches():
    runs = by_label("skipping")
    skipping = "none, batches with k3 above 0.1 skipped"
    assert estimate("skipping", "reward", skipping, "none", last_steps=10)[1][0] > 0
    lost = {label: sum(has_collapsed(run.series("reward")) for run in found.values()) for label, found in runs.items()}
    assert lost == {"none": 2, skipping: 0}
    rewards = [run.series("reward") for run in runs[skipping].values()]
    fall = [final_reward(series) - best_reward(series) for series in rewards]
    low, high = mean_interval(fall)
    assert f"are {-mean(fall):.3f} below their best ten ({-high:.3f} to {-low:.3f})" in claims()
    for start, text in ((80, "changes by"), (140, "from steps 141 to 160, by")):
        changes = [mean(series[180:]) - mean(series[start : start + 20]) for series in rewards]
        low, high = mean_interval(changes)
        assert f"{text} {mean(changes):+.3f} ({low:.3f} to {high:+.3f})" in claims()
    assert 0.4 < estimate("skipping", "skipped_update", skipping)[0] < 0.5


def test_what_the_page_says_of_top_p_and_the_reward():
    for filtered in ("", ", `lab.filter_logprobs: true`"):
        row = f"0.8{filtered}".strip("`")
        mean, (low, high) = estimate("top_p_reward", "reward", row, "1", last_steps=10)
        assert (high < 0) == bool(filtered)
        shown = (
            f"{-mean:.3f} ({-high:.3f} to {-low:.3f})"
            if filtered
            else f"{-mean:.3f} higher ({-high:.3f} to {-low:+.3f})"
        )
        assert shown in claims()
        assert estimate("top_p_reward", "geomask/mismatch_k3", row, "1")[1][0] > 0


def test_what_the_page_says_of_temperature():
    names = ("0.8, log-probs after temperature", "0.8, log-probs before temperature")
    (low, high), (moved, _) = (estimate("temperature", "geomask/weight_mean", name, "1")[1] for name in names)
    assert low < 0 < high
    assert moved > 0
    assert f"the mean ratio is {estimate('temperature', 'geomask/weight_mean', names[1])[0]:.3f}" in TEXTS["claims.md"]


def test_what_the_page_says_of_the_demo():
    demo = {label: run[1] for label, run in by_label("demo").items()}
    for measure in (final_reward, lambda values: -mean(values[10:])):
        name = "reward" if measure is final_reward else "geomask/mismatch_abs"
        values = {label: measure(run.series(name)) for label, run in demo.items()}
        for rate in ("5e-4", "1e-3"):
            assert values[f"clipped_pg:none+dppo_tv` at {rate}"] > values[f"clipped_pg:none` at {rate}"]
    validated = {label: f"{run.series('validation/reward')[-1]:.3f}" for label, run in demo.items()}
    for rate in ("1e-3", "5e-4"):
        masked, none = (validated[f"clipped_pg:none{mask}` at {rate}"] for mask in ("+dppo_tv", ""))
        assert f"at {rate} ({masked} against {none})" in re.sub(r"\s+", " ", TEXTS["lab.md"])
    assert final_reward(demo["clipped_pg:none` at 1e-3"].series("reward")) > final_reward(
        demo["clipped_pg:none` at 5e-4"].series("reward")
    )
    for rate in ("5e-4", "1e-3"):
        assert 0.01 < mean(demo[f"clipped_pg:none+dppo_tv` at {rate}"].series("removed")) < 0.03


def written(folder, label, seed, rewards, **settings):
    recipe = LabRecipe.read(merged(TINY, {"grpo": {"seed": seed, "max_num_steps": 3}, **settings}), source="test")
    write_steps(Run(label, recipe, folder), [{"reward": value} for value in rewards], FACTS)


def test_collected_runs_keep_their_numbers_and_are_told_apart(tmp_path):
    written(tmp_path / "a", "gspo:token", 1, [0.1, 0.2, 0.3])
    written(tmp_path / "a", "gspo:none", 1, [0.1, 0.1, 0.2])
    written(tmp_path / "b", "gspo:none", 1, [0.0, 0.5, 0.25], policy={"lr": 0.5})
    written(tmp_path / "c", "gspo:none", 1, [0.0, 0.5, 0.5], loss_fn={"ratio_clip_c": 3.0})
    kept = tmp_path / "kept.parquet"
    collect_runs(read_curves([tmp_path / name for name in "abc"]), kept, EvidenceSpec(["seeds"]))
    found = {curve.label: curve for curve in load_runs(kept)}
    assert list(found) == ["gspo:none", "gspo:none policy.lr=0.5", "gspo:none loss_fn.ratio_clip_c=3.0", "gspo:token"]
    assert found["gspo:none policy.lr=0.5"].series("reward") == [0.0, 0.5, 0.25]
    assert all(curve.seed == 1 and curve.finished and curve.series("step") == [1, 2, 3] for curve in found.values())


def test_runs_that_are_not_whole_are_refused(tmp_path):
    written(tmp_path / "b", "gspo:none", 2, [0.1] * 2)
    with pytest.raises(ConfigError, match="on seed 2 has 2 steps and is not finished"):
        collect_runs(read_curves([tmp_path]), tmp_path / "kept.parquet", EVIDENCE_SPECS["stale"])


def course(label, seed, **columns):
    facts = {"label": label, "seed": seed, "finished": True}
    return RunCurves(facts, {"step": range(len(columns["reward"])), **columns})


def test_a_measure_is_of_seeds():
    base = [course("a", seed, reward=[0.0] * 5 + [0.1 * seed] * 10) for seed in (1, 2, 3)]
    other = [course("b", seed, reward=[float("nan"), 0.1 * seed + 0.2 + 0.01 * (seed - 2)]) for seed in (1, 2, 3, 4)]
    mean, (low, high) = SeedMean("", "reward", last_steps=10, is_paired=True).estimate(other, base)
    half = 4.302652729749464 * 0.01 / 3**0.5
    assert (mean, low, high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert SeedMean("", "reward", last_steps=10).cell(base, base) == "0.200 (-0.048 to 0.448)"
    assert SeedMean("", "reward", is_paired=True).cell(base, base) == "–"
    assert SeedMean("", "else").cell(base, base) == "–"


def test_recorded_tokens_are_split_into_shares_of_a_whole(tmp_path):
    import torch

    from nemo_geomask.config import LossConfig
    from nemo_geomask.records.flight import FlightRecorder

    written(tmp_path, "gspo:none", 1, [0.1] * 3)
    folder = tmp_path / next((tmp_path / "steps").iterdir()).stem / "records"
    recorder = FlightRecorder(LossConfig(record={"dir": str(folder)}), facts={"loop": "lab"})
    rows = torch.ones(20, 1)
    mask, gen = rows * torch.tensor([0.0, 1.0, 1.0, 1.0]), rows * torch.tensor([0.0, -0.05, -1.0, -5.0])
    batch = {"input_ids": torch.ones(20, 4, dtype=torch.long), "input_lengths": torch.full((20,), 4)}
    batch |= {"token_mask": mask, "sample_mask": rows[:, 0], "generation_logprobs": gen, "rewards": rows[:, 0]}
    batch["prev_logprobs"] = gen + torch.tensor([0.0, -0.1, 0.1, -0.2])
    batch["advantages"] = mask
    recorder.record(1, batch)
    # Too few to speak of a mean.
    recorder.record(2, {key: value[:19] for key, value in batch.items()})
    recorder.recorder.close()
    parts = {curve.label: curve for curve in split_runs([tmp_path], "probability", [0.1, 4.6])}
    assert {label: curve.series("geomask/mismatch_abs")[0] for label, curve in parts.items()} == pytest.approx(
        {
            "gspo:none probability=below 0.1": 0.1,
            "gspo:none probability=0.1 to 4.6": 0.1,
            "gspo:none probability=4.6 and more": 0.2,
        }
    )
    assert [curve.series("mismatch")[0] for curve in parts.values()] == pytest.approx([0.25, 0.25, 0.5])
    assert [curve.series("tokens")[0] for curve in parts.values()] == pytest.approx([1 / 3] * 3)
    assert all(math.isnan(curve.series("geomask/mismatch_abs")[1]) for curve in parts.values())
    assert [curve.series("delta")[0] for curve in parts.values()] == pytest.approx([-0.1, 0.1, -0.2])
    expected = [1 - math.exp(gen) + 1e-3 for gen in (-0.05, -1.0, -5.0)]  # as in the diagnosis
    usual = (0.1 + 0.1 + 0.2) / sum(expected)
    assert [curve.series("against_expected")[0] for curve in parts.values()] == pytest.approx(
        [size / share / usual for size, share in zip((0.1, 0.1, 0.2), expected, strict=True)]
    )


def test_parts_are_compared_at_equal_probability_and_without_a_token(tmp_path):
    """Two turns of five tokens, around one token of tool output; the means are those of plain loops."""
    import torch

    from nemo_geomask.config import LossConfig
    from nemo_geomask.records.flight import FlightRecorder
    from nemo_geomask.tools.diagnose import DIMENSIONS_BY_NAME

    written(tmp_path, "gspo:none", 1, [0.1] * 3)
    folder = tmp_path / next((tmp_path / "steps").iterdir()).stem / "records"
    recorder = FlightRecorder(LossConfig(record={"dir": str(folder)}), facts={"loop": "lab"})
    generator = torch.Generator().manual_seed(0)
    rows, width = 200, 12
    mask = torch.ones(rows, width)
    mask[:, [0, 6]] = 0.0
    # The second turn has more unlikely tokens than the first.
    choice = (torch.rand(rows, width, generator=generator) ** torch.tensor([2.0] * 6 + [0.2] * 6) * 3).long()
    gen = torch.tensor([-0.05, -1.0, -5.0])[choice] * (0.7 + 0.6 * torch.rand(rows, width, generator=generator))
    delta = 0.01 * (torch.rand(rows, width, generator=generator) - 0.4) * (1 + choice)
    ids = torch.randint(0, 4, (rows, width), generator=generator)
    recorder.record(
        1,
        {
            "input_ids": ids,
            "input_lengths": torch.full((rows,), width),
            "token_mask": mask,
            "sample_mask": torch.ones(rows),
            "generation_logprobs": gen,
            "prev_logprobs": gen + delta,
            "advantages": mask,
            "rewards": torch.ones(rows),
        },
    )
    recorder.recorder.close()
    first, second = split_runs([tmp_path], "turn", [1], matched_by="probability", without_token=3)
    edges = DIMENSIONS_BY_NAME["probability"].edges
    sums, counts = {}, {}
    for row in range(rows):
        for column in range(1, width):
            if column != 6 and ids[row, column] != 3:
                key = (column > 6, bisect.bisect(edges, -float(gen[row, column])))
                sums[key] = sums.get(key, 0.0) + abs(float(delta[row, column]))
                counts[key] = counts.get(key, 0) + 1
    levels = [level for level in range(30) if min(counts.get((turn, level), 0) for turn in (False, True)) >= 20]
    assert len(levels) >= 3
    assert any(counts.get((False, level), 0) >= 20 > counts.get((True, level), 0) for level in range(30))
    weights = [counts[False, level] for level in levels]
    for part, turn in ((first, False), (second, True)):
        means = [sums[turn, level] / counts[turn, level] for level in levels]
        expected = sum(weight * value for weight, value in zip(weights, means, strict=True)) / sum(weights)
        assert part.series("geomask/mismatch_abs")[0] == pytest.approx(expected, rel=1e-5)
        share = sum(count for key, count in counts.items() if key[0] == turn) / sum(counts.values())
        assert part.series("tokens")[0] == pytest.approx(share)


def test_what_the_pages_say_of_the_weight_beside_the_mask():
    names = {
        "weight": "token weight, learning rate 5e-4",
        "both": "token weight and DPPO's mask, 2e-3",
        "mask": "DPPO's mask alone, 1e-3",
        "none": "none, 5e-4",
    }
    runs = by_label("weight_and_mask")
    assert all(sorted(runs[name]) == list(range(401, 411)) for name in names.values())

    def said(first, second, steps=slice(-10, None), form="{:.3f} ({:.3f} to {:.3f})"):
        """The difference of mean rewards over some steps, as a page says it, and on how many seeds it is above 0."""
        rewards = [
            {seed: mean(run.series("reward")[steps]) for seed, run in runs[names[key]].items()}
            for key in (first, second)
        ]
        differences = [reward - rewards[1][seed] for seed, reward in rewards[0].items()]
        words = form.format(mean(differences), *mean_interval(differences))
        return words, sum(difference > 0 for difference in differences)

    page, evidence, readme = (
        " ".join((DOCS.parent / name).read_text(encoding="utf-8").split())
        for name in ("docs/reference/untuned_runs.md", "docs/background/evidence.md", "README.md")
    )
    added, times = said("both", "weight")
    assert times == 8
    assert f"it adds {added}, on 8 of 10 seeds" in page
    assert f"DPPO's mask adds {added}, on 8 of 10 seeds" in evidence
    assert f"+{added}, higher on 8 of 10 seeds: not detected, since the plan requires nine" in readme
    assert f"**The weight alone** is {said('weight', 'none')[0]} above no correction, on 8 of 10" in page
    assert said("weight", "none")[1] == 8
    assert f"{said('mask', 'none')[0]} above no correction, on all ten seeds" in page
    assert f"{said('mask', 'weight')[0]} above the weight alone, on all ten" in page
    assert said("mask", "none")[1] == said("mask", "weight")[1] == 10
    words, times = said("mask", "both")
    assert f"and {words} above weight and mask, on eight" in page
    assert f"The mask alone is {words} above both together over the last ten steps, on eight" in evidence
    assert times == 8
    added, times = said("both", "weight", slice(None))
    assert f"it adds {added}, on nine" in page
    assert times == 9
    assert f"do not differ ({said('mask', 'both', slice(None), '{:.3f}, {:.3f} to {:.3f}')[0]})" in page


def test_the_block_with_a_weight_of_1_passes_check_where_nemo_rl_requires_a_weight(tmp_path, capsys):
    pytest.importorskip("nemo_geomask.tools.check", reason="the tool was removed")
    from nemo_geomask.cli import main

    text = TEXTS["untuned_runs.md"]
    (block,) = re.findall(r"```yaml\n(loss_fn:\n.*?)```", text, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text("grpo: {async_grpo: {enabled: true}}\n" + block)
    assert main(["check", str(tmp_path / "recipe.yaml"), "--strict"]) == 0, capsys.readouterr().out
