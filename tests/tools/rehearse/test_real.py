"""Real rehearsals: NeMo-RL's own script and workers. Needs NeMo-RL's environment with vLLM, on CPUs or GPUs."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

from tests.tools.rehearse.real_runs import MOE, needs_nemo_rl

pytestmark = needs_nemo_rl


def test_three_steps_of_a_tiny_mixture_of_experts(rehearsal, tmp_path):
    # The recipe's bounds, of 1% and less, may leave nothing of an optimiser step of a random model.
    wide = ["loss_fn.masks=[{preset: geometric, min: 0.5, max: 2.0}]"]
    wide += ["loss_fn.ratio_clip_min=0.2", "loss_fn.ratio_clip_max=0.28"]
    run = rehearsal(MOE, *wide, "--steps", "3", "--timeout", "900")
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
    run = rehearsal(MOE)
    assert run.wait(lambda events: any(str(event.get("label")).endswith("Policy") for event in events)) is None, (
        run.text()
    )
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert len(run.seen) > 5
    assert run.left() == []


def test_nothing_is_left_when_the_time_is_over(rehearsal, tmp_path):
    run = rehearsal(MOE, "--timeout", "45")
    assert run.wait() == 1
    failure = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["failure"]
    assert failure["setting"] == "--timeout"
    assert failure["stage"] in ("start", "workers")
    assert run.left() == []
    settings = json.loads((tmp_path / "out" / "settings.json").read_text(encoding="utf-8"))
    assert not Path(settings["ray"]).exists()


def test_a_mistake_that_only_nemo_rl_sees_names_its_setting(rehearsal, tmp_path):
    run = rehearsal(MOE, "++policy.optimizer.name=torch.optim.NoSuch")
    assert run.wait() == 1, run.text()
    failure = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["failure"]
    assert failure["stage"] == "workers"
    assert "NoSuch" in failure["error"]
    assert failure["setting"] == "policy.optimizer.name"
    assert "Traceback" in run.text()
    assert run.left() == []


def test_a_validated_run_is_resumed_with_the_same_samples(rehearsal, tmp_path):
    settings = ["policy.dtensor_cfg._v2=false", "loss_fn.masks=[]", "checkpointing.enabled=true"]
    settings += ["checkpointing.model_save_format=null", "++logger.tensorboard_enabled=true"]
    run = rehearsal(*settings, "--steps", "2", "--validate", "--resume")
    assert run.wait() == 0, run.text()
    compared = run.found()["resumed"]["comparisons"]
    assert compared
    assert all(each["sampled_alike"] and each["equal"] for each in compared)
    states = {stage["name"]: stage["state"] for stage in run.found()["stages"]}
    assert states["val"] == "ran"
    assert list((tmp_path / "out" / "logs").rglob("events.out.tfevents.*"))
