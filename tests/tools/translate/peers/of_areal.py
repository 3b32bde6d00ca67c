"""Cases for AReaL, and its own loss, run from a checkout."""

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
    "areal.utils.data": "areal/utils/data.py",
    "areal.utils.functional.functional": "areal/utils/functional/functional.py",
    "areal.trainer.ppo.actor": "areal/trainer/ppo/actor.py",
}
_NO_KL = {"actor.kl_ctl": 0.0}
_DECOUPLED = {**_NO_KL, "actor.use_decoupled_loss": True}
_CISPO = {**_NO_KL, "actor.use_cispo_loss": True, "actor.eps_clip": 1.0, "actor.eps_clip_higher": 0.1}


def _rs(metric: str, upper: float, lower: float | None = None, **more: Any) -> dict[str, Any]:
    settings = {"metric": metric, "upper": upper, "lower": lower, **more}
    return {**_DECOUPLED, **{f"actor.rejection_sampling.{key}": value for key, value in settings.items()}}


CASES: dict[str, dict[str, Any]] = {
    "sampler's log-probs": {**_NO_KL, "actor.eps_clip": 0.1},
    "decoupled": {**_DECOUPLED, "actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.28},
    "dual clip": {**_DECOUPLED, "actor.c_clip": 1.3},
    "gspo": {**_DECOUPLED, "actor.importance_sampling_level": "sequence", "actor.eps_clip": 0.03},
    "token ratio, mask": _rs("ratio", 1.2),
    "token ratio, mask, two bounds": _rs("ratio", 1.2, 0.9),
    "token ratio, clamp": _rs("ratio", 1.2, 0.9, action="clamp"),
    "sequence ratio, mask": _rs("ratio", 1.05, 0.95, level="sequence"),
    "sequence ratio, clamp": _rs("ratio", 1.05, 0.95, level="sequence", action="clamp"),
    "sequence ratio, sum, mask": _rs("ratio", 1.2, 0.9, level="sequence", agg="sum"),
    "sequence ratio, max, mask": _rs("ratio", 1.2, level="sequence", agg="max"),
    "sequence ratio, max, two bounds": _rs("ratio", 1.5, 0.999, level="sequence", agg="max"),
    "token kl_k1": _rs("kl_k1", 0.1, -0.05),
    "sequence kl_k1": _rs("kl_k1", 0.03, -0.02, level="sequence"),
    "token kl_k2": _rs("kl_k2", 0.01),
    "sequence kl_k2, max": _rs("kl_k2", 0.02, level="sequence", agg="max"),
    "token kl_k3": _rs("kl_k3", 0.01),
    "token binary_kl": _rs("binary_kl", 0.01),
    "m2po": {**_DECOUPLED, "actor.m2_threshold": 0.01},
    "cispo": {**_CISPO, "actor.recompute_logprob": True},
    "cispo, sampler's log-probs": {**_CISPO, "actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.2},
    "cispo, decoupled": {**_rs("ratio", 1.2, 0.9), **_CISPO},
    "sapo": {**_NO_KL, "actor.use_sapo_loss": True, "actor.sapo_tau_neg": 1.4},
    "sapo, sequence ratio": {**_NO_KL, "actor.use_sapo_loss": True, "actor.importance_sampling_level": "sequence"},
}
DIFFERS: dict[str, str] = {}
_REJECTION = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}

RUNNABLE = ("actor.",)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of AReaL\'s own code."""
    with import_files(root, MODULES, placeholder_packages=("areal", "einops", "torchdata")) as modules:
        peer = modules["areal.utils.functional.functional"]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            tensors = batch.double()
            found = {key.removeprefix("actor."): value for key, value in settings.items()}
            recomputes = found.get("use_decoupled_loss") or found.get("recompute_logprob")
            anchor = tensors["prev" if recomputes else "gen"]
            mask = tensors["mask"].bool()
            if "m2_threshold" in found:
                narrowed = modules["areal.trainer.ppo.actor"]._apply_m2po_masking
                mask = narrowed(tensors["gen"], tensors["prev"], mask, found["m2_threshold"])
            policies = {"logprobs": tensors["curr"], "advantages": tensors["advantages"], "loss_mask": mask}
            level = {"importance_sampling_level": found.get("importance_sampling_level", "token")}
            if found.get("use_sapo_loss"):
                taus = {"tau_pos": found.get("sapo_tau_pos", 1.0), "tau_neg": found.get("sapo_tau_neg", 1.05)}
                value, _ = peer.sapo_loss_fn(old_logprobs=anchor, **policies, **taus, **level)
            else:
                rejection = {k.partition(".")[2]: v for k, v in found.items() if k.startswith("rejection_sampling.")}
                policies |= {
                    "proximal_logprobs": anchor,
                    "old_logprobs": tensors["gen"],
                    "eps_clip": found.get("eps_clip", 0.2),
                    "eps_clip_higher": found.get("eps_clip_higher"),
                    "rejection_sampling": SimpleNamespace(**{**_REJECTION, **rejection}) if rejection else None,
                }
                if found.get("use_cispo_loss"):
                    value, _ = peer.cispo_loss_fn(**policies)
                else:
                    value, _ = peer.ppo_actor_loss_fn(**policies, **level, c_clip=found.get("c_clip"))
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
