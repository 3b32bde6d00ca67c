from __future__ import annotations

import importlib
import sys

import pytest

from nemo_geomask.hosts import nemo_rl
from tests.helpers.nemo_rl import fake_tree


def _forget():
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "nemo_rl"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """``host(**how)`` puts a NeMo-RL of a few lines on the path; ``host.module(name)`` imports from it."""
    others = _forget()

    def make(**how):
        monkeypatch.syspath_prepend(str(fake_tree.write(tmp_path, **how)))
        return importlib.import_module("nemo_rl.algorithms.loss.loss_functions")

    yield make
    nemo_rl.uninstall()
    _forget()
    sys.modules.update(others)
