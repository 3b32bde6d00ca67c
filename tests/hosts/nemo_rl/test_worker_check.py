"""Which environments are asked whether they can load a loss, when, and the error; Ray answers as the test says."""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
from pathlib import Path

import pytest

import nemo_geomask
from nemo_geomask.errors import WorkerError
from nemo_geomask.hosts.nemo_rl import environment_probe, host_api, with_geomask, worker_setup

MEGATRON = {"megatron_cfg": {"enabled": True}}
DTENSOR = {"dtensor_cfg": {"enabled": True}}
FINE = {
    "executable": "/venv/bin/python",
    "python": "3.13.1",
    "host": "node1",
    "version": nemo_geomask.__version__,
    "source": environment_probe.source_hash(Path(nemo_geomask.__file__).parent),
    "errors": {},
}


class Environments:
    """Environments that were asked before the workers start, and their answer."""

    def __init__(self):
        self.asked = []
        self.answer = dict(FINE)

    def on_every_node(self, runtime_env, payload):
        self.asked.append((runtime_env, payload))
        return [self.answer]


@pytest.fixture
def environments(monkeypatch):
    environments = Environments()
    monkeypatch.setattr(worker_setup, "on_every_node", environments.on_every_node)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return environments


@pytest.fixture
def nemo_rl(host):
    loss = host(ray_runs=True)
    algorithm = importlib.import_module("nemo_rl.algorithms.grpo")

    def run(settings, policy):
        config = algorithm.MasterConfig(loss.ClippedPGLossConfig(**settings), policy=policy)
        return with_geomask(algorithm.setup)(config)[0]

    return run


def test_the_environment_of_the_policys_workers_is_asked_before_setup(nemo_rl, environments, monkeypatch):
    nemo_rl({"name": "gspo"}, {**MEGATRON, "megatron_cfg": {"enabled": True, "env_vars": {"PYTHONPATH": "/p"}}})
    ((runtime_env, payload),) = environments.asked
    assert runtime_env == {"py_executable": "/venv/bin/python", "env_vars": {"PYTHONPATH": "/p"}}
    assert pickle.loads(payload).config.name == "gspo"
    monkeypatch.setenv("PYTHONPATH", "/mine")
    nemo_rl({"name": "gspo"}, MEGATRON)
    assert environments.asked[1][0]["env_vars"] == {"PYTHONPATH": "/mine"}


def test_an_environment_that_is_yet_to_be_built_is_asked_when_its_workers_run(nemo_rl, environments):
    policy = nemo_rl({"name": "gspo"}, DTENSOR)
    assert environments.asked == []
    for worker in policy.worker_group.workers:
        assert [name for name, _ in worker.calls] == ["probe_actor"]


def test_an_environment_that_is_built_is_asked(nemo_rl, environments, monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    python = tmp_path / "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    nemo_rl({"name": "gspo"}, DTENSOR)
    assert environments.asked[0][0] == {"py_executable": str(python)}
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    nemo_rl({"name": "gspo"}, DTENSOR)
    assert len(environments.asked) == 1


def test_without_a_name_no_environment_and_no_worker_is_asked(nemo_rl, environments):
    policy = nemo_rl({"token_level_loss": True}, {**MEGATRON, "sequence_packing": {"enabled": True}})
    assert environments.asked == []
    assert [worker.calls for worker in policy.worker_group.workers] == [[], []]


@pytest.mark.parametrize(
    ("worker_class", "receives"),
    [
        ("nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker", True),
        ("nemo_rl.modelopt.models.policy.workers.megatron_quant_policy_worker.MegatronQuantPolicyWorker", True),
        ("my_project.workers.MyWorker", True),
        ("nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker", False),
        ("nemo_rl.models.value.workers.megatron_value_worker.MegatronValueWorker", False),
    ],
)
def test_workers_that_receive_the_loss(worker_class, receives):
    assert host_api.receives_loss(worker_class) is receives


PROBLEMS = {
    "missing": (
        {"errors": {"nemo_geomask": "ModuleNotFoundError: No module named 'nemo_geomask'"}, "version": None},
        "nemo_geomask is not importable there .ModuleNotFoundError",
    ),
    "version": ({"version": "0.0.1"}, f"nemo_geomask is 0.0.1 there and {nemo_geomask.__version__} here"),
    "build": ({"source": "0123456789ab"}, "has other code there .0123456789ab. than here"),
    "plugin": (
        {"errors": {"loss": "ModuleNotFoundError: No module named 'my_losses'"}},
        "the loss can't be opened there .ModuleNotFoundError: No module named 'my_losses'",
    ),
}


@pytest.mark.parametrize("when", ["before setup", "after setup"])
@pytest.mark.parametrize(("answer", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_worker_that_cannot_load_the_loss_is_an_error(nemo_rl, environments, monkeypatch, answer, message, when):
    report = {**FINE, **answer}
    if when == "before setup":
        environments.answer = report
        # Nothing is started.
        monkeypatch.setattr(importlib.import_module("nemo_rl.algorithms.grpo"), "Policy", None)
        subject = "MegatronPolicyWorker can't receive the loss 'gspo'"
    else:
        monkeypatch.setattr(environment_probe, "probe_actor", lambda actor, payload: report)
        subject = "a worker of GeomaskPolicy can't receive the loss 'gspo'"
    with pytest.raises(WorkerError, match=message) as caught:
        nemo_rl({"name": "gspo"}, MEGATRON)
    for words in (
        *(subject, "/venv/bin/python (Python 3.13.1) on node1", "uv add nemo-geomask"),
        "NRL_FORCE_REBUILD_VENVS=true",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "policy", "prepared"),
    [
        ({}, {}, False),
        ({}, {"sequence_packing": {"enabled": True}}, True),
        ({"metrics": "nemo_rl"}, {"sequence_packing": {"enabled": True}}, False),
        ({"logprob_backend": "geomask"}, {}, True),
    ],
    ids=["padded", "packed", "packed sums", "kernels"],
)
def test_workers_are_prepared_where_the_loss_needs_it(nemo_rl, environments, caplog, settings, policy, prepared):
    caplog.set_level(logging.INFO, "nemo_geomask")
    workers = nemo_rl({"name": "gspo", **settings}, {**MEGATRON, **policy}).worker_group.workers
    for worker in workers:
        assert [name for name, _ in worker.calls] == ["probe_actor", *(["_prepare_actor"] if prepared else [])]
    assert ("policy workers: 2 on CPU" in caplog.messages) is prepared


def test_the_probe_loads_a_loss_and_reports_what_fails():
    report = environment_probe.probe(pickle.dumps(nemo_geomask.build_loss({"name": "gspo"})))
    assert report["version"] == nemo_geomask.__version__
    assert "loss" not in report["errors"]
    assert report["executable"] == sys.executable
    assert report["packages"]["torch"][0].startswith("2.")
    assert report["packages"]["nemo_geomask"][1].endswith("__init__.py")
    assert ("gspo", "nemo-geomask") in {(name, distribution) for name, _, distribution in report["losses"]}
    assert environment_probe.probe(b"cno_such_module\nname\n.")["errors"]["loss"].startswith(
        "ModuleNotFoundError: No module named"
    )


def test_the_hash_of_a_package_tells_builds_apart(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("x = 1")
    first = environment_probe.source_hash(tmp_path)
    (tmp_path / "part" / "notes.txt").write_text("x")
    assert environment_probe.source_hash(tmp_path) == first
    (tmp_path / "part" / "a.py").write_text("x = 2")
    assert environment_probe.source_hash(tmp_path) != first
