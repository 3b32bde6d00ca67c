"""A pytest plugin for NeMo-RL's own tests: whatever they build as ``ClippedPGLossFn(config)`` is our loss of that name.

``python -m pytest -p under_our_loss NEMO_RL/tests/unit/algorithms/test_loss_functions.py``, on a CPU with
the rehearsal's stand-ins.
"""

from __future__ import annotations

import nemo_geomask.tools.rehearse.cpu_shims

nemo_geomask.tools.rehearse.cpu_shims.register()  # before torch is imported


built = []
"""Configurations of the losses that the tests have built."""


def pytest_configure(config):
    from nemo_rl.algorithms import loss
    from nemo_rl.algorithms.loss import loss_functions

    from nemo_geomask.hosts.nemo_rl import loss_block
    from nemo_geomask.hosts.nemo_rl.geomask_setup import build_nemo_rl_loss

    plain_settings = loss_block.plain_settings

    def named(cfg):
        settings = plain_settings(cfg)
        return settings if settings.get("name") else {**settings, "name": "clipped_pg"}

    loss_block.plain_settings = named

    def build(cfg):
        built.append(cfg)
        return build_nemo_rl_loss({"loss_fn": cfg, "policy": {}})

    # Before the tests import it.
    for module in (loss, loss_functions):
        module.ClippedPGLossFn = build


def pytest_sessionfinish(session):
    assert built or not session.items, "NeMo-RL's tests have built none of our losses"


def pytest_collection_finish(session):
    import torch

    # The tests skip themselves without it; every device is the CPU by now. Not earlier: triton's users would look for
    # the card when they are imported.
    torch.cuda.is_available = lambda: True
