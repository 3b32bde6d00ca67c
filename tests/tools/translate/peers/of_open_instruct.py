"""Cases for open-instruct, and its own loss, run from a checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import RandomBatch
from tests.tools.translate.peers.loading import import_files

MODULES = {
    "open_instruct.model_utils": "open_instruct/model_utils.py",
    "open_instruct.grpo_utils": "open_instruct/grpo_utils.py",
}
_NO_KL = {"beta": 0.0}
_RHO = {**_NO_KL, "rho_clamp_upper_bound": 1.2}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip": {**_NO_KL, "clip_lower": 0.1, "clip_higher": 0.15},
    "no correction": {**_NO_KL, "use_rho_correction": False},
    "cispo": {**_NO_KL, "loss_fn": "cispo", "clip_higher": 0.2},
    "rollout log-probs": {**_NO_KL, "use_vllm_logprobs": True, "use_rho_correction": False},
    "both clamps": {**_RHO, "rho_clamp_lower_bound": 0.9},
    "no clamp": {**_NO_KL, "rho_clamp_upper_bound": 0.0},
    "mask": {**_RHO, "rho_mask_lower_bound": 0.9, "rho_mask_upper_bound": 1.15},
    "mask, one bound": {**_RHO, "rho_mask_upper_bound": 1.15},
    "sequence mask": {
        **_RHO,
        "rho_mask_sequence_level": True,
        "rho_mask_lower_bound": 0.97,
        "rho_mask_upper_bound": 1.05,
    },
    "TV mask": {**_RHO, "rho_mask_tv_divergence": True, "rho_mask_upper_bound": 0.05},
    **{f"KL {number}": {"beta": 0.05, "kl_estimator": number} for number in range(4)},
}
DIFFERS: dict[str, str] = {}
_DEFAULTS = {
    "loss_fn": "dapo",
    "clip_lower": 0.2,
    "clip_higher": 0.272,
    "beta": 0.05,
    "kl_estimator": 2,
    "use_vllm_logprobs": False,
    "use_rho_correction": True,
    "rho_clamp_lower_bound": 0.0,
    "rho_clamp_upper_bound": 2.0,
    "rho_mask_lower_bound": 0.0,
    "rho_mask_upper_bound": 0.0,
    "rho_mask_sequence_level": False,
    "rho_mask_tv_divergence": False,
}
_STUBS = ("open_instruct", "pandas", "ray", "wandb", "datasets", "deepspeed", "transformers", "accelerate")

RUNNABLE = tuple(_DEFAULTS)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of open-instruct's own code; some of it runs in float32."""
    stubs = (*_STUBS, "huggingface_hub", "olmo_core", "rich", "vllm")
    with import_files(root, MODULES, placeholder_packages=stubs) as modules:
        peer = modules["open_instruct.grpo_utils"]
        kinds = {"dapo": peer.GRPOLossType.dapo, "cispo": peer.GRPOLossType.cispo}
        peer.model_utils = modules["open_instruct.model_utils"]  # type: ignore[attr-defined]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            tensors, config = batch.double(), SimpleNamespace(**{**_DEFAULTS, **settings})
            config.loss_fn = kinds[config.loss_fn]
            mask = tensors["mask"].bool()
            old = tensors["gen"] if config.use_vllm_logprobs else tensors["prev"]
            rho = peer.compute_rho_correction(tensors["prev"], tensors["gen"], mask, tensors["advantages"], config)
            ratio = torch.exp(tensors["curr"] - old)
            ref = tensors["ref"] if config.beta else None
            per_token, _, kl = peer.compute_grpo_loss(
                tensors["curr"], ratio, tensors["advantages"], ref, config, rho.weights
            )
            value = ((per_token + config.beta * kl) * tensors["mask"]).sum() / tensors["mask"].sum()
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
