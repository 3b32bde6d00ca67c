"""What is written is what comes back, and no disk stops a step."""

import json
import logging
import os
import threading

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

from nemo_geomask.records import COLUMNS, VERSION, arrow_schema, file_name, step_files, writer
from nemo_geomask.records.record_schema import is_recordable_text
from nemo_geomask.records.step_table import StepRows
from nemo_geomask.records.writer import Recorder
from tests.helpers.record_rows import write_step

LENGTHS = torch.tensor([5, 3, 7, 0])


def rows(**more):
    generator = torch.Generator().manual_seed(3)
    logprobs = torch.randn(4, 7, generator=generator).abs().neg()
    logprobs[0, 1], logprobs[1, 2], logprobs[2, 0] = torch.nan, -torch.inf, 1e6
    values = {
        "row": torch.arange(4),
        "group": torch.tensor([0, 0, 1, 1]),
        "prompt_length": torch.tensor([2, 2, 3, 0]),
        "turns": torch.ones(4, dtype=torch.int64),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "reward": torch.tensor([0.5, -1.0, torch.nan, 0.25]),
        "tokens": torch.randint(0, 150_000, (4, 7), generator=generator),
        "mask": torch.rand(4, 7, generator=generator) > 0.5,
        "gen": logprobs,
        "prev": logprobs * 1.001,
        "advantages": torch.tensor([[1.0], [-1.0], [0.3], [0.0]]).expand(4, 7),
    }
    return StepRows(LENGTHS, {**values, **more})


def read(path):
    return parquet.read_table(path)


def bits(values):
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


def test_every_bit_comes_back_and_no_padding(tmp_path):
    given = rows()
    table = read(write_step(tmp_path, 12, given))
    assert table.column_names == [column.name for column in COLUMNS]
    assert table["step"].to_pylist() == [12] * 4
    assert table["length"].to_pylist() == LENGTHS.tolist()
    for column in COLUMNS:
        value = given.values.get(column.name)
        if value is None:
            continue
        found = table[column.name].to_pylist()
        for row, length in enumerate(LENGTHS.tolist()):
            expected = value[row, :length].tolist() if column.is_per_token else value[row].item()
            if column.element == "float32":
                one, other = (found[row], expected) if column.is_per_token else ([found[row]], [expected])
                assert bits(one) == bits(other)
            else:
                assert found[row] == expected


def test_what_the_trainer_does_not_know_is_null(tmp_path):
    table = read(write_step(tmp_path, 1, rows()))
    for name in ("weight_version", "staleness", "sample", "environment", "curr", "ref", "entropy"):
        assert table[name].null_count == 4


def test_names_of_environments_come_back(tmp_path):
    names = ["math", None, "Ω" * 64, "math"]
    table = read(write_step(tmp_path, 1, rows(environment=names)))
    assert table["environment"].to_pylist() == names
    assert table.schema.field("environment").type == "string"


@pytest.mark.parametrize(
    ("value", "is_text"),
    [("a", True), ("Ω" * 64, True), ("", False), ("Ω" * 65, False), ("\ud800", False), (b"a", False), (None, False)],
)
def test_a_text_of_a_record_has_1_to_128_bytes(value, is_text):
    assert is_recordable_text(value) is is_text


def test_verdicts_have_a_column_a_mask(tmp_path):
    removed = torch.rand(4, 7) > 0.5
    table = read(write_step(tmp_path, 1, rows(**{"removed.veto": removed}), masks=["veto", "geometric"]))
    assert table["removed.veto"].to_pylist() == [removed[row, :n].tolist() for row, n in enumerate(LENGTHS.tolist())]
    assert table["removed.geometric"].null_count == 4


def test_a_file_says_what_it_holds(tmp_path):
    facts = {"settings": {"name": "gspo"}, "policy": "prev"}
    schema = read(write_step(tmp_path, 1, rows(), masks=["veto"], facts=facts)).schema
    assert schema.metadata[b"nemo_geomask.schema"] == str(VERSION).encode()
    assert json.loads(schema.metadata[b"nemo_geomask.facts"]) == facts
    assert all(field.metadata[b"definition"] for field in schema)
    assert schema.equals(arrow_schema(["veto"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_become_float32(tmp_path, dtype):
    given = torch.full((4, 7), -0.3, dtype=dtype)
    table = read(write_step(tmp_path, 1, rows(ref=given)))
    assert bits(table["ref"].to_pylist()[0]) == bits([given.float()[0, 0].item()] * 5)


def test_a_tensor_that_is_no_contiguous_block(tmp_path):
    given = torch.randn(7, 4).T
    table = read(write_step(tmp_path, 1, rows(ref=given)))
    assert [bits(row) for row in table["ref"].to_pylist()] == [
        bits(given[row, :n].tolist()) for row, n in enumerate(LENGTHS.tolist())
    ]


def test_no_sequence_at_all(tmp_path):
    none = StepRows(LENGTHS[:0], {name: value[:0] for name, value in rows().values.items()})
    assert read(write_step(tmp_path, 1, none)).num_rows == 0


def test_a_long_step_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP", 4)
    path = write_step(tmp_path, 1, rows())
    assert parquet.ParquetFile(path).num_row_groups == 4


def test_a_step_written_again_is_replaced(tmp_path):
    write_step(tmp_path, 1, rows())
    write_step(tmp_path, 1, StepRows(LENGTHS[:2], {name: value[:2] for name, value in rows().values.items()}))
    assert read(tmp_path / file_name(1, "driver")).num_rows == 2


def test_files_are_found_by_step(tmp_path):
    for step, who in ((10, "driver"), (2, "driver"), (2, "worker-1")):
        (tmp_path / file_name(step, who)).touch()
    (tmp_path / "step-0000003-driver.part").touch()
    (tmp_path / "notes.txt").touch()
    found = {step: [path.name for path in paths] for step, paths in step_files(tmp_path).items()}
    assert list(found) == [2, 10]
    assert found[2] == ["step-0000002-driver.parquet", "step-0000002-worker-1.parquet"]


def test_a_recorder_writes_beside_the_training(tmp_path):
    recorder = Recorder(tmp_path / "run")
    at = []

    def make():
        at.append(threading.current_thread())
        return rows()

    assert recorder.record(1, make)
    assert recorder.record(2, make)
    recorder.flush()
    assert list(step_files(tmp_path / "run")) == [1, 2]
    recorder.close()
    recorder.flush()
    assert (recorder.written, recorder.lost) == (2, 0)
    assert threading.current_thread() not in at


def test_a_slow_disk_costs_steps_and_no_time(tmp_path, caplog):
    free, began = threading.Event(), threading.Event()

    def slow():
        began.set()
        free.wait(30)
        return rows()

    recorder = Recorder(tmp_path, waiting=1)
    recorder.record(1, slow)
    assert began.wait(30)
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        taken = [recorder.record(step, rows) for step in range(2, 11)]
    assert taken == [True] + [False] * 8
    free.set()
    recorder.close()
    assert (recorder.written, recorder.lost) == (2, 8)
    assert sum("so far" in record.message for record in caplog.records) == 4  # at 1, 2, 4 and 8
    assert "2 steps written" in caplog.records[-1].message
    assert "step 3 lost (1 so far)" in caplog.text
    assert "1 steps are waiting for the disk" in caplog.text


def test_a_full_disk_costs_steps_and_leaves_nothing_half_written(tmp_path, caplog, monkeypatch):
    open_descriptor = os.fdopen

    def on_a_full_disk(descriptor, mode):
        os.close(descriptor)
        return open_descriptor(os.open("/dev/full", os.O_RDWR), mode)

    monkeypatch.setattr(os, "fdopen", on_a_full_disk)
    recorder = Recorder(tmp_path, waiting=100)
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        for step in range(1, 9):
            assert recorder.record(step, rows)
        recorder.record(9, lambda: StepRows(LENGTHS, {"gen": torch.zeros(2, 7)}))
        recorder.close()
    assert (recorder.written, recorder.lost) == (0, 9)
    assert recorder.losses == {"ENOSPC": 8, "RuntimeError": 1}
    messages = [record.message for record in caplog.records]
    assert sum("No space left" in message for message in messages) == 4  # at 1, 2, 4 and 8 of this cause
    assert sum("RuntimeError" in message for message in messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".recorder.lock"]


def test_what_waits_behind_a_stuck_disk_is_counted_at_the_end(tmp_path, caplog):
    stuck = threading.Event()
    recorder = Recorder(tmp_path)

    def late():
        stuck.wait(60)
        return rows()

    for step in (1, 2):
        assert recorder.record(step, late)
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        recorder.close(timeout=0.2)
    assert (recorder.written, recorder.lost) == (0, 2)
    assert "0 steps written" in caplog.text
    stuck.set()


def test_later_steps_of_another_run_are_pointed_out(tmp_path, caplog):
    for step in (2, 3, 9):
        write_step(tmp_path, step, rows())
    recorder = Recorder(tmp_path)
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        recorder.record(3, rows)
        recorder.close()
    assert "holds 1 files of steps after 3, the last step-0000009" in caplog.text
