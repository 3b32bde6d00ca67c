"""docs/evidence.md says what its data say, and the data are what runs were."""

from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.evidence import collect, load, rewrite
from nemo_geomask.lab.outcome import final
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.runs import Run, write_steps
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
        for label in ("clipped_pg:none+icepop", "clipped_pg:none", "clipped_pg:none, grpo.async_grpo.enabled=False")
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
    collect([tmp_path / "a", tmp_path / "b"], tmp_path / "kept.parquet")
    found = {curve.label: curve for curve in load(tmp_path / "kept.parquet")}
    assert list(found) == ["gspo:none", "gspo:none, policy.lr=0.5", "gspo:token"]
    assert found["gspo:none, policy.lr=0.5"].series("reward") == [0.0, 0.5, 0.25]
    assert all(curve.seed == 1 and curve.finished and curve.series("step") == [1, 2, 3] for curve in found.values())


def test_a_setting_that_one_of_two_has_not_tells_them_apart(tmp_path):
    written(tmp_path / "a", "gspo:none", 1, [0.1] * 3, loss_fn={"ratio_clip_c": 3.0})
    written(tmp_path / "b", "gspo:none", 1, [0.2] * 3)
    collect([tmp_path / "a", tmp_path / "b"], tmp_path / "kept.parquet")
    assert [curve.label for curve in load(tmp_path / "kept.parquet")] == [
        "gspo:none",
        "gspo:none, loss_fn.ratio_clip_c=None",
    ]


def test_runs_that_are_not_whole_or_not_unique_are_refused(tmp_path):
    written(tmp_path / "a", "gspo:none", 1, [0.1] * 3)
    with pytest.raises(ConfigError, match="'gspo:none' on seed 1 is there twice"):
        collect([tmp_path / "a", tmp_path / "a"], tmp_path / "kept.parquet")
    written(tmp_path / "b", "gspo:none", 2, [0.1] * 2)
    with pytest.raises(ConfigError, match="on seed 2 has 2 steps and is not finished"):
        collect([tmp_path / "a", tmp_path / "b"], tmp_path / "kept.parquet")
