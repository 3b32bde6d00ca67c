"""Restart of an engine with other settings, within the process of NeMo-RL's generation worker.

Most of a start's time goes to other things than the engine: Ray, imports, the trainer. Without GPUs, where no memory of
a former engine can be left on a device, an engine is therefore replaced in its own process. The worker is constructed
anew by NeMo-RL's own code, with the settings that were changed; only the process stays.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from nemo_geomask.errors import EngineError

__all__ = ["restart_engine"]

_ORIGINAL = "nemo_geomask_original_config"
"""Attribute of the worker with its settings as NeMo-RL started it."""


def restart_engine(actor: Any, values: Mapping[str, Any]) -> None:
    """Replace the engine of a generation worker by one with other settings.

    The new engine has no weights before the next refit, and has to be told of them as after NeMo-RL's own start.

    Args:
        actor: NeMo-RL's generation worker, in whose process this runs; its engine is a single process.
        values: settings that differ from those NeMo-RL started the worker with, by dotted key below
            ``policy.generation``. A mapping replaces the one that is there.

    Raises:
        EngineError: the engine has several processes.
    """
    if actor.tensor_parallel_size * actor.pipeline_parallel_size > 1:
        raise EngineError("an engine of several processes can't be restarted within its worker")
    if not hasattr(actor, _ORIGINAL):
        setattr(actor, _ORIGINAL, copy.deepcopy(dict(actor.cfg)))
    config: dict[str, Any] = copy.deepcopy(getattr(actor, _ORIGINAL))
    for key, value in values.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    seed = actor.llm.llm_engine.vllm_config.model_config.seed
    fraction = actor.fraction_of_gpus
    actor.shutdown()
    state = importlib.import_module("vllm.distributed.parallel_state")
    state.cleanup_dist_env_and_memory()
    _undo_fp8_patches()
    constructor = type(actor).__init__
    arguments = {"bundle_indices": [0], "fraction_of_gpus": fraction, "seed": seed}
    accepted = inspect.signature(constructor).parameters
    constructor(actor, config, **{name: value for name, value in arguments.items() if name in accepted})
    actor.post_init()


def _undo_fp8_patches() -> None:
    """Take back what NeMo-RL's ``init_fp8`` patches in vLLM for an engine: it refuses to patch a process twice."""
    module: Any = sys.modules.get("nemo_rl.models.generation.vllm.quantization.fp8")
    if module is None or not module.fp8_patches_applied:
        return
    for patcher in module.fp8_state.vllm_patches:
        patcher.stop()
    module.fp8_state = type(module.fp8_state)()
    module.fp8_patches_applied = False
