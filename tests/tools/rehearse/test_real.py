"""Rehearsals with faults, one that is interrupted, and a preflight, in NeMo-RL's own workers, by ``make nemo-rl``.

What rehearsals of all kinds find is in ``tests/evidence/hosts/case_matrix.py``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_geomask.recipe import nemo_rl_root, read_recipe
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.rehearse.launch_environment import launch_environment
from nemo_geomask.tools.rehearse.plan import PlanOptions, plan
from nemo_geomask.tools.rehearse.rehearsal import rehearse
from nemo_geomask.tools.rehearse.supervision import descendants_in_other_sessions, supervised, wait_for
from nemo_geomask.tools.rehearse.tiny_models import write_model, write_prompts
from tests.tools.rehearse.planted_faults import VARIABLE

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
            for pid in descendants_in_other_sessions():
                births.setdefault(pid, birth(pid))
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    finally:
        process.terminate()  # its processes end with it
        process.wait(60)
    assert len(births) > 5
    assert [pid for pid, born in births.items() if born is not None and birth(pid) == born] == []


@pytest.mark.parametrize(
    ("fault", "overrides", "reason"),
    [
        ("shift", [], "the loss gets each token's neighbour's log-prob"),
        ("temperature", ["++loss_fn.logprob_backend=geomask"], "another temperature in the training pass"),
        ("rows", [], "that of its recorded batch is"),
        (
            "mask of another rank",
            ["policy.dtensor_cfg.tensor_parallel_size=2", "cluster.gpus_per_node=2"],
            "the 2 workers of data-parallel rank 0 train the same rows",
        ),
    ],
)
def test_a_fault_in_the_workers_fails_with_its_reason(tmp_path, monkeypatch, fault, overrides, reason):
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(VARIABLE, fault)
    overrides = ["policy.dtensor_cfg._v2=false", "loss_fn.name=planted_faults:gspo", *overrides]
    failure = rehearse(RECIPE, overrides, ranks=2, timeout=1000, folder=tmp_path / "out").outcome.failure
    assert failure.stage == "step"
    assert reason in failure.error


def test_a_preflight_of_a_run_with_a_local_checkpoint_lets_it_go_on(tmp_path):
    overrides = ["policy.dtensor_cfg._v2=false"]
    facts = RecipeFacts.from_recipe(read_recipe(RECIPE, overrides, leave=("data", "env")))
    checkout, log = nemo_rl_root().resolve(), tmp_path / "log.txt"
    planned = plan(facts, folder=tmp_path, options=PlanOptions(checkout=checkout, has_automodel=False))
    write_model(planned.model, tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    with launch_environment(planned) as environment:
        command = [sys.executable, "-m", "tests.tools.rehearse.preflight_driver", str(checkout / planned.script)]
        command += [
            "--config",
            str(RECIPE),
            *overrides,
            *planned.overrides,
            "--preflight",
            "2",
            "--out",
            str(tmp_path / "out"),
        ]
        environment["PYTHONPATH"] = os.pathsep.join([str(RECIPE.parents[2]), environment["PYTHONPATH"]])
        with supervised(command, log=log, environment=environment, folder=tmp_path) as process:
            ended = wait_for(process, 1000)
    assert ended == 0, log.read_text(encoding="utf-8")
    assert "preflight passed; the run goes on" in (tmp_path / "out" / "report.txt").read_text(encoding="utf-8")
    assert log.read_text(encoding="utf-8").count("= Step ") == 3
    assert len(list((tmp_path / "out" / "records").glob("*.parquet"))) == 2
