"""A pytest plugin for NeMo-RL's own tests: whatever they build as ``ClippedPGLossFn(config)`` is our loss of that name.

``python -m pytest -p tests.hosts.under_our_loss NEMO_RL/tests/unit/algorithms/test_loss_functions.py``, on a CPU with
the rehearsal's stand-ins.
"""

from __future__ import annotations

import nemo_geomask.rehearsal.standins

nemo_geomask.rehearsal.standins.register()  # before torch is imported


def pytest_configure(config):
    import nemo_geomask
    from nemo_geomask.integrations.nemo_rl import recipe

    settings = recipe.settings

    def named(cfg):
        given = settings(cfg)
        return given if given.get("name") else {**given, "name": "clipped_pg"}

    recipe.settings = named
    nemo_geomask.install()


def pytest_collection_finish(session):
    import torch

    # The tests skip themselves without it; every device is the CPU by now. Not earlier: triton's users would look for
    # the card when they are imported.
    torch.cuda.is_available = lambda: True
