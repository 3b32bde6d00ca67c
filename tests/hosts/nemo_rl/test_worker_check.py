"""Which workers are asked whether they can open a loss, when, and what is said; Ray's answer is given."""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
import types

import pytest

import nemo_geomask
from nemo_geomask.hosts.nemo_rl import WorkerError, environment_probe, worker_setup

MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
FINE = {"executable": "/venv/bin/python", "python": "3.13.1", "host": "node1", "version": nemo_geomask.__version__}


@pytest.fixture
def asked(monkeypatch):
    """Runtime environments that were asked; what they answer can be changed by ``asked.answer``."""

    class Asked(list):
        answer = None

    seen = Asked()
    seen.answer = {**FINE, "errors": {}}

    def on_every_node(runtime_env, payload):
        seen.append((runtime_env, payload))
        return [seen.answer]

    monkeypatch.setattr(worker_setup, "on_every_node", on_every_node)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(cloudpickle=pickle, get=list))
    return seen


@pytest.fixture
def nemo_rl(host):
    loss = host()
    nemo_geomask.install()
    builder = importlib.import_module("nemo_rl.distributed.worker_groups").RayWorkerBuilder

    class NemoRl:
        started = builder.IsolatedWorkerInitializer.started

        def build(self, **settings):
            return loss.ClippedPGLossFn(loss.ClippedPGLossConfig(**settings))

        def start(self, actor, **options):
            # v0.6.0 looks the initializer up on an instance, later versions on the class.
            initializer = builder().IsolatedWorkerInitializer.options(num_cpus=0).remote(actor, "config", key=1)
            assert initializer.create_worker.remote("group", 0, 1, **options) == (("group", 0, 1), options)

    return NemoRl()


PYTHON = {"runtime_env": {"py_executable": "/venv/bin/python", "env_vars": {"PYTHONPATH": "/p"}}}


@pytest.mark.parametrize("order", ["loss first", "workers first"])
def test_each_environment_is_asked_once_for_each_loss(nemo_rl, asked, order):
    if order == "loss first":
        loss = nemo_rl.build(name="gspo")
    for _ in range(3):
        nemo_rl.start(MEGATRON, **PYTHON)
    if order == "workers first":
        assert asked == []
        loss = nemo_rl.build(name="gspo")
    ((runtime_env, payload),) = asked
    assert runtime_env == PYTHON["runtime_env"]
    assert pickle.loads(payload).config == loss.config
    assert nemo_rl.started == [MEGATRON] * 3

    nemo_rl.start(MEGATRON)
    assert asked[1][0] == {}
    nemo_rl.build(name="cispo")
    assert len(asked) == 4


def test_without_a_name_nobody_is_asked(nemo_rl, asked):
    nemo_rl.build(token_level_loss=True)
    nemo_rl.start(MEGATRON, **PYTHON)
    assert asked == []


@pytest.mark.parametrize(
    ("actor", "receives"),
    [
        (MEGATRON, True),
        ("nemo_rl.modelopt.models.policy.workers.megatron_quant_policy_worker.MegatronQuantPolicyWorker", True),
        ("my_project.workers.MyWorker", True),
        ("nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker", False),
        ("nemo_rl.models.value.workers.megatron_value_worker.MegatronValueWorker", False),
    ],
)
def test_only_workers_that_receive_the_loss_are_asked(nemo_rl, asked, actor, receives):
    nemo_rl.build(name="gspo")
    nemo_rl.start(actor, **PYTHON)
    assert bool(asked) is receives


PROBLEMS = {
    "missing": (
        {"errors": {"nemo_geomask": "ModuleNotFoundError: No module named 'nemo_geomask'"}, "version": None},
        "nemo_geomask is not importable there .ModuleNotFoundError",
    ),
    "version": ({"version": "0.0.1"}, f"nemo_geomask is 0.0.1 there and {nemo_geomask.__version__} here"),
    "plugin": (
        {"errors": {"loss": "ModuleNotFoundError: No module named 'my_losses'"}},
        "the loss can't be opened there .ModuleNotFoundError: No module named 'my_losses'",
    ),
}


@pytest.mark.parametrize(("answer", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_worker_that_cannot_open_the_loss_is_not_started(nemo_rl, asked, answer, message):
    asked.answer = {**asked.answer, **answer}
    nemo_rl.build(name="gspo")
    with pytest.raises(WorkerError, match=message) as caught:
        nemo_rl.start(MEGATRON, **PYTHON)
    assert nemo_rl.started == []
    for words in ("/venv/bin/python (Python 3.13.1) on node1", "uv add nemo-geomask", "NRL_FORCE_REBUILD_VENVS=true"):
        assert words in str(caught.value)
    # Asked again when it is tried again.
    asked.answer = {**FINE, "errors": {}}
    nemo_rl.start(MEGATRON, **PYTHON)
    assert nemo_rl.started == [MEGATRON]


class Actor:
    """As Ray's: a call is remembered, and run as the actor's process would."""

    def __init__(self):
        self.told = []

    @property
    def __ray_call__(self):
        return types.SimpleNamespace(remote=self._run)

    def _run(self, function, *arguments):
        self.told.append(arguments)
        return pickle.loads(pickle.dumps(function))(self, *arguments)


@pytest.fixture
def groups(asked):
    module = importlib.import_module("nemo_rl.distributed.worker_groups")

    def start(actor, size=2):
        actors = [Actor() for _ in range(size)]
        return module.RayWorkerGroup(actors, remote_worker_builder=module.RayWorkerBuilder(actor)), actors

    return start


def test_workers_are_prepared_once_there_are_both_they_and_a_loss(nemo_rl, groups, caplog):
    caplog.set_level(logging.INFO, "nemo_geomask")
    first, early = groups(MEGATRON)
    _, value = groups("nemo_rl.models.value.workers.megatron_value_worker.MegatronValueWorker")
    assert [actor.told for actor in early] == [[], []]
    nemo_rl.build(name="gspo")
    assert [actor.told for actor in early] == [[({"nemo_rl"},)]] * 2
    second, late = groups(MEGATRON)
    assert [actor.told for actor in late] == [[({"nemo_rl"},)]] * 2
    nemo_rl.build(name="gspo", logprob_backend="geomask")
    assert [actor.told for actor in early + late] == [[({"nemo_rl"},), ({"geomask"},)]] * 4
    nemo_rl.build(name="gspo", logprob_backend="geomask_linear")
    assert [actor.told[2:] for actor in early + late] == [[({"geomask_linear"},)]] * 4
    assert [actor.told for actor in value] == [[], []]
    assert (first.workers, second.workers) == (early, late)
    assert "policy workers: 2 on CPU" in caplog.messages


def test_without_a_name_no_worker_is_prepared(nemo_rl, groups):
    nemo_rl.build(token_level_loss=True)
    _, actors = groups(MEGATRON)
    assert [actor.told for actor in actors] == [[], []]


def test_uninstall_forgets(nemo_rl, asked):
    nemo_rl.build(name="gspo")
    nemo_geomask.uninstall()
    nemo_rl.start(MEGATRON, **PYTHON)
    nemo_geomask.install()
    nemo_rl.start(MEGATRON, **PYTHON)
    assert asked == []


def test_the_probe_opens_a_loss_and_says_what_fails():
    report = environment_probe.probe(pickle.dumps(nemo_geomask.build_loss({"name": "gspo"})))
    assert report["version"] == nemo_geomask.__version__
    assert "loss" not in report["errors"]
    assert report["packages"]["torch"][0].startswith("2.")
    assert report["packages"]["nemo_geomask"][1].endswith("__init__.py")
    assert ("gspo", "nemo_geomask.losses.variants:GSPO", "nemo-geomask") in report["losses"]
    assert environment_probe.probe(b"cno_such_module\nname\n.")["errors"]["loss"].startswith(
        "ModuleNotFoundError: No module named"
    )
