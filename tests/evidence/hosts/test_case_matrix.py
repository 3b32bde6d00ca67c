from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.rehearse.supervision import descendants
from tests.evidence.hosts import case_matrix
from tests.evidence.hosts.case_matrix import HOSTS, read_cases, result_table

ROOT = Path(__file__).parents[3]


def test_every_case_names_a_recipe_and_every_result_a_case():
    cases = {case.name: case for case in read_cases(HOSTS / "cases.yaml")}
    ours = [case.recipe for case in cases.values() if not case.recipe.startswith("$NEMO_RL_ROOT/")]
    assert all((ROOT / recipe).is_file() for recipe in ours)
    for path in HOSTS.glob("*.json"):
        results = json.loads(path.read_text(encoding="utf-8"))["cases"]
        assert set(results) <= set(cases), path.name
        assert not any(cases[name].why_not(path.stem) for name in results), path.name


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "cases.yaml").write_text(
        "- {name: a, recipe: x}\n- {name: b, recipe: x}\n"
        "- {name: c, recipe: x, not_run: {0.7.0: too old, all: no card}}\n"
        "- {name: d, recipe: x, not_run: {all: no card}}\n- {name: e, recipe: x, mistake: k.ey}\n"
        "- {name: f, recipe: x, mistake: k.ey}\n",
        encoding="utf-8",
    )
    trained = {"outcome": "trained", "seconds": 90, "where": "CPUs", "control": 2e-7, "metrics": {"1": {}, "2": {}}}
    failed = {"outcome": "failed", "seconds": 9, "error": "step: ValueError: a|b", "setting": "k", "metrics": {}}
    results = {"a": trained, "b": failed, "e": {**failed, "setting": "k.ey"}, "f": failed}
    host = {"version": "0.7.0", "commit": "0123456789abcdef", "cases": results}
    (tmp_path / "0.7.0.json").write_text(json.dumps(host), encoding="utf-8")
    return tmp_path


def test_every_case_has_a_row_whatever_its_result(hosts):
    assert result_table(hosts).splitlines() == [
        "| case | 0.7.0 (012345678) |",
        "|---|---|",
        "| a | 2 steps, 90 s on CPUs, control within 2e-07 |",
        "| b | fails: step: ValueError: a\\|b |",
        "| c | not run: too old |",
        "| d | not run: no card |",
        "| e | names `k.ey` after 9 s |",
        "| f | fails: step: ValueError: a\\|b |",
        "| all of these in one go | in parts |",
    ]


def test_results_of_two_commits_are_not_mixed(hosts, monkeypatch, capsys):
    monkeypatch.setattr(case_matrix, "nemo_rl_checkout", lambda: hosts)
    with pytest.raises(SystemExit):
        case_matrix.main(["--hosts", str(hosts), "--label", "0.7.0", "--commit", "fedcba98"])
    assert "0123456789abcdef, this is fedcba98: give another --label" in capsys.readouterr().err


# Whoever imports it begins a daemon and waits for ever; the numbers of both are written down. The driver imports
# transformers before NeMo-RL, to write the tiny model.
WAITING = """
import os, subprocess, sys, time
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(__file__ + ".noted", "a") as file:
    file.write(f"{os.getpid()}\\n{daemon.pid}\\n")
time.sleep(600)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A NeMo-RL whose transformers waits for ever, a folder of results, and two cases whose recipe is not there."""
    root = tmp_path / "RL"
    for name, text in (("examples/run_grpo.py", ""), ("nemo_rl/__init__.py", ""), ("transformers.py", WAITING)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "nemo_rl" / "algorithms").mkdir()
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    cases = "- {name: b, recipe: none.yaml}\n- {name: a, recipe: none.yaml}\n"
    (hosts / "cases.yaml").write_text(cases, encoding="utf-8")
    return tmp_path


def run(checkout, *arguments):
    return case_matrix.main(["--hosts", str(checkout / "hosts"), "--label", "v1", "--commit", "0123", *arguments])


@pytest.mark.slow
def test_several_at_a_time_are_recorded_in_the_order_of_the_cases_and_a_part_is_not_the_whole(checkout, capsys):
    assert run(checkout, "--only", "a", "--jobs", "1") == 1
    assert "| all of these in one go | in parts |" in result_table(checkout / "hosts")
    assert run(checkout, "--jobs", "2") == 1
    results = json.loads((checkout / "hosts" / "v1.json").read_text(encoding="utf-8"))
    assert list(results["cases"]) == ["b", "a"]
    assert all("none.yaml" in result["error"] for result in results["cases"].values())
    minutes = results["whole"]["minutes"]
    assert results["whole"] == {"minutes": minutes, "jobs": 2, "cores": os.cpu_count()}
    assert f"2 cases in {minutes} min, 2 at a time" in capsys.readouterr().err
    table = result_table(checkout / "hosts")
    assert f"| all of these in one go | {minutes} min, 2 at a time on" in table


@pytest.mark.slow
def test_a_case_that_check_refuses_says_why(checkout):
    (checkout / "none.yaml").write_text("{policy: {model_name: x}, loss_fn: {name: clipped_pg}}", encoding="utf-8")
    cases = f"- {{name: a, recipe: {checkout / 'none.yaml'}}}"
    (checkout / "hosts" / "cases.yaml").write_text(cases, encoding="utf-8")
    assert run(checkout, "--jobs", "1") == 1
    (result,) = json.loads((checkout / "hosts" / "v1.json").read_text(encoding="utf-8"))["cases"].values()
    assert result["error"].startswith("validation: GM312 policy.megatron_cfg.enabled: neither of")


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--only", "PPO", "begins with 'PPO'"), ("--jobs", "0", "--jobs is 0")]
)
def test_options_that_leave_no_case_are_refused(checkout, capsys, option, value, message):
    with pytest.raises(SystemExit):
        run(checkout, option, value)
    assert message in capsys.readouterr().err


@pytest.fixture
def waiting(checkout):
    """A matrix of two cases at a time, both of which wait; and the processes' numbers."""
    recipe = "{policy: {model_name: Qwen/Qwen3-0.6B, dtensor_cfg: {enabled: true}}, loss_fn: {name: clipped_pg}}"
    (checkout / "r.yaml").write_text(recipe, encoding="utf-8")
    cases = "".join(f"- {{name: {name}, recipe: {checkout / 'r.yaml'}, timeout: 300}}\n" for name in "ab")
    (checkout / "hosts" / "cases.yaml").write_text(cases, encoding="utf-8")
    command = [sys.executable, "-m", "tests.evidence.hosts.case_matrix", "--hosts", str(checkout / "hosts")]
    command += ["--jobs", "2", "--label", "v1", "--commit", "0"]
    noted, log = checkout / "RL" / "transformers.py.noted", checkout / "log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stderr=file,
            cwd=ROOT,
            # A terminal's Ctrl-C comes to all that run in it, so the signal goes to the whole group.
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        deadline = time.monotonic() + 200
        while not noted.exists() or len(noted.read_text(encoding="utf-8").split()) < 4:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        yield process, {*descendants(process.pid), *map(int, noted.read_text(encoding="utf-8").split())}
    finally:
        process.kill()
        process.wait()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes adopt others' children on Linux only")


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "group", "status"),
    [
        (signal.SIGINT, True, -2),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, True, 143, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_several_at_a_time(waiting, number, group, status):
    process, below = waiting
    assert len(below) >= 6
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(60) == status
    # Python's tracker of shared resources ends by itself a moment later.
    deadline = time.monotonic() + 20
    while left := [pid for pid in below if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@LINUX
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_case_whose_process_is_killed_is_a_failure_and_no_end(waiting, checkout):
    process, below = waiting
    noted = (checkout / "RL" / "transformers.py.noted").read_text(encoding="utf-8").split()
    drivers = {int(pid) for pid in noted[::2]}
    # Of each case the process between the matrix and the driver.
    for pid in below:
        if drivers & descendants(pid):
            os.kill(pid, signal.SIGKILL)
    try:
        assert process.wait(60) == 1
        results = json.loads((checkout / "hosts" / "v1.json").read_text(encoding="utf-8"))["cases"]
        assert [case["error"] for case in results.values()] == ["its process ended with exit code -9"] * 2
    finally:
        for pid in noted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, recipe: x}\n- {name: a, recipe: y}", "two cases are called 'a'"),
        ("- {name: a, recipe: x, rank: 2}", "case 'a': .*'rank'"),
    ],
)
def test_a_case_with_another_ones_name_or_an_unknown_key_is_refused(tmp_path, text, message):
    (tmp_path / "cases.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_cases(tmp_path / "cases.yaml")
