"""Cases for slime, and its own loss, run from a checkout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import ROWS, WIDTH, RandomBatch
from tests.tools.translate.peers.loading import import_files

MODULES = {
    "slime.utils.ppo_utils": "slime/utils/ppo_utils.py",
    "slime.backends.megatron_utils.cp_utils": "slime/backends/megatron_utils/cp_utils.py",
    "slime.backends.megatron_utils.loss": "slime/backends/megatron_utils/loss.py",
    "slime_mis": "examples/train_infer_mismatch_helper/mis.py",
}
_MIS = {"use_tis": True, "custom_tis_function_path": "slime_mis.compute_mis_weights_with_cp"}
_ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
_KL = {"use_kl_loss": True, "kl_loss_coef": 0.05}


def _mis(level: str, mode: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    return {**_MIS, "tis_level": level, "tis_mode": mode, "tis_lower_bound": low, "tis_upper_bound": high, **more}


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip": {"eps_clip": 0.1, "eps_clip_high": 0.28},
    "dual clip": {"eps_clip_c": 1.3},
    "per token": {"calculate_per_token_loss": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.04},
    "gspo, per token": {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.2},
    "tis": {"use_tis": True, "tis_clip": 1.2},
    "tis, two bounds": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8},
    "icepop": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8, "custom_tis_function_path": _ICEPOP},
    "gspo, tis": {"advantage_estimator": "gspo", "use_tis": True, "tis_clip": 1.2},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "rollout log-probs": {"use_rollout_logprobs": True, "eps_clip": 0.1},
    "rollout log-probs, opsm": {"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 0.01},
    **{f"KL {kind}": {**_KL, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    "KL times the ratio": {**_KL, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "mis.yaml": _mis("token", "truncate", 0.5, 2.0, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True),
    **{
        f"mis {level} {mode}": _mis(level, mode, 0.8, 1.2)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "clip", "mask")
    },
    "mis veto": _mis("token", "truncate", 0.5, 2.0, use_rs=True, rs_veto_threshold=0.6, rs_lower_bound=0.1),
    **{
        f"mis rejection by {level}": _mis(
            "token", "truncate", 0.5, 2.0, use_rs=True, rs_level=level, rs_lower_bound=0.95, rs_upper_bound=1.1
        )
        for level in ("token", "sequence", "geometric")
    },
    "mis rejection, KL": _mis("token", "truncate", 0.9, 1.1, use_rs=True, **_KL),
}
DIFFERS: dict[str, str] = {}

# arguments.py's and mis.py's.
_DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": None,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "custom_tis_function_path": None,
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "calculate_per_token_loss": False,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "get_mismatch_metrics": False,
    "use_rs": False,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_batch_normalize": False,
}

RUNNABLE = tuple(_DEFAULTS)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of slime\'s own code."""
    mpu = Namespace(get_context_parallel_world_size=lambda: 1, get_context_parallel_group=lambda: None)
    with (
        mock.patch.object(torch, "compile", lambda *args, **kwargs: args[0] if args else lambda function: function),
        import_files(
            root, MODULES, placeholder_packages=("slime", "slime_mis", "megatron"), values={"megatron.core.mpu": mpu}
        ) as modules,
    ):
        peer = modules["slime.backends.megatron_utils.loss"]
        utils = modules["slime.backends.megatron_utils.cp_utils"]
        peer.get_rollout_top_p_logprob_kwargs = lambda *args: {}  # type: ignore[attr-defined]
        peer._maybe_capture_log_probs = lambda *args: None  # type: ignore[attr-defined]
        functions = {_MIS["custom_tis_function_path"]: modules["slime_mis"].compute_mis_weights_with_cp}
        functions[_ICEPOP] = peer.icepop_function
        peer.load_function = functions.__getitem__  # type: ignore[attr-defined]

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            args = Namespace(**{**_DEFAULTS, **settings})
            args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
            tensors = batch.double()
            masks, lengths = list(tensors["mask"]), [WIDTH] * ROWS
            entropy = [torch.zeros_like(mask) for mask in masks]
            found = {"log_probs": list(tensors["curr"]), "entropy": entropy}
            peer.get_log_probs_and_entropy = lambda *args, **kwargs: (None, found)  # type: ignore[attr-defined]
            slime_batch = {"unconcat_tokens": None, "response_lengths": lengths, "total_lengths": [WIDTH + 1] * ROWS}
            names = {
                "log_probs": "prev",
                "rollout_log_probs": "gen",
                "ref_log_probs": "ref",
                "advantages": "advantages",
            }
            slime_batch |= {theirs: list(tensors[ours]) for theirs, ours in names.items()}
            slime_batch |= {"loss_masks": masks, "rollout_mask_sums": [mask.sum() for mask in masks]}
            reduce = utils.get_sum_of_sample_mean(
                slime_batch["total_lengths"],
                lengths,
                masks,
                slime_batch["rollout_mask_sums"],
                args.calculate_per_token_loss,
            )
            value, _ = peer.policy_loss_function(args, slime_batch, None, reduce)
            value = value / (tensors["mask"].sum() if args.calculate_per_token_loss else ROWS)
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run
