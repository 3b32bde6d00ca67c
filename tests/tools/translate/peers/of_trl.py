"""Cases for TRL, and its own loss, run from a checkout."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import WIDTH, RandomBatch
from tests.tools.translate.peers.loading import import_files

TRAINER = "trl/trainer/grpo_trainer.py"
ASYNC_TRAINER = "trl/experimental/async_grpo/async_grpo_trainer.py"
_IS = "vllm_importance_sampling_"
_SEQUENCE = {"importance_sampling_level": "sequence"}


def _vllm(mode: str, **bounds: Any) -> dict[str, Any]:
    return {"use_vllm": True, _IS + "mode": mode, **{_IS + key: value for key, value in bounds.items()}}


CASES: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dapo", "dr_grpo", "sapo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "cispo, bound below 1": {"loss_type": "cispo", "epsilon_high": 0.9},
    "vespo": {"loss_type": "vespo"},
    "vespo, token weights": {"loss_type": "vespo", **_vllm("token_truncate", clip_max=1.02)},
    "clip": {"epsilon": 0.1, "epsilon_high": 0.28},
    "delta": {"delta": 1.3},
    "delta within the clip": {"delta": 1.1},
    **{
        f"{loss}, sequence ratio": {"loss_type": loss, **_SEQUENCE, "epsilon": 0.05}
        for loss in ("grpo", "dapo", "luspo")
    },
    "dr_grpo, own length": {"loss_type": "dr_grpo", "max_completion_length": 9},
    "default correction": {"use_vllm": True},
    "sequence_mask": _vllm("sequence_mask", clip_min=0.5, clip_max=2.0),
    "sequence_truncate": _vllm("sequence_truncate", clip_max=1.5),
    "token_mask": _vllm("token_mask", clip_min=0.8, clip_max=1.2),
    "token_mask, lower bound only": _vllm("token_mask", clip_min=0.8, clip_max=None),
    "token_truncate": _vllm("token_truncate", clip_min=0.8, clip_max=1.2),
    "no truncation": _vllm("token_mask", clip_max=None),
    "grpo, sequence ratio, token weights": {"loss_type": "grpo", **_SEQUENCE, **_vllm("token_truncate", clip_max=1.2)},
    "off-policy mask": {"off_policy_mask_threshold": 0.02, "use_vllm": True},
    "off-policy mask, no vLLM": {"off_policy_mask_threshold": 0.01},
    "KL": {"beta": 0.1},
    "KL, correction": {"beta": 0.1, **_vllm("token_mask", clip_max=1.2)},
    "KL times the ratio": {"beta": 0.1, "use_bias_correction_kl": True},
    "asynchronous": {"config_class": "AsyncGRPOConfig"},
    "asynchronous, clip": {"config_class": "AsyncGRPOConfig", "epsilon": 0.1, "epsilon_high": 0.28},
}
DIFFERS: dict[str, str] = {}


def _defaults(root: Path) -> dict[str, Any]:
    """Return ``GRPOConfig``'s, from its source."""
    tree = ast.parse((root / "trl/trainer/grpo_config.py").read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            for word in node.value.keywords:
                if word.arg == "default":
                    found[node.target.id] = ast.literal_eval(word.value)  # type: ignore[union-attr]
    return found


def _correction(root: Path) -> Any:
    """The lines that compute the weight, which stand amid a long method."""
    for node in ast.walk(ast.parse((root / TRAINER).read_text())):
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        ) and "invalid_mis_mask" in ast.unparse(node):
            return compile(ast.Module([node], []), TRAINER, "exec")
    raise LookupError("TRL computes its weight elsewhere now")


RUNNABLE = ("",)
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of TRL\'s own code."""
    defaults, correction = _defaults(root), _correction(root)
    stubs = (
        "trl",
        "transformers",
        "accelerate",
        "datasets",
        "pandas",
        "huggingface_hub",
        "peft",
        "packaging",
        "liger_kernel",
        "wandb",
        "trackio",
        "rich",
        "jmespath",
    )
    files = {"trl.trainer.grpo_trainer": TRAINER, "trl.experimental.async_grpo.async_grpo_trainer": ASYNC_TRAINER}
    with import_files(root, files, placeholder_packages=stubs) as modules:
        trainer = modules["trl.trainer.grpo_trainer"].GRPOTrainer
        async_trainer = modules["trl.experimental.async_grpo.async_grpo_trainer"].AsyncGRPOTrainer

        def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
            if settings.get("config_class") == "AsyncGRPOConfig":
                return _asynchronous(async_trainer, settings, batch)
            args = {**defaults, **settings}
            tensors = batch.double()
            mask = tensors["mask"]
            self = object.__new__(trainer)
            vars(self).update(args, args=SimpleNamespace(**args), _metrics={"train": _Lists()}, aux_loss_enabled=False)
            self.epsilon_low = args["epsilon"]
            self.epsilon_high = args["epsilon"] if args["epsilon_high"] is None else args["epsilon_high"]
            self.current_gradient_accumulation_steps, self._entropy_bonus_enabled = 1, False
            self.model = SimpleNamespace(training=True)
            self.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
            zeros = torch.zeros_like(mask)
            self._get_per_token_logps_and_entropies = lambda *args, **kwargs: (tensors["curr"], zeros, None)
            names = {"self": self, "torch": torch, "math": math, "tool_mask": None, "completion_mask": mask}
            names |= {"old_per_token_logps": tensors["prev"], "sampling_per_token_logps": tensors["gen"]}
            exec(correction, names)
            inputs = {
                "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
                "prompt_mask": torch.ones(len(mask), 1),
                "completion_ids": torch.zeros(len(mask), WIDTH, dtype=torch.long),
                "completion_mask": mask,
                "advantages": tensors["advantages"][:, 0],
                "old_per_token_logps": tensors["prev"],
                "ref_per_token_logps": tensors["ref"],
                "num_items_in_batch": mask.sum(),
            }
            if args["use_vllm"]:
                inputs["sampling_per_token_logps"] = tensors["gen"]
                inputs["importance_sampling_ratio"] = names["vllm_importance_sampling_ratio"]
            value = self._compute_loss(None, inputs)
            (gradient,) = torch.autograd.grad(value, tensors["curr"])
            return value.detach(), gradient

        yield run


def _asynchronous(trainer: Any, settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of ``AsyncGRPOTrainer``, which takes one row of all responses, each after its prompt."""
    tensors = batch.double()

    def in_one_row(values: Tensor) -> Tensor:
        """Put a prompt token before each response, and the responses one after the other: [1, rows * (width + 1)]."""
        return torch.cat([torch.zeros(len(values), 1), values], dim=1).reshape(1, -1)

    self = object.__new__(trainer)
    low = settings.get("epsilon", 0.2)
    vars(self).update(epsilon_low=low, epsilon_high=settings.get("epsilon_high", low), aux_loss_enabled=False)
    self.current_gradient_accumulation_steps, self._metrics = 1, {"train": _Lists()}
    self._train_tokens_start_time = None
    self.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    log_probs = in_one_row(tensors["curr"])[:, 1:]
    mask = in_one_row(tensors["mask"])
    inputs = {
        "attention_mask": torch.ones_like(mask),
        "input_ids": torch.zeros_like(mask).long(),
        "position_ids": torch.zeros_like(mask).long(),
        "completion_mask": mask,
        "old_log_probs": in_one_row(tensors["gen"]),
        "advantages": in_one_row(tensors["advantages"]),
        "global_n_tokens": tensors["mask"].sum()[None],
        "metrics": {},
    }
    value = self.compute_loss(lambda **_: {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs)}, inputs)
    (gradient,) = torch.autograd.grad(value, tensors["curr"])
    return value.detach(), gradient


class _Lists(dict):
    def __missing__(self, key: str) -> list[Any]:
        return self.setdefault(key, [])
