"""The processes of a run: their places, and an interrupt that keeps what there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nemo_geomask.tools.lab.ranks import start_ranks
from nemo_geomask.tools.lab.run_store import read_curves
from tests.tools.lab.tiny_recipe import TINY

pytestmark = pytest.mark.slow


def meet(ranks):
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return float(total), ranks.dp.rank


def never(ranks):
    raise AssertionError


def test_one_process_needs_no_company():
    with start_ranks(never, tp=1, cp=1, dp=1) as ranks:
        assert (ranks.world_size, ranks.is_first) == (1, True)
    assert not dist.is_initialized()


def test_this_process_is_the_first_of_several():
    with start_ranks(meet, tp=1, cp=2, dp=1) as ranks:
        assert (ranks.world_size, ranks.is_first, ranks.cp.size, ranks.tp.group) == (2, True, 2, None)
        assert meet(ranks) == (3.0, 0)
    assert not dist.is_initialized()


def wait_for(path, process, seconds):
    deadline = time.monotonic() + seconds
    while not (path.exists() and list(path.glob("*.parquet"))):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_an_interrupt_keeps_what_was_trained(tmp_path):
    for module in ("transformers", "matplotlib"):
        pytest.importorskip(module, reason="the lab's demo extra")
    yaml = pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["lab", str(tmp_path / "tiny.yaml"), "lab.cp=2", "--steps", "100000", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_geomask.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(out / "steps", process, 300)
        # As a terminal does it: to every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        # Returns once nobody holds the pipes any more, so no process was left behind.
        printed, complaints = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, complaints) == (130, "")
    assert "Interrupted" in printed
    (curve,) = read_curves([out])
    assert curve.series("step") == list(range(1, curve.steps + 1))
    assert not curve.finished
