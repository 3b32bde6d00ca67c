"""Adapters (LoRA) of a trainer, which get values here: an adapter that a refit does not deliver shows only then.

The second matrix of a new adapter is zero, so that the adapter changes nothing until it was trained.
"""

from __future__ import annotations

import importlib
import re
import zlib
from typing import Any

from nemo_geomask.tools.probe.resolved_settings import trainer_models

__all__ = ["fill_adapters"]

_SECOND_MATRIX = re.compile(r"(lora_(\w+_)?B|adapter\.linear_out)(\.weight)?$")
"""Name of the matrix that begins as zero, in Automodel's adapters, also of experts, and in Megatron-Bridge's."""
_STANDARD_DEVIATION = 0.1


def fill_adapters(actor: Any) -> int:
    """Fill the second matrices of a training worker's adapters with noise, and return their number.

    A matrix, or this worker's shard of it, gets values that depend on its name and shape alone: the same ones in every
    start with the same layout.

    Args:
        actor: NeMo-RL's training worker, in whose process this runs.
    """
    torch = importlib.import_module("torch")
    count = 0
    with torch.no_grad():
        for model in trainer_models(actor):
            for name, parameter in model.named_parameters():
                if _SECOND_MATRIX.search(name):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    noise = torch.randn(local.shape, generator=generator)
                    local.copy_(_STANDARD_DEVIATION * noise)
                    count += 1
    return count
