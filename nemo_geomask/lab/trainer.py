"""The training loop of one variant: roll out, then several optimiser steps on what was sampled."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.lab.advantages import kl_of_reward
from nemo_geomask.lab.engine import TrainEngine
from nemo_geomask.lab.model import build_policy
from nemo_geomask.lab.ranks import Ranks
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.rollout import Rollout, collect, score
from nemo_geomask.lab.samplers import Sampler, build_sampler
from nemo_geomask.lab.task import draw_prompts, task_of
from nemo_geomask.losses import BeforeStep, PolicyLoss
from nemo_geomask.losses.prestep import untrained_metrics
from nemo_geomask.metrics import summarized
from nemo_geomask.parallel import DocumentStep, collect_documents
from nemo_geomask.records.flight import FlightRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Trainer", "accumulate_gradients", "check_reference", "merge_metrics"]

_VALIDATION_SEED = 20260


def check_validation(recipe: LabRecipe) -> None:
    """Draw the prompts of a recipe's validations, if it has any, as they will be drawn.

    Raises:
        ConfigError: the task has too few.
    """
    if recipe.grpo.val_period:
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        draw_prompts(task_of(recipe.env), recipe.grpo.max_val_samples, generator, held_out=True)


def check_reference(loss: PolicyLoss, recipe: LabRecipe) -> bool:
    """Whether a KL to the reference is asked for.

    Raises:
        ConfigError: it is, in a way that the lab can't compute.
    """
    coefficient = loss.config.reference_policy_kl_penalty
    asked = bool(loss.reference_policy_kl_penalty or kl_of_reward(loss.config, recipe.grpo))
    if asked and recipe.policy.generation.filters and recipe.lab.filter_logprobs:
        keys = ("loss_fn.reference_policy_kl_penalty", "policy.generation.top_p", "lab.filter_logprobs")
        text = (
            f"reference_policy_kl_penalty ({coefficient:g}) needs log-probs of all tokens, and top_p or top_k leave "
            "some out; set it to 0, or lab.filter_logprobs: false"
        )
        raise ConfigError(Problem(keys, text))
    return asked


class Trainer:
    """Trains a fresh policy with one loss.

    Everything random follows from ``recipe.grpo.seed``, through generators of its own for weights, prompts, sampling
    and shuffling: two trainers with one recipe, one machine and one number of CPU threads take the same course, and
    trainers that differ in the loss alone start from the same weights and meet the same prompts.

    Under several ranks each of them runs a trainer, and all of these keep step.

    Args:
        recipe: the settings.
        loss: the loss.
        ranks: this process among those of the run; None for a process alone.
        sampler: the generation engine; None starts the recipe's.

    Attributes:
        recipe: the settings.
        loss: the loss.
        engine: how the policy is run for training.
        sampler: how it is run for sampling.
        task: the task.
        policy: the trained model, float32.
        reference: frozen initial policy, where the loss or the reward has a KL term.
        versions: frozen policies of the last weight updates that may still sample, oldest first; empty unless
            ``grpo.async_grpo`` is enabled, and on ranks that don't sample.
    """

    def __init__(
        self, recipe: LabRecipe, loss: PolicyLoss, ranks: Ranks | None = None, sampler: Sampler | None = None
    ) -> None:
        ranks = Ranks() if ranks is None else ranks
        torch.set_num_threads(max(1, recipe.lab.num_threads // ranks.world))
        seed = recipe.grpo.seed
        self.recipe = recipe
        self.loss = loss
        self.task = task_of(recipe.env)
        self.sampler = sampler or build_sampler(recipe)
        self.engine = TrainEngine(ranks, recipe)
        self.policy = build_policy(recipe.policy.model, self.task, seed)
        needs_reference = check_reference(loss, recipe)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False) if needs_reference else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=recipe.policy.lr, weight_decay=recipe.policy.weight_decay, fused=True
        )
        self.versions: deque[PreTrainedModel] = deque(maxlen=recipe.grpo.async_grpo.lag)
        self._of_prompts, self._of_sampling, self._of_order = (
            torch.Generator().manual_seed(seed * 3 + offset) for offset in range(3)
        )
        self._updates = self._steps = 0
        self._before_step = BeforeStep(loss.config)
        self._recording = loss.config.record
        self._records: FlightRecorder | None = None
        if self._recording is not None and ranks.first:
            self._records = FlightRecorder(loss.config, facts={"loop": "lab", "sampler": self.sampler.name})

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
        generators = (self._of_prompts, self._of_sampling)
        entropy = self._recording is not None and self._recording.entropy
        versions = (*self.versions, self.policy)
        rollout = collect(
            *(versions, self.reference, self.recipe, self.task, generators, self.engine, self.sampler),
            entropy=entropy,
            loss=self.loss.config,
        )
        sampled = time.perf_counter()
        if self.versions.maxlen and (self.engine.ranks.first or self.recipe.policy.generation.logprobs == "trainer"):
            self.versions.append(copy.deepcopy(self.policy).requires_grad_(False))
        decision = self._before_step(rollout.data)
        if self._recording is not None:
            self.engine.curr = torch.zeros_like(rollout.data["prev_logprobs"])
        if decision.train:
            data = {**rollout.data, **decision.changes, "row": torch.arange(len(rollout.data["rewards"]))}
            reports = [self._update(data, step) | decision.metrics for step in self._document_steps(data)]
        else:
            untrained = untrained_metrics(self.loss, [{**rollout.data, **decision.changes}], decision)
            report = {name: value for name, (value,) in untrained.items()}
            reports = [{**report, "grad_norm": 0.0, "skipped_update": 1.0, "lr": self._rate()}]
        self._record(rollout.data, updated=decision.train)
        ended = time.perf_counter()
        metrics = {
            "reward": rollout.reward,
            "mean_response_length": rollout.response_length,
            **rollout.causes,
            **summarized(merge_metrics(reports, 1.0 / len(reports))),
            **self._validate(),
            "generation_seconds": sampled - began,
            "step_seconds": ended - began,
        }
        return metrics, rollout

    def _validate(self) -> dict[str, float]:
        """Mean reward on prompts that are never trained on, sampled as the rollouts are; always the same draws."""
        grpo = self.recipe.grpo
        due = grpo.val_period and (self._steps % grpo.val_period == 0 or self._steps == grpo.max_num_steps)
        if not due or not self.engine.ranks.first:
            return {}
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        prompts = draw_prompts(self.task, grpo.max_val_samples, generator, held_out=True)
        rewards = score(self.task, prompts, self.sampler.sample((self.policy,), prompts, generator))
        return {"validation/reward": float(rewards.mean())}

    def state(self) -> dict[str, Any]:
        """All that the steps to come depend on and that the recipe does not say."""
        return {
            "policy": self.policy.state_dict(),
            "versions": [policy.state_dict() for policy in self.versions],
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "counts": (self._updates, self._steps),
            "vetoed": (self._before_step.vetoed, self._before_step.in_a_row),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave, as if nothing had happened."""
        for weights in state["versions"]:
            self.versions.append(copy.deepcopy(self.policy).requires_grad_(False))
            self.versions[-1].load_state_dict(weights)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, where in zip(self._generators, state["generators"], strict=True):
            generator.set_state(where)
        self._updates, self._steps = state["counts"]
        self._before_step.vetoed, self._before_step.in_a_row = state["vetoed"]

    @property
    def _generators(self) -> tuple[torch.Generator, ...]:
        return self._of_prompts, self._of_sampling, self._of_order

    def _record(self, data: Mapping[str, Tensor], *, updated: bool) -> None:
        """Record the step, where that is asked for; ``updated``: the batch was trained on."""
        trained, self._steps = self._steps, self._steps + 1
        if self._recording is None or self.engine.curr is None:
            return
        curr, self.engine.curr = self.engine.ranks.assemble(self.engine.curr), None
        staleness = data["weight_age"].amax(dim=1)
        beside = {"weight_version": trained - staleness, "staleness": staleness}
        if updated:
            beside["curr_logprobs"] = curr
        if self._records is not None:
            self._records.record(self._steps, {**data, **beside})

    def close(self) -> None:
        """Wait for the records that are still to be written."""
        if self._records is not None:
            self._records.recorder.close()

    def _document_steps(self, data: Mapping[str, Tensor]) -> Iterator[DocumentStep[Tensor]]:
        """The rollout's rows, shuffled, in microbatches by optimiser step.

        The last step may be smaller than the others. It is taken, with its own counts: no response is dropped, and
        none waits for the next rollout, when the policy that sampled it is gone.
        """
        settings, dp = self.recipe.policy, self.engine.ranks.dp
        trained = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        order = torch.randperm(len(trained), generator=self._of_order)
        source = iter(torch.split(order, settings.train_micro_batch_size)[dp.rank :: dp.size])

        def count(rows: Tensor) -> tuple[int, int]:
            return int(data["sample_mask"][rows].sum()), int(trained[rows].sum())

        target = settings.documents
        while (step := collect_documents(source, docs_per_step=target, count=count, group=dp.group)) is not None:
            yield step

    def _rate(self) -> float:
        return self.recipe.policy.lr * min(1.0, self._updates / max(1, self.recipe.policy.warmup_steps))

    def _update(self, data: Mapping[str, Tensor], step: DocumentStep[Tensor]) -> dict[str, float]:
        self._updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad()
        batches = ({key: value[rows] for key, value in data.items()} for rows in step.microbatches if rows is not None)
        metrics = accumulate_gradients(self.engine, self.policy, self.loss, batches, step.documents, step.tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.policy.max_grad_norm)
        # A step on a non-finite gradient would end the run; NeMo-RL's Megatron optimiser skips it too.
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        return {**metrics, "grad_norm": float(norm), "skipped_update": float(not finite), "lr": self._rate()}


def accumulate_gradients(
    engine: TrainEngine,
    policy: PreTrainedModel,
    loss: PolicyLoss,
    microbatches: Iterable[Mapping[str, Tensor]],
    documents: int,
    tokens: int,
) -> dict[str, float]:
    """Back-propagate one optimiser step in microbatches.

    Every microbatch's loss is divided by the counts of the whole step, so the losses and the gradients sum.

    Args:
        engine: runs the policy.
        policy: receives the gradients of the whole step, on every rank.
        loss: called for each microbatch.
        microbatches: this rank's, [B, T] and [B] tensors.
        documents: in the step, over all microbatches and ranks.
        tokens: trained tokens in the same.

    Returns:
        The metrics of the whole step.
    """
    reports = []
    for part in microbatches:
        value, metrics = engine.evaluate(policy, loss, part, documents, tokens)
        torch.autograd.backward(value)
        reports.append({key: float(metric) for key, metric in metrics.items()})
    engine.ranks.sum_gradients(policy.parameters(), sharded=policy.lm_head.weight)
    return merge_metrics(engine.ranks.from_data_parallel(reports), 1.0)


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
