"""Checkpoints of the lab: damage is detected and named."""

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
from nemo_geomask.tools.lab.checkpoint import find_checkpoint, remove_checkpoint, write_checkpoint
from nemo_geomask.tools.lab.run_store import Run
from tests.tools.lab.tiny_recipe import TINY


@pytest.fixture
def run(tiny, tmp_path):
    """A run with a checkpoint of step 2."""
    run = Run("gspo", tiny(), tmp_path)
    run.folder.mkdir(parents=True)
    for step in (1, 2):
        write_checkpoint(run, step, {"policy": {"weight": torch.full((50,), float(step))}, "counts": (step, step)})
    return run


def test_the_last_checkpoint_is_kept_until_the_run_is_finished(run):
    checkpoint = find_checkpoint(run)
    assert (checkpoint.step, checkpoint.state["counts"]) == (2, (2, 2))
    assert torch.equal(checkpoint.state["policy"]["weight"], torch.full((50,), 2.0))
    (run.folder / ".state.pt.0123.part").touch()  # of a process that was killed
    remove_checkpoint(run)
    assert find_checkpoint(run) is None
    assert not list(run.folder.iterdir())


def flips_a_bit(run):
    content = bytearray(run.state_file.read_bytes())
    content[len(content) // 2] ^= 1
    run.state_file.write_bytes(content)


def holds(content):
    """Damage: another content, with its hash."""

    def damage(run):
        buffer = io.BytesIO()
        torch.save({"run": run.name, **content}, buffer)
        run.state_file.write_bytes(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())

    return damage


def is_fifo(run):
    run.state_file.unlink()
    os.mkfifo(run.state_file)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flips_a_bit, "it does not match its hash"),
        (lambda run: os.truncate(run.state_file, 1000), "it does not match its hash"),
        (lambda run: os.truncate(run.state_file, 0), "it does not match its hash"),
        (holds({"step": 2, "state": Malicious()}), "UnpicklingError"),
        (holds({"step": 2}), "KeyError"),
        (holds({"run": "cispo", "step": 2, "state": {}}), "it belongs to another run"),
        (is_fifo, "is a FIFO, not a regular file"),
    ],
)
def test_a_damaged_checkpoint_is_named(run, tmp_path, monkeypatch, damage, reason):
    monkeypatch.chdir(tmp_path)
    damage(run)
    with pytest.raises(ConfigError, match=rf"can't be resumed from .*{run.name}/state\.pt: .*{reason}.*\. Remove that"):
        find_checkpoint(run)
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_states_that_do_not_fit_the_run_are_named_before_a_step(tmp_path, capsys):
    for module in ("transformers", "pyarrow", "matplotlib"):
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
    assert f"{planned.steps_file} has 1 steps, but {planned.state_file} is of step 2" in error
    write_checkpoint(planned, 1, {"policy": {}})
    assert main(command) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{planned.state_file} does not hold the state of this run (KeyError). Remove it" in error
