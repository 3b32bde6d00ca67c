"""Checkpoints of the lab: damage is detected and named, and a run resumes from the checkpoint before."""

from __future__ import annotations

import hashlib
import io
import os

import pytest
import torch

pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")

import yaml

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.checkpoint import find_checkpoint, remove_checkpoints, write_checkpoint
from nemo_geomask.tools.lab.run_store import Run, read_curves
from tests.tools.lab.tiny_recipe import TINY

TIMINGS = {"generation_seconds", "step_seconds"}


def state_of(step):
    return {"policy": {"weight": torch.full((50,), float(step))}, "counts": (step, step)}


@pytest.fixture
def run(tiny, tmp_path):
    """A run with checkpoints of steps 1 and 2."""
    run = Run("gspo", tiny(), tmp_path)
    run.folder.mkdir(parents=True)
    for step in (1, 2):
        write_checkpoint(run, step, state_of(step))
    return run


def test_the_last_two_checkpoints_are_kept(run):
    write_checkpoint(run, 3, state_of(3))
    checkpoint, warning = find_checkpoint(run)
    assert (checkpoint.step, checkpoint.path, warning) == (3, run.state_file, "")
    assert checkpoint.state["counts"] == (3, 3)
    assert sorted(path.name for path in run.folder.iterdir()) == ["state.previous.pt", "state.pt"]
    run.state_file.unlink()  # as if the process ended between the two replacements
    assert find_checkpoint(run)[0].step == 2
    remove_checkpoints(run)
    assert find_checkpoint(run) == (None, "")


def flips_a_bit(place):
    def damage(run):
        content = bytearray(run.state_file.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        run.state_file.write_bytes(content)

    return damage


def truncates(fraction):
    return lambda run: os.truncate(run.state_file, int(fraction * run.state_file.stat().st_size))


def holds(content):
    """Damage: another content, with its hash."""

    def damage(run):
        buffer = io.BytesIO()
        torch.save({"run": run.name, **content} if isinstance(content, dict) else content, buffer)
        header = run.state_file.read_bytes().partition(b"\n")[0] + b"\n"
        run.state_file.write_bytes(header + hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())

    return damage


def is_replaced(make):
    def damage(run):
        run.state_file.unlink()
        make(run.state_file)

    return damage


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


FOREIGN, CHANGED, NO_STATE = (
    "is damaged, or another version of the lab wrote it",
    "does not match its hash: it was truncated or changed",
    "does not hold the state of a run",
)
DAMAGE = {
    **{f"bit at {place}": (flips_a_bit(place), FOREIGN if place < 0.01 else CHANGED) for place in (0, 0.03, 0.5, 1)},
    **{f"cut at {part}": (truncates(part), FOREIGN if part < 0.01 else CHANGED) for part in (0.005, 0.03, 0.999)},
    "empty": (truncates(0), "is empty"),
    "earlier version": (lambda run: torch.save({"step": 2}, run.state_file), FOREIGN),
    "code": (holds({"step": 2, "state": Malicious()}), NO_STATE),
    "no state": (holds({"step": 2}), NO_STATE),
    "no number": (holds({"step": "two", "state": {}}), NO_STATE),
    "a list": (holds([1, 2]), NO_STATE),
    "another run": (holds({"run": "cispo", "step": 2, "state": {}}), "belongs to another run"),
    "a folder": (is_replaced(lambda path: path.mkdir()), "is not a file"),
    "a FIFO": (is_replaced(os.mkfifo), "is not a file"),
    "a device": (is_replaced(lambda path: path.symlink_to("/dev/zero")), "is not a file"),
    "a broken link": (is_replaced(lambda path: path.symlink_to("nowhere")), "can't be read (No such file or directory"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run, tmp_path, monkeypatch, damage, reason):
    monkeypatch.chdir(tmp_path)
    damage(run)
    checkpoint, warning = find_checkpoint(run)
    assert checkpoint.step == 1
    assert torch.equal(checkpoint.state["policy"]["weight"], torch.full((50,), 1.0))
    assert warning.startswith(f"{run.state_file} {reason}")
    assert warning.endswith("; resuming from state.previous.pt, after step 1.")
    assert not (tmp_path / "executed").exists()
    run.previous_state_file.unlink()
    with pytest.raises(ConfigError, match="Remove state.pt there to train the run again from its first step"):
        find_checkpoint(run)


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupted_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path, monkeypatch, capsys):
    for module in ("transformers", "pyarrow", "rich", "matplotlib"):
        pytest.importorskip(module, reason="the lab trains (demo extra)")
    from nemo_geomask.tools.lab import trainer

    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    command = ["lab", str(recipe), "--steps", "5", "--jobs", "1", "--out"]
    steps = []
    with monkeypatch.context() as patched:
        step = trainer.Trainer.step

        def interrupted(self):
            if len(steps) == 3:
                raise KeyboardInterrupt
            steps.append(1)
            return step(self)

        patched.setattr(trainer.Trainer, "step", interrupted)
        assert main([*command, str(tmp_path / "resumed")]) == 130
    (latest,) = (tmp_path / "resumed").rglob("state.pt")
    (previous,) = (tmp_path / "resumed").rglob("state.previous.pt")
    intact = previous.read_bytes()
    for path in (latest, previous):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    capsys.readouterr()
    assert main([*command, str(tmp_path / "resumed")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{latest} does not match its hash" in error
    assert "Traceback" not in error

    previous.write_bytes(intact)
    assert main([*command, str(tmp_path / "resumed")]) == 0
    printed = "".join(capsys.readouterr().out.split())
    assert "resumingfromstate.previous.pt,afterstep2." in printed
    assert main([*command, str(tmp_path / "whole")]) == 0
    ((one,), (other,)) = (read_curves([tmp_path / name]) for name in ("resumed", "whole"))
    assert one.steps == 5
    for key in one.columns.keys() - TIMINGS:
        assert one.series(key) == pytest.approx(other.series(key), rel=0, abs=0, nan_ok=True), key
    assert not latest.exists()
    assert not previous.exists()


@pytest.mark.slow
def test_states_that_do_not_fit_the_run_are_named_before_a_step(tmp_path, capsys):
    for module in ("transformers", "pyarrow", "rich", "matplotlib"):
        pytest.importorskip(module, reason="the lab trains (demo extra)")
    from nemo_geomask import build_loss
    from nemo_geomask.tools.lab.run_store import write_steps
    from nemo_geomask.tools.lab.train_recipe import plan_runs
    from nemo_geomask.tools.lab.trainer import Trainer

    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump({**TINY, "grpo": {**TINY["grpo"], "max_num_steps": 5}}), encoding="utf-8")
    out = tmp_path / "out"
    (planned,) = plan_runs(recipe, [], compare=None, vary=(), seeds=None, loss_from=None, out=out)
    planned.folder.mkdir(parents=True)
    facts = {"corrected": False, "chance": 0.2, "sampler": "copy", "precision": "float32"}
    write_steps(planned, [{"reward": 0.1}], facts)
    write_checkpoint(planned, 2, Trainer(planned.recipe, build_loss(planned.recipe.loss_fn)).state())
    command = ["lab", str(recipe), "--jobs", "1", "--out", str(out)]
    assert main(command) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{planned.steps_file} has 1 steps, but the checkpoint in {planned.folder} is of step 2" in error
    write_checkpoint(planned, 1, {"policy": {}})
    assert main(command) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{planned.state_file} does not hold the state of this run (KeyError). Remove it" in error
