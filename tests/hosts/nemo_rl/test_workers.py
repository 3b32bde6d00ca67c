"""NeMo-RL's workers in environments of their own, on a real local Ray cluster."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import nemo_geomask
from tests.helpers.nemo_rl import hosts

pytestmark = pytest.mark.slow

FOLDER = Path(nemo_geomask.__file__).parent.parent


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """An interpreter with everything that this one has except nemo_geomask, which is installed here by a .pth file."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # A folder named in a .pth file is searched, but its own .pth files are not read.
    Path(purelib, "parent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    found = subprocess.run([python, "-c", "import nemo_geomask"], cwd=folder, capture_output=True)
    if found.returncode == 0:
        pytest.skip("nemo_geomask is installed in a way that every environment here shares")
    return str(python)


def without_nemo_geomask() -> dict[str, str]:
    environment = hosts.environment()
    path = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if Path(entry).resolve() != FOLDER]
    site = Path(sysconfig.get_path("purelib"))
    return {**environment, "PYTHONPATH": os.pathsep.join(entry for entry in path if Path(entry) != site)}


@pytest.fixture(scope="module")
def report(other, tmp_path_factory):
    hosts.require("nemo_rl.distributed.worker_groups")
    folder = tmp_path_factory.mktemp("cwd")
    return hosts.report("workers.py", other, str(FOLDER), env=without_nemo_geomask(), cwd=folder)


def test_a_worker_in_the_drivers_environment_computes_the_loss(report):
    before, name, ratio, prepared = report["here"]
    assert not before
    assert name == "PolicyLoss"
    assert ratio == pytest.approx(math.exp(-0.1))
    assert prepared


def test_without_packed_rows_no_worker_is_changed(report):
    *_, prepared = report["padded"]
    assert not prepared


def test_a_worker_without_the_package_is_refused_before_it_trains(report, other):
    message = report["missing"]
    assert message.startswith("WorkerError: a worker of Policy can't receive the loss 'gspo'")
    assert "No module named 'nemo_geomask'" in message
    assert other in message
    assert "NRL_FORCE_REBUILD_VENVS=true" in message
    assert "uv add nemo-geomask" in message
    assert "PYTHONPATH" in message


def test_the_remedy_works(report):
    assert report["with_path"][1:] == report["here"][1:]


@pytest.mark.parametrize("how", ["doctor", "doctor_ray"])
def test_doctor_finds_the_environment_without_the_package(report, other, how):
    status, printed, error = report[how]
    assert status == 1, error
    # What is said of this machine's Python depends on the NeMo-RL at hand.
    problems = [line for line in re.findall(r"^problem \d+: (.*)", printed, re.M) if "requires-python" not in line]
    assert len(problems) == 1
    assert problems[0].startswith(f"--worker {other}: nemo_geomask is not importable in {other}")
    assert printed.count("ok      nemo_rl.algorithms.grpo: setup") == 1
    assert "MegatronPolicyWorker" in printed
