"""NeMo-RL's logs are converted to records: padding, NaN, and lines that are still being written."""

import math
import os

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.cli import main
from nemo_geomask.errors import DataError
from nemo_geomask.tools.diagnose.read.jsonl_logs import convert_log
from nemo_geomask.tools.diagnose.read.record_reader import read_blocks
from nemo_geomask.tools.diagnose.read.record_sources import find_runs, map_records
from tests.helpers.logs import log_row, write_log


def read_record(path):
    (block,) = read_blocks(path)
    return block


def test_rows_lose_their_padding_and_keep_every_bit(tmp_path):
    gen = np.array([0, 0, -0.1, -1.2345678, -3e-7], np.float32)
    rows = [
        log_row([5, 6, 7, 8, 9], prompt=2, gen=gen, prev=gen * 1.25, width=8, reward=0.5),
        log_row([5, 6, 1], prompt=2, width=8, sample_mask=0.0),
        log_row([7, 6, 1, 2], prompt=1, width=8),
    ]
    path = write_log(tmp_path, 7, rows)
    block = read_record(convert_log(path, tmp_path / "records"))
    assert block.offsets.tolist() == [0, 5, 8, 12]
    assert block.tokens["tokens"].tolist() == [5, 6, 7, 8, 9, 5, 6, 1, 7, 6, 1, 2]
    assert block.tokens["gen"][:5].tobytes() == gen.tobytes()
    assert block.tokens["prev"][:5].tobytes() == (gen * np.float32(1.25)).tobytes()
    assert block.tokens["mask"].astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert block.sequences["step"].tolist() == [7, 7, 7]
    assert block.sequences["group"].tolist() == [0, 0, 1]  # by the prompt's tokens
    assert block.sequences["sample"].tolist() == [0, 1, 0]
    assert block.sequences["prompt_length"].tolist() == [2, 2, 1]
    assert block.sequences["sample_mask"].tolist() == [1, 0, 1]
    assert block.sequences["reward"][0] == 0.5
    assert "curr" not in block.tokens


def test_turns_are_runs_of_trained_tokens(tmp_path):
    row = log_row([1] * 6, prompt=1)
    row["token_loss_mask"] = [[0, 1, 0, 0, 1, 1]]
    block = read_record(convert_log(write_log(tmp_path, 1, [row]), tmp_path))
    assert block.sequences["turns"].tolist() == [2]
    assert block.sequences["prompt_length"].tolist() == [1]


def test_rewards_under_dynamic_sampling_are_the_filtered_ones(tmp_path):
    row = {**log_row([1, 2, 3], prompt=1, reward=0.25), "filtered_rewards": [0.75]}
    assert read_record(convert_log(write_log(tmp_path, 1, [row]), tmp_path)).sequences["reward"].tolist() == [0.75]


def test_the_environment_is_the_agent_of_nemo_gym(tmp_path):
    rows = [log_row([1, 2, 3], prompt=1, agent=agent) for agent in ("math", None, "Größe", "math")]
    block = read_record(convert_log(write_log(tmp_path, 1, rows), tmp_path))
    assert block.sequences["environment"].tolist() == ["math", None, "Größe", "math"]


def test_nan_and_infinity_are_read(tmp_path):
    gen = np.array([0, math.nan, -math.inf], np.float32)
    path = write_log(tmp_path, 1, [log_row([1, 2, 3], prompt=1, gen=gen), log_row([1, 2, 3], prompt=1)])
    assert "NaN" in path.read_text()
    record = read_record(convert_log(path, tmp_path)).tokens["gen"]
    assert math.isnan(record[1])
    assert record[2] == -math.inf


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prev_logprobs": None}, r"step1\.jsonl:1: has no prev_logprobs.*distillation"),
        ({"generation_logprobs": [[0.0]]}, r"generation_logprobs must hold at least input_lengths = 3 .* \[1\]"),
        ({"input_lengths": ["x"]}, "a value that NeMo-RL does not write"),
        ({"input_lengths": [math.inf]}, r"step1\.jsonl:1: has a value that NeMo-RL does not write"),
        ({"token_ids": [[1, 2, 3_000_000_000]]}, r"step1\.jsonl:1: has a value that NeMo-RL does not write"),
        *(
            ({"agent_ref": [agent]}, r"step1\.jsonl:1: has a value .* write: agent_ref must be an object whose name")
            for agent in ("math", {"name": 3}, {"type": "x"}, {"name": ""}, {"name": "x" * 129}, {"name": "\ud800"}, [])
        ),
        ({"agent_ref": [{"name": "a"}, {"name": "b"}]}, "agent_ref must be an object whose name has 1 to 128 bytes"),
    ],
)
def test_a_line_that_nemo_rl_does_not_write_is_an_error(tmp_path, change, says):
    row = {key: value for key, value in {**log_row([1, 2, 3], prompt=1), **change}.items() if value is not None}
    with pytest.raises(DataError, match=says):
        convert_log(write_log(tmp_path, 1, [row]), tmp_path / "records")
    assert not list((tmp_path / "records").glob("*"))


def test_a_file_is_converted_once_and_again_when_it_has_changed(tmp_path):
    path = write_log(tmp_path, 1, [log_row([1, 2, 3], prompt=1)])
    record = convert_log(path, tmp_path)
    before = record.stat().st_mtime_ns
    assert convert_log(path, tmp_path).stat().st_mtime_ns == before
    write_log(tmp_path, 1, [log_row([1, 2, 3], prompt=1)] * 2)
    os.utime(path, ns=(1, 1))
    assert len(read_record(convert_log(path, tmp_path))) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-20], lambda data: b"", lambda data: data[:-1008] + bytes(1000) + data[-8:]],
    ids=["cut off", "empty", "end overwritten"],
)
def test_a_damaged_record_is_converted_again(tmp_path, damage):
    path = write_log(tmp_path, 1, [log_row([1, 2, 3], prompt=1)] * 3)
    record = convert_log(path, tmp_path / "records")
    record.write_bytes(damage(record.read_bytes()))
    assert convert_log(path, tmp_path / "records") == record
    assert len(read_record(record)) == 3


def test_large_files_are_read_in_parts(tmp_path):
    rows = [log_row([3] * 30, prompt=1)] * 5
    path = convert_log(write_log(tmp_path, 1, rows), tmp_path / "records", row_group=100)
    blocks = list(read_blocks(path))
    assert [len(block) for block in blocks] == [3, 2]
    assert [block.sequences["sample"].tolist() for block in blocks] == [[0, 1, 2], [3, 4]]


def test_runs_are_found_below_the_folders_given(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for step in (10, 2):
            write_log(tmp_path / name, step, [log_row([1, 2, 3], prompt=1)])
    runs = find_runs([tmp_path])
    assert [run.directory.name for run in runs] == ["a", "b"]
    assert [path.name for path in runs[0].paths()] == ["train_data_step2.jsonl", "train_data_step10.jsonl"]
    with pytest.raises(DataError, match="holds neither records"):
        find_runs([tmp_path / "a", tmp_path / "empty"] if (tmp_path / "empty").mkdir() else [tmp_path / "empty"])
    with pytest.raises(DataError, match="no such folder"):
        find_runs([tmp_path / "missing"])
    with pytest.raises(DataError, match="is a file, not a folder; name that of the records"):
        find_runs([tmp_path / "a" / "train_data_step2.jsonl"])


def test_a_record_replaces_the_log_of_its_step(tmp_path):
    for step in (1, 2):
        write_log(tmp_path, step, [log_row([1, 2, 3], prompt=1)])
    record = convert_log(tmp_path / "train_data_step2.jsonl", tmp_path)
    (run,) = find_runs([tmp_path])
    assert run.paths() == [tmp_path / "train_data_step1.jsonl", record]
    assert run.logs.keys() == {1}


def process_id(path):
    return os.getpid()


@pytest.mark.slow
def test_a_large_log_with_small_records_starts_no_processes(tmp_path):
    """Starting them would take longer than to read the records that are already there."""
    for step in (1, 2):
        write_log(tmp_path, step, [log_row(range(8), prompt=2, width=60_000) for _ in range(20)])
    logs = sorted(tmp_path.glob("*.jsonl"))
    assert sum(path.stat().st_size for path in logs) > 2**25
    for _ in ("converted now", "read from the cache"):
        assert set(map_records(process_id, logs)) == {os.getpid()}


@pytest.mark.parametrize(
    "key", ["input_lengths", "token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"]
)
@pytest.mark.parametrize("value", [None, [None], "absent"], ids=["null", "list of null", "absent"])
def test_a_row_without_a_value_is_one_error_with_file_and_row(tmp_path, capsys, key, value):
    row = log_row([1, 2, 3, 4, 5, 6], prompt=2)
    broken = {name: column for name, column in row.items() if name != key} if value == "absent" else row | {key: value}
    path = write_log(tmp_path, 1, [row, broken, row])
    for command in ("diagnose", "sweep"):
        assert main([command, str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path}:2: has no {key}, which" in line


def test_records_below_the_logs_are_the_same_run(tmp_path):
    run, records = tmp_path / "run", tmp_path / "run" / "records"
    records.mkdir(parents=True)
    for step in (1, 2, 3):
        write_log(run, step, [])
    (records / "step-0000002-driver.parquet").touch()
    (joined,) = find_runs([tmp_path])
    assert (joined.directory, joined.steps, [*joined.records], [*joined.logs]) == (run, [1, 2, 3], [2], [1, 3])
