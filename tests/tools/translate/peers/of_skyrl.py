"""Cases for SkyRL, and its own loss, run from a checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import ROWS, RandomBatch
from tests.tools.translate.peers.loading import import_files

_HOME = "skyrl.backends.skyrl_train.utils."
MODULES = {
    _HOME + name: f"skyrl/backends/skyrl_train/utils/{name}.py"
    for name in ("torch_utils", "off_policy_correction_utils", "ppo_utils")
}
_A, _O = "trainer.algorithm.", "trainer.algorithm.off_policy_correction."


def _alg(**settings: Any) -> dict[str, Any]:
    return {_A + "use_kl_loss": False, **{_A + key.replace("__", "."): value for key, value in settings.items()}}


def _off(**settings: Any) -> dict[str, Any]:
    return {_A + "use_kl_loss": False, **{_O + key: value for key, value in settings.items()}}


CASES: dict[str, dict[str, Any]] = {
    "regular": _alg(eps_clip_low=0.1, eps_clip_high=0.28),
    "dual_clip": _alg(policy_loss_type="dual_clip", clip_ratio_c=1.3),
    "gspo": _alg(policy_loss_type="gspo", eps_clip_low=0.02, eps_clip_high=0.03, loss_reduction="sequence_mean"),
    "gspo, token mean": _alg(policy_loss_type="gspo", eps_clip_low=0.02, eps_clip_high=0.03),
    "sapo": _alg(policy_loss_type="sapo", sapo__tau_neg=1.4, loss_reduction="sequence_mean"),
    "cispo": _alg(policy_loss_type="cispo", cispo__cispo_eps_clip_high=0.2),
    "cispo, rollout": _alg(policy_loss_type="cispo", cispo__cispo_eps_clip_high=0.2, cispo__cispo_anchor="rollout"),
    "rollout_is": _alg(policy_loss_type="rollout_is", eps_clip_low=0.1, eps_clip_high=0.2),
    "dppo binary_tv": _alg(policy_loss_type="dppo", dppo__delta_low=0.02, dppo__delta_high=0.05),
    "dppo binary_kl": _alg(
        policy_loss_type="dppo", dppo__dppo_type="binary_kl", dppo__delta_low=0.01, dppo__delta_high=0.01
    ),
    "constant": _alg(loss_reduction="seq_mean_token_sum_norm", max_seq_len=7),
    "token weights": _off(tis_ratio_type="token", token_tis_ratio_clip_high=1.2),
    "sequence weights": _off(tis_ratio_type="sequence"),
    "geometric": _off(sequence_mask_metric="geometric"),
    "product": _off(sequence_mask_metric="product", tis_ratio_type="token"),
    "outlier tokens": _off(outlier_token_is_threshold_low=0.7, outlier_token_is_threshold_high=1.5),
    "token mask": _off(token_mask_is_threshold_low=0.9, token_mask_is_threshold_high=1.2),
    "two masks": _off(
        sequence_mask_metric="geometric", token_mask_is_threshold_low=0.9, token_mask_is_threshold_high=1.2
    ),
    "KL": {_A + "kl_loss_coef": 0.05, _A + "loss_reduction": "sequence_mean"},
    "KL, token mean": {_A + "kl_loss_coef": 0.05},
}
DIFFERS: dict[str, str] = {}
_DEFAULTS: dict[str, Any] = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": "k3",
    "max_seq_len": 1,
    "sapo.tau_pos": 1.0,
    "sapo.tau_neg": 1.05,
    "cispo.cispo_eps_clip_low": 1.0,
    "cispo.cispo_eps_clip_high": 4.0,
    "cispo.cispo_anchor": "old",
    "dppo.dppo_type": "binary_tv",
    "dppo.delta_low": 0.2,
    "dppo.delta_high": 0.2,
    "off_policy_correction.tis_ratio_type": None,
    "off_policy_correction.token_tis_ratio_clip_high": 2.0,
    "off_policy_correction.sequence_tis_ratio_clip_high": 5.0,
    "off_policy_correction.sequence_mask_metric": None,
    "off_policy_correction.geo_mask_high": 1.01,
    "off_policy_correction.geo_mask_low": 0.99,
    "off_policy_correction.product_mask_high": 2.0,
    "off_policy_correction.product_mask_low": 0.5,
    "off_policy_correction.outlier_token_is_threshold_low": None,
    "off_policy_correction.outlier_token_is_threshold_high": None,
    "off_policy_correction.token_mask_is_threshold_low": None,
    "off_policy_correction.token_mask_is_threshold_high": None,
}


def _config(settings: Mapping[str, Any]) -> Any:
    flat = {**_DEFAULTS, **{key.removeprefix(_A): value for key, value in settings.items()}}
    config = SimpleNamespace(**{key: value for key, value in flat.items() if "." not in key})
    for section in ("sapo", "cispo", "dppo", "off_policy_correction"):
        inner = {key.partition(".")[2]: value for key, value in flat.items() if key.startswith(f"{section}.")}
        setattr(config, section, SimpleNamespace(**inner))
    return config


RUNNABLE = ("trainer.algorithm.",)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of SkyRL\'s own code."""
    stubs = ("skyrl", "ray", "jaxtyping", "loguru", "flash_attn", "omegaconf")
    with import_files(
        root, MODULES, placeholder_packages=stubs, values={"ray.is_initialized": lambda: False}
    ) as modules:
        peer = modules[_HOME + "ppo_utils"]
        losses = {
            **dict.fromkeys(("regular", "dual_clip"), peer.ppo_policy_loss),
            "gspo": peer.gspo_policy_loss,
            "sapo": peer.sapo_policy_loss,
            "cispo": peer.compute_policy_loss_cispo,
            "rollout_is": peer.rollout_is_policy_loss,
            "dppo": peer.dppo_policy_loss,
        }

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            tensors, config = batch.double(), _config(settings)
            scaled = peer.apply_loss_reduction_to_advantages_minibatch(
                tensors["advantages"], tensors["mask"], config.loss_reduction, ROWS, config.max_seq_len
            )
            value, _ = losses[config.policy_loss_type](
                tensors["curr"], tensors["prev"], scaled, config, tensors["mask"], tensors["gen"]
            )
            if config.use_kl_loss:
                kl = peer.compute_approx_kl(tensors["curr"], tensors["ref"], tensors["mask"], config.kl_estimator_type)
                value = value + config.kl_loss_coef * peer.masked_mean(kl, tensors["mask"], dim=-1).mean()
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
