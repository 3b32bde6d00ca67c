"""NeMo-RL: the trainers build the loss that a recipe's ``loss_fn.name`` selects, and its workers can open it."""

from __future__ import annotations

from nemo_geomask.integrations.nemo_rl.dispatch import install, installed, uninstall
from nemo_geomask.integrations.nemo_rl.seams import SeamError
from nemo_geomask.integrations.nemo_rl.worker import prepare as prepare_worker
from nemo_geomask.integrations.nemo_rl.workers import WorkerError

__all__ = ["SeamError", "WorkerError", "install", "installed", "prepare_worker", "uninstall"]
