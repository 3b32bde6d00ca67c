"""Runs on the disk: what is written comes back, folders add up, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("pyarrow", reason="the lab writes Parquet (demo extra)")
pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")

import yaml

from nemo_geomask import build_loss
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.checkpoint import find_checkpoint
from nemo_geomask.tools.lab.run_store import Run, RunCurves, read_curves, write_steps
from nemo_geomask.tools.lab.train_recipe import choose_jobs, plan_runs, report_runs
from nemo_geomask.tools.lab.trainer import Trainer
from tests.tools.lab.tiny_recipe import TINY

TIMINGS = {"generation_seconds", "step_seconds"}
FACTS = {"corrected": False, "chance": 0.2, "sampler": "copy", "precision": "float32"}


def test_steps_come_back_as_they_were(tiny, tmp_path):
    run = Run("gspo:none", tiny(), tmp_path)
    history = [{"reward": 0.1, "loss": math.inf}, {"reward": 1 / 3, "extra": -1.0, "loss": math.nan}]
    write_steps(run, history[:1], FACTS)
    assert not run.finished
    write_steps(run, history, FACTS)
    assert run.finished
    curve = RunCurves.read(run.steps_file)
    assert (curve.label, curve.seed, curve.steps, curve.facts["chance"]) == ("gspo:none", 3, 2, 0.2)
    assert curve.series("reward") == [0.1, 1 / 3]
    assert curve.series("loss")[0] == math.inf
    assert [math.isnan(value) for value in (*curve.series("extra"), *curve.series("none"))] == [True, False, True, True]
    assert math.isnan(curve.series("loss")[1])
    # Written again after a step more, nothing is lost, and what was missing is missing.
    write_steps(run, [*curve.history, {"reward": 0.0}], FACTS)
    assert RunCurves.read(run.steps_file).series("reward") == [0.1, 1 / 3, 0.0]
    assert pytest.importorskip("pyarrow.parquet").read_table(run.steps_file)["extra"].to_pylist() == [None, -1.0, None]


def test_folders_add_up_and_equal_labels_are_told_apart(tiny, tmp_path):
    for place, lr, seeds in (("one", 1e-3, (1, 2)), ("two", 1e-3, (2, 3)), ("two", 2e-3, (1,))):
        for seed in seeds:
            run = Run("gspo", tiny(grpo={"seed": seed}, policy={"lr": lr}), tmp_path / place)
            write_steps(run, [{"reward": 0.5}] * (1 + (place == "two")), FACTS)
    curves = read_curves([tmp_path])
    assert [(curve.label, curve.seed, curve.steps) for curve in curves] == [
        ("gspo", 1, 1),
        ("gspo", 2, 2),
        ("gspo", 3, 2),
        ("gspo policy.lr=0.002", 1, 2),
    ]
    assert len(read_curves([tmp_path / "one", tmp_path / "two" / "steps"])) == 4
    assert [curve.label for curve in read_curves([tmp_path / "one"])] == ["gspo"] * 2


def test_the_first_folders_variant_keeps_its_name(tiny, tmp_path):
    for place, lr, seed in (("one", 2e-3, 2), ("two", 1e-3, 1)):
        write_steps(
            Run("gspo", tiny(grpo={"seed": seed}, policy={"lr": lr}), tmp_path / place), [{"reward": 0.5}], FACTS
        )
    for first, other, named in (("one", "two", "policy.lr=0.001"), ("two", "one", "policy.lr=0.002")):
        curves = read_curves([tmp_path / first, tmp_path / other])
        assert [curve.label for curve in curves] == ["gspo", f"gspo {named}"]


def test_a_folder_without_runs_beside_one_with_is_said(tiny, tmp_path):
    write_steps(Run("gspo", tiny(), tmp_path / "one"), [{"reward": 0.5}], FACTS)
    with pytest.raises(ConfigError, match=r"no run of the lab in .*/tow;"):
        read_curves([tmp_path / "one", tmp_path / "tow"])


def test_a_report_into_a_file_is_a_mistake(tmp_path):
    (tmp_path / "afile").touch()
    for out in (tmp_path / "afile", tmp_path / "afile" / "below"):
        with pytest.raises(ConfigError, match="--out: the folder .*afile.* can't be created"):
            report_runs([str(tmp_path)], baseline=None, out=out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"policy": {"warmup_steps": 6}, "loss_fn": {"reference_policy_kl_penalty": 0.1}, "grpo": {"val_period": 2}},
        {
            "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}},
            "loss_fn": {"batch_veto": {"max": 1e-12, "max_in_a_row": 9}},
        },
    ],
    ids=["reference", "asynchronous"],
)
def test_a_restored_trainer_takes_the_course_of_one_that_went_on(tiny, tmp_path, change):
    recipe = tiny(**change)
    whole = Trainer(recipe, build_loss(recipe.loss_fn))
    for _ in range(2):
        whole.step()
    torch.save(whole.state(), tmp_path / "state.pt")
    other = Trainer(recipe, build_loss(recipe.loss_fn))
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(2):
        (expected, _), (found, _) = whole.step(), other.step()
        assert {key: found[key] for key in found.keys() - TIMINGS} == {
            key: expected[key] for key in expected.keys() - TIMINGS
        }
    for mine, theirs in zip(other.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.state()["vetoed"] == whole.state()["vetoed"]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_curve_and_loses_a_step_at_most(tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    common = ["lab", str(recipe), "--steps", "15", "--jobs", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    (run,) = plan_runs(recipe, ["grpo.max_num_steps=15"], compare=None, vary=(), seeds=None, loss_from=None, out=killed)
    command = [sys.executable, "-m", "nemo_geomask.cli", *common, "--out", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not run.state_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before = RunCurves.read(run.steps_file)
    assert not before.finished
    assert find_checkpoint(run).step >= before.steps - 1
    for out in (killed, whole):
        assert main([*common, "--out", str(out)]) == 0
    assert run.finished
    assert not run.state_file.exists()
    ((one,), (other,)) = (read_curves([out]) for out in (whole, killed))
    assert one.columns.keys() == other.columns.keys()
    for key in one.columns.keys() - TIMINGS:
        assert one.series(key) == pytest.approx(other.series(key), rel=0, abs=0, nan_ok=True), key
    assert other.series("reward")[: before.steps] == before.series("reward")


def test_a_gpu_that_torch_does_not_see_is_an_error_before_any_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({**TINY, "lab": {"device": "cuda"}}))
    assert main(["lab", str(recipe), "--out", str(tmp_path / "out")]) == 2
    assert "lab.device: cuda, but torch" in (text := capsys.readouterr().err)
    assert "sees no GPU; set cpu, or install" in text
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_device_goes_on_but_is_not_compared_as_the_same(tiny, tmp_path):
    on_cpu, on_gpu = (Run("gspo:none", tiny(lab={"device": device}), tmp_path / device) for device in ("cpu", "cuda"))
    assert on_cpu.name == on_gpu.name
    for run, ranks in ((on_cpu, {}), (on_gpu, {"device": "cuda"})):
        write_steps(run, [{"reward": 0.1}], {**FACTS, "ranks": ranks})
    labels = [curves.label for curves in read_curves([tmp_path / "cpu", tmp_path / "cuda"])]
    assert labels == ["gspo:none", "gspo:none lab.device=cuda"]


def test_one_run_at_a_time_has_a_gpu_unless_more_are_requested(tiny, tmp_path):
    runs = [Run("gspo:none", tiny(lab={"device": "cuda"}), tmp_path)]
    assert [choose_jobs(requested, runs) for requested in (None, 1, 3)] == [1, 1, 3]
