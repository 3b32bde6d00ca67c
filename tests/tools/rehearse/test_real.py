"""A rehearsal through NeMo-RL's own script and workers that is interrupted; ``make nemo-rl`` runs it.

What rehearsals of all kinds find is in ``tests/evidence/hosts/case_matrix.py``.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_geomask.recipe import nemo_rl_root
from nemo_geomask.tools.rehearse.supervision import descendants

MISSING = [name for name in ("ray", "vllm", "transformers", "hydra") if importlib.util.find_spec(name) is None]

needs_nemo_rl = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"a rehearsal needs NeMo-RL's environment; missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(nemo_rl_root() is None, reason="a rehearsal needs a NeMo-RL checkout: set NEMO_RL_ROOT"),
]
RECIPE = Path(__file__).parents[3] / "recipes" / "llm" / "grpo-qwen3-0.6b-1n1g-smoke-geomask.yaml"

pytestmark = needs_nemo_rl


def interruptible():
    """A shell that starts the tests in the background has them ignore Ctrl-C, and so whatever they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def birth(pid):
    """When a process was started: two of the same number differ in it."""
    try:
        return Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def test_nothing_is_left_after_ctrl_c_while_the_workers_run(tmp_path):
    command = [sys.executable, "-m", "nemo_geomask.cli", "rehearse", str(RECIPE), "--out", str(tmp_path / "out")]
    events, log, births = tmp_path / "out" / "events.jsonl", tmp_path / "log", {}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=interruptible)
    try:
        while not (events.exists() and 'Policy"' in events.read_text(encoding="utf-8")):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            for pid in descendants(process.pid):
                births.setdefault(pid, birth(pid))
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    finally:
        process.terminate()  # its processes end with it
        process.wait(60)
    assert len(births) > 5
    assert [pid for pid, born in births.items() if born is not None and birth(pid) == born] == []
