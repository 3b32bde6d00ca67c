"""Cases for OpenRLHF, and its own loss, run from a checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import ROWS, RandomBatch
from tests.tools.translate.peers.loading import import_files

MODULES = {"openrlhf.models.utils": "openrlhf/models/utils.py", "openrlhf.models.loss": "openrlhf/models/loss.py"}
_NO_KL = {"algo.kl.init_coef": 0.0}
_IS = "algo.advantage.is_correction_"


def _is(kind: str, low: float, high: float) -> dict[str, Any]:
    return {**_NO_KL, _IS + "enable": True, _IS + "type": kind, _IS + "threshold": [low, high]}


CASES: dict[str, dict[str, Any]] = {
    "clip": {**_NO_KL, "actor.eps_clip_low_high": [0.1, 0.28]},
    "dual clip": {**_NO_KL, "actor.dual_clip": 1.3},
    "gspo": {**_NO_KL, "actor.policy_loss_type": "gspo", "actor.eps_clip": 0.03},
    "gspo, correction": {**_NO_KL, "actor.policy_loss_type": "gspo", "actor.eps_clip": 0.03, _IS + "enable": True},
    "tis": _is("tis", 0.9, 1.2),
    "icepop": _is("icepop", 0.9, 1.2),
    "seq-mask-tis": _is("seq-mask-tis", 0.95, 1.05),
    "sequence mean": {**_NO_KL, "actor.token_level_loss": False},
    **{
        f"KL {kind}": {"algo.kl.use_loss": True, "algo.kl.init_coef": 0.05, "algo.kl.estimator": kind}
        for kind in ("k1", "k2", "k3")
    },
}
DIFFERS: dict[str, str] = {}

RUNNABLE = ("actor.", "algo.")
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of OpenRLHF\'s own code."""
    with import_files(root, MODULES, placeholder_packages=("openrlhf", "deepspeed")) as modules:
        peer, utils = modules["openrlhf.models.loss"], modules["openrlhf.models.utils"]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            tensors = batch.double()
            eps = settings.get("actor.eps_clip", 0.2)
            low, high = settings.get("actor.eps_clip_low_high", [eps, eps])
            by_token = settings.get("actor.token_level_loss", True)
            policy = peer.PolicyLoss(
                clip_eps_low=low,
                clip_eps_high=high,
                dual_clip=settings.get("actor.dual_clip"),
                token_level_loss=by_token,
                policy_loss_type=settings.get("actor.policy_loss_type", "ppo"),
                enable_vllm_is_correction=settings.get(_IS + "enable", False),
                vllm_is_truncated_threshold=settings.get(_IS + "threshold", [0.5, 5.0]),
                vllm_is_correction_type=settings.get(_IS + "type", "tis"),
            )
            counts = {"batch_num_tokens": tensors["mask"].sum(), "global_batch_size": ROWS}
            value, *_ = policy(
                tensors["curr"], tensors["prev"], tensors["advantages"], tensors["mask"], tensors["gen"], **counts
            )
            if settings.get("algo.kl.use_loss"):
                kl = utils.compute_approx_kl(tensors["curr"], tensors["ref"], settings["algo.kl.estimator"])
                of_kl = peer.aggregate_loss(kl, tensors["mask"], token_level_loss=by_token, **counts)
                value = value + settings["algo.kl.init_coef"] * of_kl
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
