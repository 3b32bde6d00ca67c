"""Real rehearsals: NeMo-RL's own script and workers. Needs NeMo-RL's environment with vLLM, on CPUs or GPUs."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_geomask.recipe import nemo_rl_root
from nemo_geomask.tools.rehearse.supervision import descendants

MISSING = [name for name in ("ray", "vllm", "transformers", "hydra") if importlib.util.find_spec(name) is None]
ROOT = nemo_rl_root()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"a rehearsal needs NeMo-RL's environment; missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(ROOT is None, reason="a rehearsal needs a NeMo-RL checkout: set NEMO_RL_ROOT"),
]

RECIPE = Path(__file__).parents[3] / "recipes" / "llm" / "grpo-qwen3-0.6b-1n1g-smoke-geomask.yaml"
MOE = "policy.model_name=Qwen/Qwen3-30B-A3B"


class Started:
    """The command in a process of its own, and every process that was ever seen below it."""

    def __init__(self, folder, *arguments):
        self.folder = folder
        command = [sys.executable, "-m", "nemo_geomask.cli", "rehearse", str(RECIPE), MOE, *arguments]
        command += ["--out", str(folder / "out"), "--json", str(folder / "found.json")]
        self.output = (folder / "output.txt").open("w", encoding="utf-8")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, preexec_fn=interruptible)
        self.seen = {}

    def wait(self, until=lambda events: False):
        """Until it has ended, or this is so of its events."""
        path = self.folder / "out" / "events.jsonl"
        while self.process.poll() is None:
            for pid in descendants(self.process.pid):
                self.seen.setdefault(pid, birth(pid))
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if until([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]):
                return None
            time.sleep(0.1)
        return self.process.returncode

    def left(self):
        return [pid for pid, born in self.seen.items() if born is not None and birth(pid) == born]

    def text(self):
        return (self.folder / "output.txt").read_text(encoding="utf-8")


def interruptible():
    """A shell that starts the tests in the background has them ignore Ctrl-C, and so whatever they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def birth(pid):
    """When a process was started: two of the same number differ in it."""
    try:
        return Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


@pytest.fixture
def rehearsal(tmp_path):
    started = []

    def start(*arguments):
        started.append(Started(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()  # its processes end with it
        each.process.wait(60)
        each.output.close()


def test_three_steps_of_a_tiny_mixture_of_experts(rehearsal, tmp_path):
    # The recipe's bounds, of 1% and less, may leave nothing of an optimiser step of a random model.
    wide = ["loss_fn.masks=[{preset: geometric, min: 0.5, max: 2.0}]"]
    wide += ["loss_fn.ratio_clip_min=0.2", "loss_fn.ratio_clip_max=0.28"]
    run = rehearsal(*wide, "--steps", "3", "--timeout", "900")
    assert run.wait() == 0, run.text()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["ok"] is True
    states = {stage["name"]: stage["state"] for stage in found["stages"]}
    assert {states[name] for name in ("workers", "refit", "sampling", "log-probs", "step", "metrics")} == {"ran"}
    assert states["veto"] == states["checkpoint"] == "not in the recipe"
    assert sorted(found["metrics"]) == ["1", "2", "3"]
    for metrics in found["metrics"].values():
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
        assert 0 < metrics["geomask/mismatch_k3"] < 0.1  # bfloat16 against float32, of the same weights
    # The proof: two microbatches in each of two optimiser steps at least, in a process that is not the driver's.
    ((loss, calls),) = found["loss"].items()
    assert loss.startswith("PolicyLoss(name='gspo'")
    assert calls >= 3 * 2 * 2
    assert found["workers"][0]["pid"] in run.seen
    assert len(run.seen) > 5
    assert run.left() == []


def test_nothing_is_left_after_ctrl_c(rehearsal):
    run = rehearsal()
    assert run.wait(lambda events: any(event.get("label") == "Policy" for event in events)) is None, run.text()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert len(run.seen) > 5
    assert run.left() == []


def test_nothing_is_left_when_the_time_is_over(rehearsal, tmp_path):
    run = rehearsal("--timeout", "45")
    assert run.wait() == 1
    failure = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["failure"]
    assert failure["setting"] == "--timeout"
    assert failure["stage"] in ("start", "workers")
    assert run.left() == []
    settings = json.loads((tmp_path / "out" / "settings.json").read_text(encoding="utf-8"))
    assert not Path(settings["ray"]).exists()


def test_a_mistake_that_only_nemo_rl_sees_names_its_setting(rehearsal, tmp_path):
    run = rehearsal("++policy.optimizer.name=torch.optim.NoSuch")
    assert run.wait() == 1, run.text()
    failure = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["failure"]
    assert failure["stage"] == "workers"
    assert "NoSuch" in failure["error"]
    assert failure["setting"] == "policy.optimizer.name"
    assert "Traceback" in run.text()
    assert run.left() == []
