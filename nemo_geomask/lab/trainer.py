"""The training loop of one variant: roll out, then several optimiser steps on what was sampled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.lab.model import build_policy, token_logprobs
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.rollout import Rollout, collect
from nemo_geomask.lab.task import Progressions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Loss", "Trainer", "accumulate_gradients", "merge_metrics"]

# NeMo-RL's protocol, as far as the lab needs it.
Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


class Trainer:
    """Trains a fresh policy with one loss.

    Everything random follows from ``recipe.grpo.seed``, through generators of its own for weights, prompts, sampling
    and shuffling: two trainers with one recipe, one machine and one number of CPU threads take the same course, and
    trainers that differ in the loss alone start from the same weights and meet the same prompts.

    Attributes:
        recipe: the settings.
        task: the task.
        policy: the trained model, float32.
        reference: frozen initial policy, where the loss has a KL term.
    """

    def __init__(self, recipe: LabRecipe, loss: Loss) -> None:
        torch.set_num_threads(recipe.lab.num_threads)
        env, seed = recipe.env, recipe.grpo.seed
        self.recipe = recipe
        self.loss = loss
        self.task = Progressions(env.modulus, env.min_terms, env.max_terms)
        self.policy = build_policy(recipe.policy.model, self.task, seed)
        needs_reference = bool(getattr(loss, "reference_policy_kl_penalty", 0))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False) if needs_reference else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=recipe.policy.lr, weight_decay=recipe.policy.weight_decay
        )
        self._of_prompts, self._of_sampling, self._of_order = (
            torch.Generator().manual_seed(seed * 3 + offset) for offset in range(3)
        )
        self._updates = 0

    def steps(self) -> Iterator[tuple[dict[str, float], Rollout]]:
        """Train; yields each step's metrics and rollout batch, for as many steps as the recipe says."""
        for _ in range(self.recipe.grpo.max_num_steps):
            yield self.step()

    def step(self) -> tuple[dict[str, float], Rollout]:
        """One rollout batch and the optimiser steps on it.

        Returns:
            Metrics, the mean over the optimiser steps (extremes for NeMo-RL's ``_min`` and ``_max``), and the batch.
        """
        began = time.perf_counter()
        rollout = collect(self.policy, self.reference, self.recipe, self.task, (self._of_prompts, self._of_sampling))
        sampled = time.perf_counter()
        order = torch.randperm(len(rollout.data["rewards"]), generator=self._of_order)
        reports = [
            self._update({key: value[rows] for key, value in rollout.data.items()})
            for rows in torch.split(order, self.recipe.policy.train_global_batch_size)
        ]
        ended = time.perf_counter()
        metrics = {
            "reward": rollout.reward,
            "mean_response_length": rollout.response_length,
            **merge_metrics(reports, 1.0 / len(reports)),
            "generation_seconds": sampled - began,
            "step_seconds": ended - began,
        }
        return metrics, rollout

    def _update(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        self._updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.policy.lr * min(1.0, self._updates / max(1, self.recipe.policy.warmup_steps))
        self.optimizer.zero_grad()
        metrics = accumulate_gradients(self.policy, self.loss, batch, self.recipe.policy.train_micro_batch_size)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.policy.max_grad_norm)
        # A step on a non-finite gradient would end the run; NeMo-RL's Megatron optimiser skips it too.
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        return {**metrics, "grad_norm": float(norm), "skipped_update": float(not finite), "lr": rate}


def accumulate_gradients(
    policy: PreTrainedModel, loss: Loss, batch: Mapping[str, Tensor], micro_batch: int
) -> dict[str, float]:
    """Back-propagate one global batch in microbatches.

    Every microbatch's loss is divided by the counts of the whole batch, so the losses and the gradients sum.

    Args:
        policy: receives the gradients.
        loss: called by NeMo-RL's protocol.
        batch: the global batch, [B, T] tensors and [B] tensors.
        micro_batch: rows per forward pass.

    Returns:
        The metrics of the whole batch.
    """
    valid = batch["sample_mask"]
    counts = {
        "global_valid_seqs": valid.sum(),
        "global_valid_toks": (batch["token_mask"][:, 1:] * valid[:, None]).sum(),
    }
    reports = []
    for start in range(0, len(valid), micro_batch):
        part = {key: value[start : start + micro_batch] for key, value in batch.items()}
        value, metrics = loss(next_token_logprobs=token_logprobs(policy, part["input_ids"]), data=part, **counts)
        torch.autograd.backward(value)
        reports.append({key: float(metric) for key, metric in metrics.items()})
    return merge_metrics(reports, 1.0)


def merge_metrics(reports: list[dict[str, float]], scale: float) -> dict[str, float]:
    """Sum reports key by key and multiply by ``scale``; keys ending in ``_min`` and ``_max`` keep the extreme."""
    merged: dict[str, float] = {}
    for key in dict.fromkeys(key for report in reports for key in report):
        values = [report[key] for report in reports if key in report]
        if key.endswith("_min"):
            merged[key] = min(values)
        elif key.endswith("_max"):
            merged[key] = max(values)
        else:
            merged[key] = sum(values) * scale
    return merged
