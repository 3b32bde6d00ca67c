"""Runs with damaged files, and with files of several recordings or runs."""

import json
import os

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet

from nemo_geomask.cli import main
from nemo_geomask.errors import DataError
from nemo_geomask.records.record_schema import RecordOrigin, arrow_schema, file_name
from nemo_geomask.records.stored_files import open_folder, store_record
from nemo_geomask.tools.diagnose.measure.run_survey import read_step
from nemo_geomask.tools.diagnose.read.record_sources import find_run
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape, write_step

SHAPE = RunShape(prompts=4, samples=4, length=60)
STEPS = 12


@pytest.fixture(scope="module")
def run_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    paths = [write_step(folder, planted_step(0, step, None, 1.0, shape=SHAPE)) for step in range(1, STEPS + 1)]
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture
def run(run_files, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, data in run_files.items():
        (folder / name).write_bytes(data)
    return folder


def damage(run, step):
    (path,) = run.glob(f"step-{step:07d}-*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return path


def diagnose(capsys, *arguments):
    status = main(["diagnose", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_damaged_file_is_an_error_that_names_it(run, capsys):
    path = damage(run, 5)
    status, out, err = diagnose(capsys, run)
    assert (status, out) == (2, "")
    assert path.name in err
    assert "checksum" in err


def test_with_the_option_the_others_are_judged_and_the_verdict_says_so(run, capsys):
    expected, undamaged, _ = diagnose(capsys, run, "--skip-damaged")
    assert "files:" not in undamaged
    path = damage(run, 5)
    status, out, _ = diagnose(capsys, run, "--skip-damaged")
    assert status == expected
    assert f"files: 1 of {STEPS} files left out as damaged; the first: " in out
    assert path.name in out
    status, out, _ = diagnose(capsys, run, "--skip-damaged", "--json")
    (verdict,) = json.loads(out)
    assert verdict["steps"] == [step for step in range(1, STEPS + 1) if step != 5]
    assert "left out as damaged" in verdict["files"][0]


def test_a_run_of_damaged_files_alone_is_not_judged(run, capsys):
    for step in range(1, STEPS + 1):
        damage(run, step)
    status, out, err = diagnose(capsys, run, "--skip-damaged")
    assert (status, out) == (2, "")
    assert f"all {STEPS} files are damaged" in err


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_named_and_left_out(run, capsys, make):
    path = run / file_name(7, "planted")
    path.unlink()
    make(path)
    status, _, err = diagnose(capsys, run)
    assert status == 2
    assert path.name in err
    status, out, _ = diagnose(capsys, run, "--skip-damaged")
    assert status != 2
    assert "1 of 12 files left out" in out


def test_a_damaged_log_is_left_out_too(run, tmp_path, capsys):
    (run / "train_data_step13.jsonl").write_text('{"input_lengths": [3]}\n')
    status, _, err = diagnose(capsys, run)
    assert status == 2
    assert "train_data_step13.jsonl:1" in err
    status, out, _ = diagnose(capsys, run, "--skip-damaged")
    assert status != 2
    assert "1 of 13 files left out" in out


def test_a_sweep_leaves_out_damaged_files(run, capsys):
    path = damage(run, 12)
    assert main(["sweep", str(run), "--steps", "12"]) == 2
    assert path.name in capsys.readouterr().err
    assert main(["sweep", str(run), "--steps", "12", "--skip-damaged"]) in (0, 1)
    out = capsys.readouterr().out
    assert "1 files left out as damaged, the first: " in out
    assert path.name in out


def rewrite(run, step, origin, name=None):
    """Write a step's file again, as another recording would."""
    table = parquet.read_table(run / file_name(step, "planted"))
    with open_folder(run) as folder:
        stored = store_record(
            folder,
            name or file_name(step, origin.writer),
            arrow_schema(),
            [table.cast(arrow_schema())],
            origin=origin,
            may_replace=lambda identity: name is None,
        )
    return run / stored.name


EARLIER = RecordOrigin("planted", "a" * 16, started=1000.0, first_step=1)
LATER = RecordOrigin("planted", "b" * 16, started=2000.0, first_step=6)


def test_a_resumed_run_replaces_the_steps_that_it_has_begun_again(run, capsys):
    for step in range(1, STEPS + 1):
        rewrite(run, step, LATER if step in (6, 7, 8) else EARLIER)
    files = find_run(run)
    assert files.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert files.superseded == 4
    _, out, _ = diagnose(capsys, run)
    assert "files: 4 files of an earlier recording left out" in out


def test_two_recorders_in_one_folder_are_an_error(run, capsys):
    for step in range(1, STEPS + 1):
        rewrite(run, step, EARLIER)
    path = rewrite(run, 9, LATER, name=file_name(9, "planted"))
    assert path.name != file_name(9, "planted")
    for option in ([], ["--skip-damaged"]):
        status, out, err = diagnose(capsys, run, *option)
        assert (status, out) == (2, "")
        assert "two recorders wrote into this folder at the same time" in err
        assert path.name in err
        assert file_name(9, "planted") in err
    with pytest.raises(DataError, match="rows of two runs"):
        list(read_step(find_run(run), 3))
