"""Nothing is left running: children, daemons that left their parents, and those that start others, are counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from nemo_geomask.errors import EngineError
from nemo_geomask.tools.rehearse import supervision
from nemo_geomask.tools.rehearse.supervision import supervised, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes adopt others' children on Linux only"),
]

# As Ray does it: a daemon in a session of its own, whose parent is gone, with a child that has one, too; and none of
# them minds a polite signal. What each is called is written down.
TREE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note()
        if os.fork() == 0:
            os.setsid()
            note()
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    note()
    time.sleep(600)
    os._exit(0)
while len(open(sys.argv[1]).read().split()) < 4:
    time.sleep(0.01)
"""


def tree(path, then):
    return [sys.executable, "-c", TREE + textwrap.dedent(then), str(path)]


def run(command, log, *, timeout=60, every_tick=lambda: None):
    with supervised(command, log=log) as process:
        return wait_for(process, timeout, every_tick)


def alive(path):
    """Of the processes that wrote their numbers down, those that run."""
    noted = [int(line) for line in path.read_text(encoding="utf-8").split()]
    assert len(noted) == 4
    return [pid for pid in noted if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize(("then", "status"), [("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_after_an_end_of_any_kind(tmp_path, then, status):
    noted = tmp_path / "noted"
    assert run(tree(noted, then), tmp_path / "log") == status
    assert alive(noted) == []


def test_after_the_time_is_over(tmp_path):
    noted = tmp_path / "noted"
    assert run(tree(noted, "time.sleep(600)"), tmp_path / "log", timeout=3) is None
    assert alive(noted) == []


def test_killed_processes_have_time_while_one_after_another_ends(monkeypatch):
    """On a busy machine, killed processes end slowly: only a pause without any end is a failure."""
    clock = iter(range(0, 10_000, 50))  # seconds between looks, of the 120 that are allowed without an end
    left = [{11, 12, 13}, {11, 12}, {11, 12}, {11}, set()]
    stopped_time = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    monkeypatch.setattr(supervision, "time", stopped_time)
    monkeypatch.setattr(supervision.os, "kill", lambda pid, number: None)
    looks = iter(left)
    monkeypatch.setattr(supervision, "descendants_in_other_sessions", lambda: next(looks))
    supervision.end_processes(set())
    monkeypatch.setattr(supervision, "descendants_in_other_sessions", lambda: {11})
    with pytest.raises(EngineError, match="processes 11 of the rehearsal could not be ended"):
        supervision.end_processes(set())


def test_after_an_error_while_it_runs(tmp_path):
    noted = tmp_path / "noted"

    def interrupt():
        if noted.exists() and len(noted.read_text(encoding="utf-8").split()) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tree(noted, "time.sleep(600)"), tmp_path / "log", every_tick=interrupt)
    assert alive(noted) == []


OUTER = """
import sys
from pathlib import Path
from nemo_geomask.tools.rehearse.supervision import supervised, wait_for
with supervised(sys.argv[3:], log=Path(sys.argv[1])) as process:
    wait_for(process, 60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_after_a_signal(tmp_path, number, status):
    noted = tmp_path / "noted"
    inner = tree(noted, "time.sleep(600)")
    outer = subprocess.Popen(
        [sys.executable, "-c", OUTER, str(tmp_path / "log"), "--", *inner],
        stderr=subprocess.DEVNULL,
        # A shell that starts the tests in the background has them ignore Ctrl-C, and so whatever they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not (noted.exists() and len(noted.read_text(encoding="utf-8").split()) == 4):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        outer.send_signal(number)
        assert outer.wait(60) == status
    finally:
        outer.kill()
    assert alive(noted) == []


def test_others_children_are_left_alone(tmp_path):
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert run([sys.executable, "-c", ""], tmp_path / "log") == 0
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


def test_output_is_kept_and_ticks_come(tmp_path):
    ticks = []
    log = tmp_path / "log"
    script = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(0.5)"
    assert run([sys.executable, "-c", script], log, every_tick=lambda: ticks.append(1)) == 0
    assert {"out", "err"} == set(log.read_text(encoding="utf-8").split())
    assert len(ticks) >= 2
