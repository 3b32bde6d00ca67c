"""Cases for verl, and its own loss, run from a checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from nemo_geomask.tools.translate import PEERS
from tests.tools.translate.peers.batches import ROWS, RandomBatch
from tests.tools.translate.peers.loading import import_files

RC, ACTOR = "algorithm.rollout_correction.", "actor_rollout_ref.actor."
MODULES = {
    "verl.base_config": "verl/base_config.py",
    "verl.utils.torch_functional": "verl/utils/torch_functional.py",
    "verl.trainer.config.algorithm": "verl/trainer/config/algorithm.py",
    "verl.trainer.ppo.rollout_corr_helper": "verl/trainer/ppo/rollout_corr_helper.py",
    "verl.trainer.ppo.core_algos": "verl/trainer/ppo/core_algos.py",
}


def _rc(**settings: Any) -> dict[str, Any]:
    return {RC + key: value for key, value in settings.items()}


def _rs(rs: str, threshold: Any, **settings: Any) -> dict[str, Any]:
    return _rc(rollout_rs=rs, rollout_rs_threshold=threshold, **settings)


def _mode(mode: str, **actor: Any) -> dict[str, Any]:
    return {ACTOR + "policy_loss.loss_mode": mode, **{ACTOR + key: value for key, value in actor.items()}}


def _actor(**actor: Any) -> dict[str, Any]:
    return {ACTOR + key: value for key, value in actor.items()}


# Every preset of docs/algo/rollout_corr.md and of RolloutCorrectionConfig, on a hundred batches each.
PRESETS = {f"preset {name}": {"preset": name} for name in PEERS["verl"].presets}
CASES: dict[str, dict[str, Any]] = {
    "clip": _actor(clip_ratio_low=0.1, clip_ratio_high=0.28),
    "dual clip": _actor(clip_ratio_c=1.3),
    "gspo": _mode("gspo", clip_ratio_low=0.02, clip_ratio_high=0.03),
    "gspo, token weights": {**_mode("gspo"), **_rc(rollout_is="token")},
    "geo_mean": _mode("geo_mean", clip_ratio_low=0.1, clip_ratio_high=0.2),
    "geo_mean, sequence weights": {**_mode("geo_mean"), **_rc(rollout_is="sequence")},
    "geo_mean, token weights": {**_mode("geo_mean"), **_rc(rollout_is="token")},
    "sapo": _mode("sapo", tau_neg=1.4),
    "cispo": _mode("cispo", clip_ratio_low=0.3, clip_ratio_high=0.4),
    "gpg": _mode("gpg"),
    "dppo_tv": _mode("dppo_tv", clip_ratio_low=0.02, clip_ratio_high=0.05, clip_ratio_c=1.5),
    "dppo_kl": _mode("dppo_kl", clip_ratio_low=0.01, clip_ratio_high=0.02, clip_ratio_c=20.0),
    "dro": {**_mode("dro"), ACTOR + "policy_loss.dro_beta": 0.5},
    "sequence mean": _actor(loss_agg_mode="seq-mean-token-mean"),
    "sequence sum": _actor(loss_agg_mode="seq-mean-token-sum"),
    "sequence sum over a constant": _actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=7),
    "token sum": _actor(loss_agg_mode="token-sum"),
    "token icepop": _rc(rollout_is="token", rollout_is_threshold="0.9_1.3"),
    "normalised weights, token": _rc(rollout_is="token", rollout_is_batch_normalize=True),
    "normalised weights, sequence": _rc(rollout_is="sequence", rollout_is_batch_normalize=True),
    "bypass reinforce, normalised weights": _rc(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
    ),
    "normalised weights, rejection": _rs("token_k1", "0.8_1.1", rollout_is="token", rollout_is_batch_normalize=True),
    "token_k1, not reciprocal": _rs("token_k1", "0.8_1.1"),
    "seq_sum_k1, not reciprocal": _rs("seq_sum_k1", "0.5_1.2"),
    "seq_mean_k1, not reciprocal": _rs("seq_mean_k1", "0.97_1.005"),
    "seq_mean_k1, one bound": _rs("seq_mean_k1", 1.01),
    "token_k2": _rs("token_k2", 0.01),
    "token_k3": _rs("token_k3", 0.01),
    "seq_sum_k2": _rs("seq_sum_k2", 0.05),
    "seq_sum_k3": _rs("seq_sum_k3", 0.05),
    "seq_mean_k2": _rs("seq_mean_k2", 0.005),
    "seq_mean_k3": _rs("seq_mean_k3", 0.005),
    "seq_max_k2": _rs("seq_max_k2", 0.02),
    "seq_max_k3": _rs("seq_max_k3", 0.02),
    "two rules": _rs("token_k3,seq_mean_k1", "0.05,0.9_1.2", rollout_is="token"),
    "sequence rule, sequence mean": {**_rs("seq_mean_k3", 0.005), **_actor(loss_agg_mode="seq-mean-token-mean")},
    "token rule, sequence mean": {**_rs("token_k3", 0.0005), **_actor(loss_agg_mode="seq-mean-token-mean")},
    "token rule, sequence weight": _rs("token_k3", 0.01, rollout_is="sequence"),
    "bypass ppo_clip, token rule": _rs("token_k1", "0.8_1.3", bypass_mode=True),
    "bypass reinforce, two rules": _rs(
        "token_k2,seq_max_k3", "0.02,0.3", bypass_mode=True, loss_type="reinforce", rollout_is="token"
    ),
    "before v1, token rule": {**_rs("token_k1", "0.8_1.1"), "trainer.use_v1": False},
    "before v1, sequence rule, KL": {
        **_rs("seq_mean_k1", "0.97_1.005"),
        **_actor(use_kl_loss=True, kl_loss_coef=0.05),
        "trainer.use_v1": False,
    },
    "bypass reinforce, no weight": _rc(bypass_mode=True, loss_type="reinforce"),
    **{
        f"KL {kind}": _actor(use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type=kind)
        for kind in ("kl", "mse", "low_var_kl", "k1+", "k3+", "abs")
    },
    "KL, sequence rule": {**_actor(use_kl_loss=True, kl_loss_coef=0.05), **_rs("seq_mean_k1", "0.97_1.005")},
}


DIFFERS: dict[str, str] = {}


class _Config(dict):
    __getattr__ = dict.__getitem__


class _Proto:
    @staticmethod
    def from_dict(tensors: dict[str, Tensor]) -> Any:
        return SimpleNamespace(batch=tensors)


RUNNABLE = ("algorithm.rollout_correction.", "actor_rollout_ref.actor.", "trainer.use_v1", "program")
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of verl\'s own code."""
    values = {
        "verl.trainer.config.AlgoConfig": type("AlgoConfig", (), {}),
        "verl.protocol.DataProto": _Proto,
        "verl.workers.config.PolicyLossConfig": _Config,
    }
    config = root / "verl" / "trainer" / "config"
    actor_defaults = yaml.safe_load((config / "actor" / "actor.yaml").read_text())
    rc_defaults = yaml.safe_load((config / "algorithm" / "rollout_correction.yaml").read_text())
    stubs = ("verl", "tensordict", "transformers", "omegaconf")
    with import_files(root, MODULES, placeholder_packages=stubs, values=values) as modules:
        presets = modules["verl.trainer.config.algorithm"].RolloutCorrectionConfig
        helper, algos = modules["verl.trainer.ppo.rollout_corr_helper"], modules["verl.trainer.ppo.core_algos"]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            rc = dict(rc_defaults)
            actor = _Config(actor_defaults, policy_loss=_Config(actor_defaults["policy_loss"]))
            for key, value in settings.items():
                if key == "preset":
                    rc |= vars(getattr(presets, value)())
                elif key.startswith(RC):
                    rc[key.removeprefix(RC)] = value
                elif key.startswith(ACTOR + "policy_loss."):
                    actor.policy_loss[key.removeprefix(ACTOR + "policy_loss.")] = value
                elif key.startswith(ACTOR):
                    actor[key.removeprefix(ACTOR)] = value
            rc = {key: value for key, value in rc.items() if key in rc_defaults}
            tensors = batch.double()
            mask, weights, mode = tensors["mask"], None, actor.policy_loss["loss_mode"]
            is_v1 = settings.get("trainer.use_v1", True) and settings.get("program") in (None, "main_ppo")
            if rc["bypass_mode"] and is_v1 and "program" in settings:
                old = tensors["gen"]  # its main program reads nothing else of the section
            elif rc["bypass_mode"]:
                mode, old = "bypass_mode", tensors["gen"]
                actor.policy_loss["rollout_correction"] = rc
            else:
                old = tensors["prev"]
                keys = {key: rc[key] for key in rc if key.startswith("rollout_")}
                found, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
                    old_log_prob=old, rollout_log_prob=tensors["gen"], response_mask=mask, **keys
                )
                weights = None if found is None else found.batch["rollout_is_weights"]
            actor["global_batch_info"] = {
                "dp_size": 1,
                # The v1 trainer counts the tokens of loss_mask, from which rejection takes nothing.
                "batch_num_tokens": (tensors["mask"] if is_v1 else mask).sum(),
                "global_batch_size": ROWS,
                "loss_scale_factor": actor.loss_scale_factor,
            }
            value, _ = algos.get_policy_loss_fn(mode)(
                old_log_prob=old,
                log_prob=tensors["curr"],
                advantages=tensors["advantages"],
                response_mask=mask,
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
                rollout_is_weights=weights,
            )
            if actor.use_kl_loss:
                kl = algos.kl_penalty(tensors["curr"], tensors["ref"], actor.kl_loss_type)
                of_kl = algos.agg_loss(kl, mask, actor.loss_agg_mode, **actor.global_batch_info)
                value = value + actor.kl_loss_coef * of_kl
            (gradient,) = torch.autograd.grad(value, tensors["curr"], allow_unused=True)
            return value.detach(), torch.zeros_like(tensors["curr"]) if gradient is None else gradient

        yield run
