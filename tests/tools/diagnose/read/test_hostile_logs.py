"""Hostile logs end in a sentence that names the file and, where there is one, the limit, within 5 s and 1 GB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from nemo_geomask.errors import DataError, InputLimitError
from nemo_geomask.recipe.input_limits import InputLimits, use_limits
from nemo_geomask.tools.diagnose.read import record_sources
from nemo_geomask.tools.diagnose.read.json_lines import read_json_lines
from tests.helpers.limited_commands import limited_commands
from tests.tools.diagnose.read.hostile_logs import (
    HOSTILE_LOGS,
    HOSTILE_METRICS,
    LOG,
    METRICS,
    valid_lines,
)

MAX_BYTES = 2**30
MODULES = (
    "nemo_geomask.tools.diagnose.report.diagnose_command",
    "nemo_geomask.tools.diagnose.report.sweep_command",
    "pyarrow.parquet",
)


@pytest.fixture(scope="module")
def commands():
    with limited_commands(MODULES) as server:
        yield server


def check_refused(outcome, *expected):
    assert outcome.status == 2, outcome.output
    assert "Traceback" not in outcome.output
    for text in expected:
        assert text in outcome.output
    assert len(outcome.output) < 5000
    assert outcome.peak_bytes < MAX_BYTES


@pytest.mark.parametrize("name", HOSTILE_LOGS)
def test_a_hostile_log_is_an_error(commands, tmp_path, name):
    plant, message = HOSTILE_LOGS[name]
    plant(tmp_path / LOG)
    check_refused(commands.run("diagnose", tmp_path), str(tmp_path), message)


@pytest.mark.parametrize(
    "name", ["fifo", "1 GB line", "unclosed brackets", "10 million lists", "dangling link", "empty"]
)
def test_sweep_refuses_a_hostile_log_as_well(commands, tmp_path, name):
    plant, message = HOSTILE_LOGS[name]
    plant(tmp_path / LOG)
    check_refused(commands.run("sweep", tmp_path), message)


@pytest.mark.parametrize("name", HOSTILE_METRICS)
def test_hostile_metrics_are_an_error(commands, tmp_path, name):
    plant, message = HOSTILE_METRICS[name]
    plant(tmp_path / METRICS)
    check_refused(commands.run("diagnose", tmp_path), str(tmp_path), message)


def test_a_limit_is_an_option(commands, tmp_path):
    (tmp_path / LOG).write_bytes(valid_lines(40, x="a" * 2000))
    assert "line_bytes" not in commands.run("diagnose", tmp_path).output
    lowered = commands.run("diagnose", tmp_path, "--cache", tmp_path / "cache", "--limit", "line_bytes=1000")
    check_refused(lowered, f"{tmp_path / LOG}:1", "over the limit line_bytes")
    assert commands.run("sweep", tmp_path, "--limit", "lines=3").status == 2


def test_the_processes_that_read_the_logs_have_the_same_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(record_sources, "MIN_BYTES_FOR_PROCESSES", 0)
    for step in (1, 2):
        (tmp_path / f"train_data_step{step}.jsonl").write_bytes(valid_lines(2, x="a" * 20))
    paths = sorted(tmp_path.iterdir())
    assert len(list(record_sources.map_records(Path.exists, paths, tmp_path / "cache"))) == 2
    with use_limits(InputLimits(line_bytes=10)), pytest.raises(InputLimitError, match="line_bytes"):
        list(record_sources.map_records(Path.exists, paths, tmp_path / "other cache"))


def test_a_planted_file_in_the_cache_is_not_read(commands, tmp_path):
    """A FIFO under the name of the converted record keeps nobody waiting."""
    (tmp_path / LOG).write_bytes(valid_lines(40))
    (tmp_path / "geomask-records").mkdir()
    os.mkfifo(tmp_path / "geomask-records" / "step-0000001-nemo_rl.parquet")
    outcome = commands.run("diagnose", tmp_path)
    assert "Traceback" not in outcome.output
    assert outcome.status in (0, 2)


def test_only_an_incomplete_last_line_is_left_out(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": NaN}\n{"a":')
    (first, second) = read_json_lines(path)
    assert (first, second[0]) == ((1, {"a": 1}), 2)
    path.write_bytes(b'{"a": 1}\n{"a":\n{"a": 2}\n')
    with pytest.raises(DataError, match=":2: not JSON"):
        list(read_json_lines(path))
    path.write_bytes(b'{"a": 1}')
    assert list(read_json_lines(path)) == [(1, {"a": 1})]


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from nemo_geomask.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("diagnose", "numpy"),
        ("diagnose", "pyarrow"),
        ("diagnose", "scipy"),
        ("diagnose --html page.html", "plotly"),
        ("diagnose --html page.html", "jinja2"),
        ("sweep", "torch"),
        ("sweep", "numpy"),
        ("sweep", "pyarrow"),
    ],
)
def test_a_missing_package_is_a_sentence_with_status_2(tmp_path, command, package):
    lines = valid_lines(40, prev_logprobs=[[0.0, 0.0, -0.52, -0.69]])
    (tmp_path / LOG).write_bytes(lines)
    for step in range(2, 9):
        (tmp_path / f"train_data_step{step}.jsonl").write_bytes(lines)
    name, *options = command.split()
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package=package), name, str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert "Traceback" not in result.stderr
    assert result.returncode == 2, result.stderr
    assert f"{package}" in result.stderr
    assert 'pip install "nemo-geomask' in result.stderr
