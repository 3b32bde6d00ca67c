"""Processes end together: one error for all of them, an interrupt that keeps what there is, nobody left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nemo_geomask.errors import DataError
from nemo_geomask.lab.processes import RankError, company


def meet(ranks):
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return float(total)


def known(ranks):
    meet(ranks)
    if ranks.dp.rank == 1:
        raise DataError("what a user should read")
    meet(ranks)


def unforeseen(ranks):
    meet(ranks)
    if ranks.dp.rank == 1:
        raise KeyError("a mistake in the code")
    meet(ranks)


def killed(ranks):
    meet(ranks)
    if ranks.dp.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet(ranks)


def never(ranks):
    raise AssertionError


def nobody_is_left():
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "work", "error", "message"),
    [
        # Rank 2 fails too, for want of rank 1.
        (3, known, DataError, "^what a user should read$"),
        (2, unforeseen, RankError, r"(?s)^rank 1:\nTraceback.*KeyError: 'a mistake in the code'"),
        (2, killed, RankError, r"^rank 1 was ended from outside \(SIGKILL\)$"),
    ],
)
def test_the_first_error_ends_all_and_is_raised_once(world, work, error, message):
    began = time.monotonic()
    with pytest.raises(error, match=message), company(work, tp=1, cp=1, dp=world) as ranks:
        work(ranks)
    assert time.monotonic() - began < 60
    nobody_is_left()


@pytest.mark.timeout(120)
def test_an_error_of_the_first_rank_ends_the_others():
    def alone(ranks):
        assert (ranks.world, ranks.first, ranks.cp.size, ranks.tp.group) == (2, True, 2, None)
        assert meet(ranks) == 3.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), company(meet, tp=1, cp=2, dp=1) as ranks:
        alone(ranks)
    nobody_is_left()


def test_one_process_needs_no_company():
    with company(never, tp=1, cp=1, dp=1) as ranks:
        assert (ranks.world, ranks.first) == (1, True)
    nobody_is_left()


def wait_for(path, process, seconds):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_an_interrupt_keeps_what_was_trained(tmp_path):
    for module in ("transformers", "matplotlib", "rich"):
        pytest.importorskip(module, reason="the lab's demo extra")
    yaml = pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")
    from tests.helpers.tiny_recipe import TINY

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["lab", str(tmp_path / "tiny.yaml"), "--cp", "2", "--steps", "100000", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_geomask.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(out / "metrics.jsonl", process, 120)
        # As a terminal does it: to every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        # Returns once nobody holds the pipes any more, so no process was left behind.
        printed, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, complaints) == (130, "")
    assert "Interrupted" in printed
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    (row,) = json.loads((out / "summary.json").read_text())["variants"]
    assert (row["steps"], row["complete"]) == (len(lines), False)
