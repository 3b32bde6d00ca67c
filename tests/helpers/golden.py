"""Recorded cases of NeMo-RL's ``ClippedPGLossFn``: inputs, settings and what it answered."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers import batches

FILE = Path(__file__).parents[1] / "data" / "nemo_rl_clipped_pg.npz"


@functools.cache
def golden() -> Any:
    return np.load(FILE)


@functools.cache
def index() -> dict[str, dict[str, Any]]:
    return json.loads(bytes(golden()["index"]).decode())["cases"]


def load(case: str) -> tuple[batches.Batch, torch.Tensor]:
    arrays = {
        name.split("/")[1]: torch.from_numpy(golden()[name]) for name in golden().files if name.startswith(f"{case}/")
    }
    grad = arrays.pop("grad_next_token_logprobs")
    entry = index()[case]
    curr = arrays.pop("next_token_logprobs")
    return batches.Batch(curr, arrays, entry["global_valid_seqs"], entry["global_valid_toks"]), grad


def by_sequence(config: dict[str, Any]) -> bool:
    return bool(config.get("sequence_level_importance_ratios"))
