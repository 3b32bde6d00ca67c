"""Adapter to NeMo-RL: its trainers build the loss that ``loss_fn.name`` selects, and its workers can run it.

The modules by layer; a module imports from its own layer and those above it.

============  ========================================================================================================
facts         ``facts``, ``installed_version``, ``accepted_apis``, ``source_signature``, ``host_api``,
              ``source_layout``, ``patch``
data          ``loss_block``, ``environment_probe``, ``script_source``, ``loop_values``
worker side   ``current_logprobs``, ``hidden_states``, ``logit_backends``, ``packed_microbatch``, ``forward_logprobs``,
              ``hidden_megatron``, ``hidden_dtensor``
driver side   ``step_recorder``, ``training_step``, ``policies``
patches       ``host_patches``, ``worker_setup``
entry points  ``geomask_setup``, ``launch``, ``installation_report``
============  ========================================================================================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_geomask.hosts.nemo_rl.geomask_setup import build_nemo_rl_loss, prepare_policy, with_geomask
    from nemo_geomask.hosts.nemo_rl.host_patches import prepare_worker
    from nemo_geomask.hosts.nemo_rl.launch import install, uninstall

__all__ = ["build_nemo_rl_loss", "install", "prepare_policy", "prepare_worker", "uninstall", "with_geomask"]

_HOMES = {
    "build_nemo_rl_loss": "geomask_setup",
    "install": "launch",
    "prepare_policy": "geomask_setup",
    "prepare_worker": "host_patches",
    "uninstall": "launch",
    "with_geomask": "geomask_setup",
}


def __getattr__(name: str) -> Any:
    # These names are imported on first use: importing a small module such as patch must not import torch.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
