"""Cases for prime-rl, and its own loss, run from a checkout."""

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

MODULES = {"prime_rl.trainer.rl.loss": "src/prime_rl/trainer/rl/loss.py"}
_LOSS = "trainer.loss."


def _loss(**settings: Any) -> dict[str, Any]:
    return {_LOSS + key: value for key, value in settings.items()}


CASES: dict[str, dict[str, Any]] = {
    "dppo": _loss(type="default"),
    "dppo, narrow": _loss(type="default", dppo_mask_low=0.02, dppo_mask_high=0.05, kl_tau=0.1),
    "dppo, no penalty": _loss(type="default", dppo_mask_low=0.05, dppo_mask_high=0.02, kl_tau=0.0),
    "ipo, the default": {},
    "ipo, narrow": _loss(eps=0.03, kl_tau=0.1),
    "ipo, narrow, by its former name": _loss(type="ipo", ipo_threshold=0.03),
    "ipo, scaled advantages": _loss(adv_tau=0.5),
}
DIFFERS: dict[str, str] = {}
_DEFAULTS = {"type": "ipo", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0}

RUNNABLE = (_LOSS,)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of prime-rl\'s own code."""
    with import_files(root, MODULES, placeholder_packages=("prime_rl", "beartype", "jaxtyping")) as modules:
        peer = modules["prime_rl.trainer.rl.loss"]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            tensors = batch.double()
            own = {key.removeprefix(_LOSS): value for key, value in settings.items()}
            # The checkout is older than the names and the defaults of September 2026.
            defaults = {**_DEFAULTS, "kl_tau": 1e-3 if own.get("type") == "default" else 0.0}
            config = SimpleNamespace(**{**defaults, "ipo_threshold": own.get("eps", 0.3), **own})
            function = peer.ipo_loss_fn if config.type == "ipo" else peer.default_loss_fn
            value, _ = peer.compute_loss(
                trainer_logprobs=list(tensors["curr"]),
                inference_logprobs=list(tensors["gen"]),
                advantages=list(tensors["advantages"]),
                loss_mask=list(tensors["mask"].bool()),
                **dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")),
                rl_loss_fn=lambda inputs: function(inputs, config),
                rl_scale=int(tensors["mask"].sum()),
                ce_scale=1,
                ref_kl_scale=1,
            )
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
