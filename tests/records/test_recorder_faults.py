"""No fault ends the recorder unseen: what is lost is counted by its cause, and nothing is written through a link."""

import logging
import shutil
import threading

import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.records import file_name, step_files
from nemo_geomask.records.record_checks import open_record
from nemo_geomask.records.writer import Recorder
from tests.helpers.record_rows import step_rows, write_step


def read(path):
    with open_record(path) as file:
        return [row for table in file.tables() for row in table.to_pylist()]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".recorder.lock")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_any_kind_costs_its_step_alone(tmp_path, error):
    def fail():
        raise error

    recorder = Recorder(tmp_path, waiting=10)
    for step, rows in enumerate((fail, step_rows, fail, step_rows), 1):
        recorder.record(step, rows)
    assert recorder.flush(timeout=20)
    recorder.close()
    assert (recorder.written, recorder.lost) == (2, 2)
    assert sum(recorder.losses.values()) == 2
    assert list(step_files(tmp_path)) == [2, 4]


def test_flush_gives_up_on_a_stuck_disk(tmp_path):
    free = threading.Event()

    def stuck():
        free.wait(60)
        return step_rows()

    recorder = Recorder(tmp_path)
    recorder.record(1, stuck)
    assert not recorder.flush(timeout=0.3)
    free.set()
    assert recorder.flush(timeout=20)
    recorder.close()
    assert (recorder.written, recorder.lost) == (1, 0)


def test_a_recorder_goes_on_where_its_folder_was_removed(tmp_path):
    folder = tmp_path / "records"
    recorder = Recorder(folder)
    for step in (1, 2):
        recorder.record(step, step_rows)
        recorder.flush()
        if step == 1:
            shutil.rmtree(folder)
    recorder.close()
    assert (recorder.written, recorder.lost) == (2, 0)
    assert list(step_files(folder)) == [2]


def test_nothing_is_written_through_a_planted_link(tmp_path):
    folder, target = tmp_path / "records", tmp_path / "victim"
    folder.mkdir()
    target.write_text("precious")
    for name in ("step-0000001-driver.part", ".step-0000001-driver.part", file_name(1, "driver"), ".recorder.lock"):
        (folder / name).symlink_to(target)
    recorder = Recorder(folder)
    recorder.record(1, step_rows)
    recorder.close()
    assert (recorder.written, recorder.lost) == (1, 0)
    assert target.read_text() == "precious"
    assert (folder / file_name(1, "driver")).is_symlink()
    (path,) = (path for path in folder.glob("step-*.parquet") if not path.is_symlink())
    assert len(read(path)) == 4


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link_in_place_of_the_folder(tmp_path, caplog, exists):
    target, folder = tmp_path / "elsewhere", tmp_path / "records"
    if exists:
        target.mkdir()
    folder.symlink_to(target)
    recorder = Recorder(folder)
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        recorder.record(1, step_rows)
        recorder.close()
    assert (recorder.written, recorder.lost) == (0, 1)
    assert not target.exists() or not list(target.iterdir())
    assert "symbolic link" in caplog.text or "exists" in caplog.text


def test_two_recorders_of_the_same_steps_overwrite_nothing(tmp_path, caplog):
    recorders = [Recorder(tmp_path, waiting=20) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "nemo_geomask"):
        for step in range(1, 9):
            for recorder in recorders:
                recorder.record(step, step_rows)
        for recorder in recorders:
            assert recorder.flush()
    files = step_files(tmp_path)
    for recorder in recorders:
        recorder.close()
    assert {step: len(paths) for step, paths in files.items()} == dict.fromkeys(range(1, 9), 2)
    assert all(len(read(path)) == 4 for paths in files.values() for path in paths)
    assert "another process records into" in caplog.text


def test_a_reader_never_meets_half_a_file_while_two_write_one_step(tmp_path):
    stop, failures = threading.Event(), []

    def write():
        while not stop.is_set():
            write_step(tmp_path, 1, step_rows())

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    count = 0
    while count < 40:
        for path in step_files(tmp_path).get(1, [])[:3]:
            count += 1
            try:
                assert len(read(path)) == 4
            except Exception as error:
                failures.append(error)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert not [name for name in names(tmp_path) if name.endswith(".part")]


def test_a_resumed_recorder_replaces_the_steps_that_it_takes_again(tmp_path):
    for first_step in (1, 3):
        recorder = Recorder(tmp_path)
        for step in range(first_step, 5):
            recorder.record(step, step_rows)
            recorder.flush()
        recorder.close()
    assert names(tmp_path) == [file_name(step, "driver") for step in range(1, 5)]
    with (
        open_record(tmp_path / file_name(2, "driver")) as first,
        open_record(tmp_path / file_name(3, "driver")) as second,
    ):
        assert (first.origin.first_step, second.origin.first_step) == (1, 3)
        assert first.origin.id != second.origin.id
