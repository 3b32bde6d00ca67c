"""Real rehearsals for tests: the command in a process of its own, with NeMo-RL's script and workers."""

from __future__ import annotations

import importlib.util
import json
import os
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

needs_nemo_rl = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"a rehearsal needs NeMo-RL's environment; missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(ROOT is None, reason="a rehearsal needs a NeMo-RL checkout: set NEMO_RL_ROOT"),
]

RECIPE = Path(__file__).parents[3] / "recipes" / "llm" / "grpo-qwen3-0.6b-1n1g-smoke-geomask.yaml"
MOE = "policy.model_name=Qwen/Qwen3-30B-A3B"


class Started:
    """The command in a process of its own, and every process that was ever seen below it."""

    def __init__(self, folder, *arguments, environment=None):
        self.folder = folder
        command = [sys.executable, "-m", "nemo_geomask.cli", "rehearse", str(RECIPE), *arguments]
        command += ["--out", str(folder / "out"), "--json", str(folder / "found.json")]
        self.output = (folder / "output.txt").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            preexec_fn=interruptible,
            env={**os.environ, **(environment or {})},
        )
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

    def found(self):
        return json.loads((self.folder / "found.json").read_text(encoding="utf-8"))

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
