"""Adapter to NeMo-RL: its trainers build the loss that ``loss_fn.name`` selects, and its workers can run it.

The table lists the modules by layer. A module imports only from its own layer and the layers above it in the table.

============  ========================================================================================================
facts         ``facts``, ``host_errors``, ``installed_version``, ``accepted_apis``, ``source_signature``,
              ``source_layout``, ``host_api``, ``patch``
data          ``loss_block``, ``environment_probe``, ``replay_versions``, ``resumed_step``, ``script_source``,
              ``logged_environments``
worker side   ``current_logprobs``, ``hidden_states``, ``logit_backends``, ``packed_microbatch``, ``forward_logprobs``,
              ``hidden_megatron``, ``hidden_dtensor``
driver side   ``step_recorder``, ``policy_methods``, ``step_methods``, ``prev_logprobs``, ``policies``
patches       ``host_patches``, ``worker_hooks``, ``worker_setup``
entry points  ``geomask_setup``, ``launch``, ``installation_report``
============  ========================================================================================================
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.hosts.nemo_rl.geomask_setup import build_nemo_rl_loss, prepare_policy, with_geomask
    from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError, WorkerError
    from nemo_geomask.hosts.nemo_rl.launch import install, installed, run_script, uninstall
    from nemo_geomask.hosts.nemo_rl.worker_hooks import prepare as prepare_worker

__all__ = [
    "HostAPIError",
    "WorkerError",
    "build_nemo_rl_loss",
    "install",
    "installed",
    "prepare_policy",
    "prepare_worker",
    "run_script",
    "uninstall",
    "with_geomask",
]

_EXPORTS = {
    "HostAPIError": ("host_errors", "HostAPIError"),
    "WorkerError": ("host_errors", "WorkerError"),
    "build_nemo_rl_loss": ("geomask_setup", "build_nemo_rl_loss"),
    "install": ("launch", "install"),
    "installed": ("launch", "installed"),
    "prepare_policy": ("geomask_setup", "prepare_policy"),
    "prepare_worker": ("worker_hooks", "prepare"),
    "run_script": ("launch", "run_script"),
    "uninstall": ("launch", "uninstall"),
    "with_geomask": ("geomask_setup", "with_geomask"),
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
