"""Mistakes planted in real rehearsals: each ends with a status that is not 0, and a sentence that names it.

:mod:`tests.tools.rehearse.planted` has the mistakes of samplers and plugins. Each rehearsal takes one to three minutes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.tools.rehearse.real_runs import needs_nemo_rl

pytestmark = needs_nemo_rl

PLANTED = Path(__file__).parent / "planted"
DENSE = ["policy.dtensor_cfg._v2=false", "loss_fn.masks=[{preset: geometric, min: 0.5, max: 2.0}]"]


def planted(mistake):
    path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PLANTED_MISTAKE": mistake}


def worker_counts(events):
    return [event for event in events if event["kind"] == "worker_counts"]


def test_without_a_mistake_there_is_none(rehearsal):
    run = rehearsal(*DENSE, environment=planted("none"))
    assert run.wait() == 0, run.text()
    found = run.found()
    assert found["unmet"] == []
    assert found["diagnosis"]["cause"] == ""
    assert [event["differences"] for event in found["weights"]] == [[], [], []]


@pytest.mark.parametrize(
    ("mistake", "stage", "sentence", "setting"),
    [
        ("temperature", "log-probs", "another temperature in the sampler than in the trainer", "temperature"),
        ("top_p", "log-probs", "renormalised by top-p or top-k in the sampler only", "top_p"),
        ("shift", "log-probs", "shifted by one token", "policy.generation"),
        ("frozen", "refit", "after refit 2 the engine does not hold the trainer's weights", "policy.generation"),
    ],
)
def test_a_mistake_in_the_sampler(rehearsal, mistake, stage, sentence, setting):
    run = rehearsal(*DENSE, environment=planted(mistake))
    assert run.wait() == 1, run.text()
    failure = run.found()["failure"]
    assert failure["stage"] == stage
    assert sentence in failure["error"]
    assert setting in failure["setting"]
    assert f"failed in {stage}: " in run.text()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("planted_mistakes:NAN", "the plugin planted_mistakes:NAN computed it"),
        ("planted_mistakes:RAISES", "the planted plugin fails on real batches"),
    ],
)
def test_a_mistake_in_a_plugin(rehearsal, name, sentence):
    run = rehearsal(*DENSE, f"loss_fn.name={name}", environment=planted("none"))
    assert run.wait() == 1, run.text()
    failure = run.found()["failure"]
    assert failure["stage"] == "step"
    assert sentence in failure["error"]
    assert failure["setting"] == "loss_fn.name"


def test_a_link_in_place_of_the_records_folder(rehearsal, tmp_path):
    run = rehearsal(*DENSE)
    assert run.wait(lambda events: bool(events)) is None, run.text()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "records").symlink_to(tmp_path / "elsewhere")
    assert run.wait() == 1, run.text()
    failure = run.found()["failure"]
    assert failure["error"].startswith("the record of step 1, 2, 3 was lost: ")
    assert "symbolic link" in failure["error"]
    assert failure["setting"] == "loss_fn.record.dir"


def test_a_worker_that_is_killed(rehearsal):
    run = rehearsal(*DENSE)
    assert run.wait(lambda events: len(worker_counts(events)) > 1) is None, run.text()
    events = (run.folder / "out" / "events.jsonl").read_text(encoding="utf-8")
    os.kill(int(events.rpartition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)
    assert run.wait() == 1, run.text()
    failure = run.found()["failure"]
    assert failure["setting"] == "this machine's memory"
    assert "killed" in failure["fix"]
    assert run.left() == []
