"""Data files of the lab's runs: what is collected, split and averaged."""

import bisect
import math

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.run_store import Run, RunCurves, read_curves, write_steps
from tests.evidence.lab.columns import EVIDENCE_SPECS, EvidenceSpec, SeedMean
from tests.evidence.lab.untuned import collect_runs, load_runs, split_runs
from tests.tools.lab.tiny_recipe import TINY, merged

pytest.importorskip("pyarrow", reason="runs are Parquet (demo extra)")
FACTS = {"corrected": False, "chance": 0.1, "sampler": "copy", "precision": "float32", "versions": {}}


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
