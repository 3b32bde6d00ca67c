"""A batch as records: which rows, and what is said of them."""

import math
import threading

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.config import LossConfig
from nemo_geomask.losses.batch_masks import removed_tokens
from nemo_geomask.records import step_files
from nemo_geomask.records.flight import FlightRecorder, choose_by_hash, join_parts, step_rows
from nemo_geomask.records.step_table import step_table
from tests.helpers.batches import rollouts

MASKS = [
    {"preset": "geometric", "min": 0.85, "max": 1.2},
    {"preset": "icepop", "min": 0.7, "max": 1.4},
    {"preset": "opsm", "delta": 0.05},
]
GEN = {"ratio_anchor": "gen"}


def config(directory="/nowhere", **settings):
    record = {"dir": str(directory), **settings.pop("record", {})}
    return LossConfig(record=record, **settings)


def batch(seed=1):
    """Four prompts of two responses."""
    data = dict(rollouts(seed=seed).data)
    rows, width = data["token_mask"].shape
    mask = torch.ones(rows, width)
    mask[:, :3] = 0
    ids = torch.arange(rows * width).reshape(rows, width)
    ids[:, :3] = torch.arange(rows)[:, None] // 2
    return {**data, "input_ids": ids, "token_mask": mask, "input_lengths": torch.full((rows,), width)}


def test_rows_of_a_prompt_are_one_group():
    ids = torch.tensor([[5, 6, 1, 1], [7, 6, 1, 1], [5, 6, 2, 0], [5, 6, 0, 0], [7, 6, 1, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    data = {
        "input_ids": ids,
        "token_mask": mask,
        "input_lengths": torch.tensor([4, 4, 3, 2, 3]),
        "sample_mask": torch.ones(5),
    }
    values = step_rows(config(), 1, data).values
    assert values["group"].tolist() == [0, 1, 0, 0, 2]
    assert values["sample"].tolist() == [0, 0, 1, 2, 0]
    assert values["prompt_length"].tolist() == [2, 2, 2, 2, 1]
    assert values["row"].tolist() == [0, 1, 2, 3, 4]


def test_turns_are_runs_of_trained_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    data = {
        "input_ids": torch.ones(4, 6, dtype=torch.int64),
        "token_mask": mask,
        "input_lengths": torch.tensor([6, 6, 6, 3]),
        "sample_mask": torch.ones(4),
    }
    rows = step_rows(config(), 1, data)
    assert rows.values["turns"].tolist() == [2, 3, 0, 1]
    # What lies beyond the length is no token, whatever the mask says of it.
    assert rows.values["mask"][3].tolist() == [False, True, True, False, False, False]


def test_hashes_choose_the_same_rows_again_and_others_at_another_step():
    chosen = [choose_by_hash(step, 64, 16) for step in range(50)]
    assert chosen == [choose_by_hash(step, 64, 16) for step in range(50)]
    counts = torch.bincount(torch.tensor(chosen).flatten(), minlength=64)
    assert int(counts.min()) >= 3
    assert int(counts.max()) <= 25
    # What a smaller share picks, a larger one has, too.
    assert set(choose_by_hash(3, 64, 4)) <= set(choose_by_hash(3, 64, 16))


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 1.0])
def test_a_fraction_is_of_whole_sequences(fraction):
    rows = step_rows(config(record={"fraction": fraction}), 5, batch())
    found = rows.values["row"].tolist()
    assert len(found) == math.ceil(fraction * 8)
    assert rows.values["gen"].equal(batch()["generation_logprobs"][found])


def test_a_fraction_by_groups_has_all_of_each():
    rows = step_rows(config(record={"fraction": 0.5, "by": "group"}), 5, batch())
    assert rows.values["row"].numel() == 4
    assert rows.values["group"].unique().numel() == 2
    assert rows.values["sample"].tolist() == [0, 1, 0, 1]


NAMES = ["math", "math", None, None, "code", "code", "swe", "swe"]
"""Environment of each row of a batch."""


@pytest.mark.parametrize("by", ["sequence", "group"])
def test_a_fraction_has_the_environments_of_its_rows(by):
    rows = step_rows(config(record={"fraction": 0.5, "by": by}), 5, {**batch(), "environment": NAMES})
    assert rows.values["environment"] == [NAMES[row] for row in rows.values["row"].tolist()]
    assert len(rows.values["environment"]) == 4


def test_environments_of_parts_are_one_column(tmp_path):
    whole = batch()
    slices = slice(0, 3), slice(3, 8)
    parts = [{key: value[rows] for key, value in {**whole, "environment": NAMES}.items()} for rows in slices]
    recorder = FlightRecorder(config(tmp_path))
    recorder.record(1, *parts)
    recorder.record(2, parts[0], {key: value for key, value in parts[1].items() if key != "environment"})
    for part in parts:
        part["environment"].clear()  # the recorder has copies
    recorder.recorder.close()
    tables = {step: parquet.read_table(path) for step, (path,) in step_files(tmp_path).items()}
    assert tables[1]["environment"].to_pylist() == NAMES
    assert tables[2]["environment"].null_count == 8


def test_every_so_many_steps_from_the_first(tmp_path):
    recorder = FlightRecorder(config(tmp_path, record={"every": 3}))
    for step in range(11, 18):
        recorder.record(step, batch())
    recorder.recorder.close()
    assert list(step_files(tmp_path)) == [13, 16]


def test_parts_of_a_step_are_one_batch():
    whole = batch()
    parts = [{key: value[rows] for key, value in whole.items()} for rows in (slice(0, 3), slice(3, 8))]
    parts[1] = {key: value[:, :12] if value.dim() == 2 else value for key, value in parts[1].items()}
    parts[1]["input_lengths"] = torch.full((5,), 12)
    rows = step_rows(config(), 1, join_parts(parts))
    assert rows.values["row"].tolist() == list(range(8))
    assert rows.values["gen"][:3].equal(whole["generation_logprobs"][:3])
    assert rows.values["gen"][3:, :12].equal(whole["generation_logprobs"][3:, :12])


def test_what_is_recorded_is_what_was_there_then(tmp_path):
    data, changed = batch(), threading.Event()
    before = data["advantages"].clone()
    recorder = FlightRecorder(config(tmp_path))
    recorder.recorder.record(9, lambda: changed.wait(30))
    recorder.record(1, data)
    data["advantages"].fill_(7.0)
    changed.set()
    recorder.recorder.close()
    (path,) = step_files(tmp_path)[1]
    assert torch.tensor(parquet.read_table(path)["advantages"].to_pylist()).equal(before)


@pytest.mark.parametrize("by", ["group", "sequence"])
def test_the_default_device_plays_no_part(by):
    settings = config(masks=MASKS[:1], record={"fraction": 0.5, "by": by})
    expected = step_table(1, step_rows(settings, 1, batch()), ["geometric"], {})
    data = batch()
    with torch.device("meta"):
        found = step_table(1, step_rows(settings, 1, data), ["geometric"], {})
    assert len(found) > 0
    assert found.equals(expected)


def test_placeholders_are_no_log_probs():
    data = batch()
    zeros, nan = torch.zeros_like(data["prev_logprobs"]), torch.full_like(data["prev_logprobs"], torch.nan)
    for skipped in (zeros, nan):
        changed = {**data, "prev_logprobs": skipped, "reference_policy_logprobs": zeros}
        rows = step_rows(config(**GEN), 1, changed)
        assert not {"prev", "ref"} & rows.values.keys()
    # Where a loss reads them, zeros are a fault that the record has to show.
    assert "prev" in step_rows(config(), 1, {**data, "prev_logprobs": zeros}).values
    partly = nan.clone()
    partly[0] = -0.5
    assert "prev" in step_rows(config(**GEN), 1, {**data, "prev_logprobs": partly}).values


@pytest.mark.parametrize("given", ["curr", "prev"])
def test_verdicts_are_those_of_the_loss(given):
    settings = LossConfig(masks=MASKS)
    whole = rollouts(seed=3)
    curr = whole.curr.detach() if given == "curr" else whole.data["prev_logprobs"][:, 1:]
    _, metrics = build_loss({"masks": MASKS})(curr, whole.data, whole.seqs, whole.toks)
    found = removed_tokens(settings, whole.data, curr if given == "curr" else None)
    weight = whole.data["token_mask"] * whole.data["sample_mask"][:, None]
    for rule in settings.mask_rules:
        removed = found[rule.label]
        assert removed.shape == weight.shape
        assert not (removed & (weight == 0)).any()
        if rule.is_per_token:
            share = (weight * removed)[:, 1:].sum() / whole.toks
        else:
            share = (removed.any(dim=1) * whole.data["sample_mask"]).sum() / whole.seqs
        assert float(share) == pytest.approx(metrics[f"geomask/mask/{rule.label}/removed"], abs=1e-6)
        assert removed.any()


def test_verdicts_of_a_mask_with_a_budget_are_the_batchs():
    masks = [{"log_ratio": "mismatch", "level": "token", "statistic": "k2", "drop_at_most": 0.1}]
    settings, data = LossConfig(masks=masks), rollouts(seed=3).data
    (label,) = (rule.label for rule in settings.mask_rules)
    decision = PrestepPass(settings)(data)
    changed = {**data, **decision.changes}
    _, metrics = build_loss({"masks": masks})(data["prev_logprobs"][:, 1:], changed, 8, 80)
    weight = data["token_mask"] * data["sample_mask"][:, None]
    removed = removed_tokens(settings, data)[label]
    assert float((removed * weight)[:, 1:].sum() / 80) == pytest.approx(metrics[f"geomask/mask/{label}/removed"])
    assert removed.any()


def test_no_verdict_where_the_policy_is_not_known():
    settings = LossConfig(**GEN, masks=[{"preset": "dppo_tv", "delta": 0.1}])
    whole = rollouts(seed=3)
    assert removed_tokens(settings, whole.data) == {}
    assert removed_tokens(settings, whole.data, whole.curr.detach())


def test_a_record_has_verdicts_and_says_whose(tmp_path):
    data = batch()
    recorder = FlightRecorder(config(tmp_path, masks=MASKS), facts={"loop": "test"})
    recorder.record(1, data)
    recorder.record(2, {**data, "curr_logprobs": data["prev_logprobs"] + 0.01})
    recorder.recorder.close()
    for step, policy in ((1, "prev"), (2, "curr")):
        table = parquet.read_table(step_files(tmp_path)[step][0])
        facts = table.schema.metadata[b"nemo_geomask.facts"]
        assert f'"policy": "{policy}"'.encode() in facts
        assert b'"loop": "test"' in facts
        assert {name for name in table.column_names if name.startswith("removed.")} == {
            "removed.geometric",
            "removed.icepop",
            "removed.opsm",
        }
        assert table["removed.icepop"].null_count == 0
