"""open-instruct's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tools.translate.peers.loading import files_of
from tests.tools.translate.peers.problems import Problem

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


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], Problem], tuple[Tensor, Tensor]]]:
    """What open-instruct computes under settings, in float32 where it says so itself."""
    stubs = (*_STUBS, "huggingface_hub", "olmo_core", "rich", "vllm")
    with files_of(root, MODULES, made_up=stubs) as modules:
        own = modules["open_instruct.grpo_utils"]
        kinds = {"dapo": own.GRPOLossType.dapo, "cispo": own.GRPOLossType.cispo}
        own.model_utils = modules["open_instruct.model_utils"]  # type: ignore[attr-defined]

        def run(settings: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
            at, config = problem.double(), SimpleNamespace(**{**_DEFAULTS, **settings})
            config.loss_fn = kinds[config.loss_fn]
            mask = at["mask"].bool()
            old = at["gen"] if config.use_vllm_logprobs else at["prev"]
            rho = own.compute_rho_correction(at["prev"], at["gen"], mask, at["advantages"], config)
            ratio = torch.exp(at["curr"] - old)
            ref = at["ref"] if config.beta else None
            per_token, _, kl = own.compute_grpo_loss(at["curr"], ratio, at["advantages"], ref, config, rho.weights)
            value = ((per_token + config.beta * kl) * at["mask"]).sum() / at["mask"].sum()
            (gradient,) = torch.autograd.grad(value, at["curr"])
            return value.detach(), gradient

        yield run
