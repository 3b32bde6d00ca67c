"""Adapter to NeMo-RL: its trainers build the loss that ``loss_fn.name`` selects, and its workers can run it.

The table lists the modules by layer. A module imports only from its own layer and the layers above it in the table.

============  ========================================================================================================
facts         ``facts``, ``host_errors``, ``installed_version``, ``accepted_apis``, ``source_signature``,
              ``source_layout``, ``host_api``, ``patch``
data          ``loss_block``, ``environment_probe``, ``replay_stamp``, ``resumed_step``
worker side   ``current_logprobs``, ``packed_microbatch``, ``hidden_states``, ``logit_backends``, ``hidden_megatron``,
              ``hidden_dtensor``, ``worker_hooks``
driver side   ``record_hooks``, ``prestep_hooks``, ``prev_logprobs``, ``worker_setup``
entry points  ``loss_dispatch``, ``launch``, ``installation_report``
============  ========================================================================================================
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError, WorkerError
    from nemo_geomask.hosts.nemo_rl.loss_dispatch import install, installed, uninstall
    from nemo_geomask.hosts.nemo_rl.worker_hooks import prepare as prepare_worker

__all__ = ["HostAPIError", "WorkerError", "install", "installed", "prepare_worker", "uninstall"]

_EXPORTS = {
    "HostAPIError": ("host_errors", "HostAPIError"),
    "WorkerError": ("host_errors", "WorkerError"),
    "install": ("loss_dispatch", "install"),
    "installed": ("loss_dispatch", "installed"),
    "prepare_worker": ("worker_hooks", "prepare"),
    "uninstall": ("loss_dispatch", "uninstall"),
}


def __getattr__(name: str) -> Any:
    # The exported names are imported on first use: importing a small module such as patch must not import torch.
    if name == "SeamError":
        message = f"{__name__}.SeamError is now called {__name__}.HostAPIError"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = "HostAPIError"
    if name in _EXPORTS:
        module, attribute = _EXPORTS[name]
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
