"""``nemo-geomask doctor``."""

from __future__ import annotations

import sys

import pytest

import nemo_geomask
from nemo_geomask.cli import main
from nemo_geomask.integrations.nemo_rl import diagnosis
from nemo_geomask.losses.registry import Entry

OWN = nemo_geomask.__version__
REGISTRY = """
import sys
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.a.Built": "uv run --extra mcore",
    "nemo_rl.models.policy.workers.a.Unbuilt": "uv run --extra mcore",
    "nemo_rl.models.policy.workers.a.Drivers": sys.executable,
    "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker": "uv run --extra vllm",
}
"""


@pytest.fixture
def registered(host, tmp_path, monkeypatch):
    host()
    folder = tmp_path / "nemo_rl"
    (folder / "distributed" / "ray_actor_environment_registry.py").write_text(REGISTRY, encoding="utf-8")
    (folder / "utils").mkdir()
    (folder / "utils" / "__init__.py").touch()
    (folder / "utils" / "venvs.py").write_text("DEFAULT_VENV_DIR = '/default'", encoding="utf-8")
    python = tmp_path / "venvs" / "nemo_rl.models.policy.workers.a.Built" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "venvs"))
    return python


def test_all_is_well(registered, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"driver: {sys.executable}"
    for words in (
        "nemo_rl        9.8.7",
        "ok      nemo_rl.algorithms.grpo builds ClippedPGLossFn(cfg)",
        "absent  nemo_rl.algorithms.ppo builds ClippedPGLossFn(cfg)",
        "gspo         nemo_geomask.losses.variants:GSPO (nemo-geomask)",
        "workers.a.Unbuilt: not built yet",
        "workers.a.Drivers\n",
    ):
        assert words in printed
    assert "VllmGenerationWorker" not in printed
    assert printed.count("entry points: ") == 3  # the driver, Built and Drivers
    assert printed.endswith("all is well\n")


def test_a_worker_without_the_package(registered, capsys):
    # -S leaves site-packages out, and with them everything but the standard library.
    registered.write_text(f'#!/bin/sh\ncd / && exec {sys.executable} -S "$@"\n', encoding="utf-8")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem 1: nemo_rl.models.policy.workers.a.Built: nemo_geomask is not importable in" in printed
    assert "uv add nemo-geomask" in printed
    assert "problem 2" not in printed


def test_a_worker_of_another_version(registered, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis.nemo_geomask, "__version__", "9.9.9")
    assert main(["doctor", "--worker", sys.executable]) == 1
    printed = capsys.readouterr().out
    assert f"--worker {sys.executable}: nemo_geomask is {OWN} in {sys.executable} on" in printed
    assert "but 9.9.9 in the driver; make them the same" in printed


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_an_interpreter_that_does_not_run(host, tmp_path, capsys, how):
    host()
    python = tmp_path / "python"
    if how == "broken":
        python.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n", encoding="utf-8")
        python.chmod(0o755)
    assert main(["doctor", "--worker", str(python)]) == 1
    printed = capsys.readouterr().out
    assert f"problem 1: --worker {python}: {python} does not run: " in printed
    assert ("no space left" if how == "broken" else "No such file") in printed


def test_a_wrong_seam(host, capsys):
    host(call="make(config)")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "wrong   nemo_rl.algorithms.grpo builds ClippedPGLossFn(cfg): does not call" in printed
    assert "problem 1: NeMo-RL 9.8.7: nemo_rl.algorithms.grpo builds" in printed


def test_without_nemo_rl(host, monkeypatch, capsys):
    monkeypatch.setattr(diagnosis.seams.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    assert "problem 1: NeMo-RL is not importable here" in capsys.readouterr().out


def test_a_name_claimed_twice(registered, capsys, monkeypatch):
    entries = {"x": (Entry("x", "a:X", "one"), Entry("x", "b:X", "two"))}
    monkeypatch.setattr(diagnosis, "available", lambda: entries)
    assert main(["doctor"]) == 1
    assert "problem 1: loss_fn.name: 'x' is registered by one and two; uninstall one of them" in capsys.readouterr().out


def test_ray_that_is_not_there(host, monkeypatch, capsys):
    host()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["doctor", "--ray"]) == 2
    assert "--ray needs Ray" in capsys.readouterr().err
