"""docs/evidence.md says what its data say, and the data are what runs were."""

from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.evidence import CLAIMS, Claim, SeedMean, collect, load, rewrite, split
from nemo_geomask.lab.outcome import final
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.runs import Course, Run, read_curves, write_steps
from tests.helpers.tiny_recipe import TINY, merged

pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")
PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
FACTS = {"corrected": False, "chance": 0.1, "sampler": "copy", "precision": "float32", "versions": {}}


def test_the_published_tables_are_the_datas():
    assert rewrite(PAGE) == PAGE.read_text(encoding="utf-8")


def test_the_published_runs_are_those_that_the_page_speaks_of():
    curves = load(PAGE.parent / "evidence" / "stale.parquet")
    assert curves[0].label == "clipped_pg:none"
    assert {curve.seed for curve in curves} == set(range(101, 111))
    assert len(curves) == 130
    assert all(curve.finished and curve.steps == 60 for curve in curves)
    icepop, none, fresh = (
        {curve.seed: final(curve.series("reward")) for curve in curves if curve.label == label}
        for label in ("clipped_pg:none+icepop", "clipped_pg:none", "clipped_pg:none grpo.async_grpo.enabled=False")
    )
    assert all(min(icepop[seed], fresh[seed]) > none[seed] for seed in none)
    # The page's first sentence: up to step 40, and down.
    means = [sum(curve.series("reward")[step] for curve in curves[:10]) / 10 for step in range(60)]
    assert max(range(60), key=means.__getitem__) == pytest.approx(39, abs=2)
    assert sum(means[-5:]) < 0.85 * sum(means[37:42])


def written(folder, label, seed, rewards, **settings):
    recipe = LabRecipe.read(merged(TINY, {"grpo": {"seed": seed, "max_num_steps": 3}, **settings}), source="test")
    write_steps(Run(label, recipe, folder), [{"reward": value} for value in rewards], FACTS)


def test_collected_runs_keep_their_numbers_and_are_told_apart(tmp_path):
    written(tmp_path / "a", "gspo:token", 1, [0.1, 0.2, 0.3])
    written(tmp_path / "a", "gspo:none", 1, [0.1, 0.1, 0.2])
    written(tmp_path / "b", "gspo:none", 1, [0.0, 0.5, 0.25], policy={"lr": 0.5})
    written(tmp_path / "c", "gspo:none", 1, [0.0, 0.5, 0.5], loss_fn={"ratio_clip_c": 3.0})
    kept = tmp_path / "kept.parquet"
    collect(read_curves([tmp_path / name for name in "abc"]), kept, Claim(["seeds"]))
    found = {curve.label: curve for curve in load(kept)}
    assert list(found) == ["gspo:none", "gspo:none policy.lr=0.5", "gspo:none loss_fn.ratio_clip_c=3.0", "gspo:token"]
    assert found["gspo:none policy.lr=0.5"].series("reward") == [0.0, 0.5, 0.25]
    assert all(curve.seed == 1 and curve.finished and curve.series("step") == [1, 2, 3] for curve in found.values())


def test_runs_that_are_not_whole_are_refused(tmp_path):
    written(tmp_path / "b", "gspo:none", 2, [0.1] * 2)
    with pytest.raises(ConfigError, match="on seed 2 has 2 steps and is not finished"):
        collect(read_curves([tmp_path]), tmp_path / "kept.parquet", CLAIMS["stale"])


def course(label, seed, **columns):
    facts = {"label": label, "seed": seed, "finished": True}
    return Course(facts, {"step": range(len(columns["reward"])), **columns})


def test_a_measure_is_of_seeds():
    base = [course("a", seed, reward=[0.0] * 5 + [0.1 * seed] * 10) for seed in (1, 2, 3)]
    other = [course("b", seed, reward=[float("nan"), 0.1 * seed + 0.2 + 0.01 * (seed - 2)]) for seed in (1, 2, 3, 4)]
    mean, (low, high) = SeedMean("", "reward", last=True, paired=True).estimate(other, base)
    half = 4.303 * 0.01 / 3**0.5
    assert (mean, low, high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert SeedMean("", "reward", last=True).cell(base, base) == "0.200 (-0.048 to 0.448)"
    assert SeedMean("", "reward", paired=True).cell(base, base) == "–"
    assert SeedMean("", "else").cell(base, base) == "–"


def test_recorded_tokens_are_split_into_shares_of_a_whole(tmp_path):
    import torch

    from nemo_geomask.config import LossConfig
    from nemo_geomask.records.flight import FlightRecorder

    written(tmp_path, "gspo:none", 1, [0.1] * 3)
    folder = tmp_path / next((tmp_path / "steps").iterdir()).stem / "records"
    recorder = FlightRecorder(LossConfig(record={"dir": str(folder)}), facts={"loop": "lab"})
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    gen = torch.tensor([[0.0, -0.05, -1.0, -5.0]])
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "input_lengths": torch.tensor([4]), "token_mask": mask}
    batch |= {"sample_mask": torch.ones(1), "generation_logprobs": gen, "rewards": torch.ones(1)}
    batch["prev_logprobs"] = gen + mask * torch.tensor([0.0, 0.1, 0.1, -0.2])
    recorder.record(1, {**batch, "advantages": mask})
    recorder.recorder.close()
    parts = {curve.label: curve for curve in split([tmp_path], "probability", [0.1, 4.6])}
    assert {label: curve.series("mismatch_abs")[0] for label, curve in parts.items()} == pytest.approx(
        {
            "gspo:none probability=below 0.1": 0.1,
            "gspo:none probability=0.1 to 4.6": 0.1,
            "gspo:none probability=4.6 and more": 0.2,
        }
    )
    assert [curve.series("mismatch")[0] for curve in parts.values()] == pytest.approx([0.25, 0.25, 0.5])
    assert [curve.series("tokens")[0] for curve in parts.values()] == pytest.approx([1 / 3] * 3)
