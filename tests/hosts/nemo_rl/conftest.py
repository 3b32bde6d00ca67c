from __future__ import annotations

import importlib
import sys
import types

import pytest

import nemo_geomask
from nemo_geomask.hosts.nemo_rl import uninstall
from tests.helpers.nemo_rl import fake_policies, fake_tree


def _forget():
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("nemo_rl", "ray")}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """``host(**how)`` puts a NeMo-RL of a few lines on the path; ``host.module(name)`` imports from it."""
    others = _forget()

    def make(**how):
        monkeypatch.syspath_prepend(str(fake_tree.write(tmp_path, **how)))
        return importlib.import_module("nemo_rl.algorithms.loss.loss_functions")

    yield make
    uninstall()
    _forget()
    sys.modules.update(others)


@pytest.fixture
def install(monkeypatch):
    """``install()`` is that of a script that has imported ``setup`` of GRPO; returns the script's ``setup``."""

    def call():
        main = types.ModuleType("__main__")
        main.setup = importlib.import_module("nemo_rl.algorithms.grpo").setup
        monkeypatch.setitem(sys.modules, "__main__", main)
        nemo_geomask.install()
        return main.setup

    return call


@pytest.fixture
def nemo_rl(monkeypatch):
    """Modules of NeMo-RL with the policies of :mod:`tests.helpers.nemo_rl.fake_policies`."""
    modules = fake_policies.make_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield types.SimpleNamespace(
        lm=modules["nemo_rl.models.policy.lm_policy"],
        tq=modules["nemo_rl.models.policy.tq_policy"],
        buffers=modules["nemo_rl.algorithms.async_utils"],
    )
    uninstall()
