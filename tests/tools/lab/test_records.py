"""``loss_fn.record`` in the lab, the current policy's log-probs and verdicts included."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

from nemo_geomask import build_loss
from nemo_geomask.cli import main
from nemo_geomask.records import step_files
from nemo_geomask.tools.lab.trainer import Trainer

pytestmark = pytest.mark.slow

MASK = {"log_ratio": "total", "level": "sequence_mean", "statistic": "ratio", "min": 0.99, "max": 1.01, "label": "near"}


def trained(recipe):
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    steps = list(trainer.steps())
    trainer.close()
    return steps


def tables(directory):
    return {step: parquet.read_table(path) for step, (path,) in step_files(directory).items()}


def padded(column, width):
    """[B, T] of a column of lists, 0 beyond each row's end."""
    rows = [torch.tensor(row, dtype=torch.float32) for row in column.to_pylist()]
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def test_a_step_as_it_was(tiny, tmp_path):
    recipe = tiny(loss_fn={"masks": [MASK], "record": {"dir": str(tmp_path), "entropy": True}})
    steps = trained(recipe)
    found = tables(tmp_path)
    assert list(found) == [1, 2]
    for step, (metrics, rollout) in enumerate(steps, start=1):
        table, data = found[step], rollout.data
        width = data["input_ids"].shape[1]
        mask = padded(table["mask"], width) != 0
        assert mask.equal(data["token_mask"] != 0)
        inside = torch.arange(width) < data["input_lengths"][:, None]
        for name, key in {"gen": "generation_logprobs", "prev": "prev_logprobs", "tokens": "input_ids"}.items():
            assert padded(table[name], width).equal(torch.where(inside, data[key], 0).float())
        assert table["reward"].to_pylist() == data["rewards"].tolist()
        assert table["weight_version"].to_pylist() == [step - 1] * 16
        assert padded(table["token_version"], width).equal(inside.float() * (step - 1))
        assert sorted(table["sample"].to_pylist()) == sorted([0, 1, 2, 3] * 4)
        # The first of the two optimiser steps is taken by the policy that sampled, the second by another.
        curr, prev = padded(table["curr"], width), padded(table["prev"], width)
        moved = ((curr - prev).abs() * mask).amax(dim=1) > 1e-4
        assert int(moved.sum()) == 8
        entropy = padded(table["entropy"], width)
        assert (entropy[mask] > 0).all()
        # What the loss reported: the mean over two steps of as many sequences.
        removed = padded(table["removed.near"], width).amax(dim=1)
        assert float(removed.mean()) == pytest.approx(metrics["geomask/mask/near/removed"], abs=1e-6)
    assert any(metrics["geomask/mask/near/removed"] > 0 for metrics, _ in steps)
    facts = json.loads(found[1].schema.metadata[b"nemo_geomask.facts"])
    assert (facts["loop"], facts["policy"]) == ("lab", "curr")


def test_recording_changes_nothing(tiny, tmp_path):
    plain = trained(tiny())
    seen = trained(tiny(loss_fn={"record": {"dir": str(tmp_path), "fraction": 0.2, "by": "group"}}))
    for (one, _), (other, _) in zip(plain, seen, strict=True):
        for key in one.keys() - {"generation_seconds", "step_seconds"}:
            assert one[key] == other[key]
    assert all(len(set(table["group"].to_pylist())) == 1 for table in tables(tmp_path).values())


def test_a_batch_that_is_not_trained_on_is_recorded_without_curr(tiny, tmp_path):
    veto = {"batch_veto": {"max": 1e-12, "max_in_a_row": 9}, "record": {"dir": str(tmp_path)}}
    trained(tiny(loss_fn=veto))
    for table in tables(tmp_path).values():
        assert table["curr"].null_count == 16
        assert b'"policy": "prev"' in table.schema.metadata[b"nemo_geomask.facts"]


def test_each_variant_has_a_folder_and_ranks_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "tiny.yaml"
    from tests.tools.lab.tiny_recipe import TINY, merged

    settings = merged(TINY, {"loss_fn": {"record": {"dir": "records"}}, "grpo": {"max_num_steps": 1}})
    recipe.write_text(json.dumps(merged(settings, {"policy": {"generation": {"precision": "float32"}}})))
    for out, more in (
        ("one", ["--compare", "gspo:none,gspo:sequence"]),
        ("two", ["--compare", "gspo:none", "lab.cp=2"]),
    ):
        assert main(["lab", str(recipe), "--out", out, *more]) == 0
    assert "Starting 2 processes: tp 1, cp 2, dp 1." in capsys.readouterr().out

    def records(out, variant):
        (folder,) = (tmp_path / out).glob(f"{variant}-*-seed3/records")
        return folder

    alone, apart = (tables(records(out, "gspo-none"))[1] for out in ("one", "two"))
    assert list(step_files(records("one", "gspo-sequence"))) == [1]
    assert alone["tokens"].equals(apart["tokens"])
    width = max(alone["length"].to_pylist())
    mask = padded(alone["mask"], width)
    torch.testing.assert_close(padded(alone["curr"], width) * mask, padded(apart["curr"], width), rtol=0, atol=1e-4)
