"""Training loop of one run: collect a rollout batch, then take several optimiser steps on it."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import PREV_LOGPROBS, TOKEN_MASK, TOKEN_WEIGHT_VERSIONS, TRAINING_WEIGHT_VERSION
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.losses import PolicyLoss, PrestepPass
from nemo_geomask.losses.prestep import untrained_metrics
from nemo_geomask.metrics import kept_factor, summarize_step
from nemo_geomask.parallel import DocumentStep, collect_documents
from nemo_geomask.records.flight import FlightRecorder
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_model import build_policy
from nemo_geomask.tools.lab.ranks import Ranks
from nemo_geomask.tools.lab.rollout import (
    Rollout,
    collect_rollout,
    compute_rewards,
    mean_measures,
    reward_kl_coefficient,
)
from nemo_geomask.tools.lab.samplers import Sampler, build_sampler, trainer_sampler
from nemo_geomask.tools.lab.tasks import draw_prompts, load_task
from nemo_geomask.tools.lab.training_engine import TrainingEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VALIDATION_SEED = 20260


def check_device(recipe: LabRecipe) -> None:
    """Raise ConfigError if the recipe sets ``lab.device: cuda`` and torch sees no GPU."""
    if recipe.lab.device == "cuda" and not torch.cuda.is_available():
        message = (
            f"cuda, but torch {torch.__version__} sees no GPU; set cpu, or install a torch built for CUDA on a machine "
            "with a GPU"
        )
        raise ConfigError(Problem(("lab.device",), message))


def check_validation(recipe: LabRecipe) -> None:
    """Raise ConfigError if the recipe sets ``grpo.val_period`` and the task has too few validation prompts."""
    if recipe.grpo.val_period:
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        draw_prompts(load_task(recipe.env), recipe.grpo.max_val_samples, generator, held_out=True)


def check_reference(loss: PolicyLoss, recipe: LabRecipe) -> bool:
    """Return True if the loss or the reward has a KL term to the reference policy.

    Raises: ConfigError: the lab can't compute the term.
    """
    coefficient = loss.config.reference_policy_kl_penalty
    needs_reference = bool(loss.reference_policy_kl_penalty or reward_kl_coefficient(loss.config, recipe.grpo))
    if needs_reference and recipe.policy.generation.has_filters and recipe.lab.filter_logprobs:
        keys = ("loss_fn.reference_policy_kl_penalty", "policy.generation.top_p", "lab.filter_logprobs")
        message = (
            f"reference_policy_kl_penalty ({coefficient:g}) needs log-probs of all tokens, but top_p or top_k exclude "
            "some; set it to 0, or lab.filter_logprobs: false"
        )
        raise ConfigError(Problem(keys, message))
    return needs_reference


class Trainer:
    """Trainer of a randomly initialised policy with one loss.

    All randomness follows from ``recipe.grpo.seed``, through separate generators for weights, prompts, sampling and
    shuffling. On a CPU, two trainers with the same recipe, machine and number of CPU threads give the same numbers.
    Trainers that differ only in the loss start from the same weights and get the same prompts. Weights and prompts are
    those of the CPU on a GPU, too.

    With several ranks, each rank runs a trainer, and all take the same steps.

    Attributes:
        recipe: the settings.
        loss: the loss.
        engine: the training engine, at this process's position among the run's ranks.
        sampler: the generation engine; that of the recipe, unless one is passed.
        task: the task.
        policy: the trained model, float32, on ``lab.device``. Rollout batches are on the CPU, as on NeMo-RL's driver.
        reference: frozen initial policy; None unless the loss or the reward has a KL term.
        versions: frozen policies of the last weight updates that may still sample, oldest first; empty unless
            ``grpo.async_grpo`` is enabled, and on ranks that don't sample.
    """

    def __init__(
        self, recipe: LabRecipe, loss: PolicyLoss, ranks: Ranks | None = None, sampler: Sampler | None = None
    ) -> None:
        ranks = Ranks() if ranks is None else ranks
        torch.set_num_threads(max(1, recipe.lab.num_threads // ranks.world_size))
        seed = recipe.grpo.seed
        self.recipe = recipe
        self.loss = loss
        self.task = load_task(recipe.env)
        self.sampler = sampler or build_sampler(recipe)
        self.engine = TrainingEngine(ranks, recipe)
        self.policy = build_policy(recipe.policy.model, self.task, seed, recipe.lab.device)
        needs_reference = check_reference(loss, recipe)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False) if needs_reference else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=recipe.policy.lr, weight_decay=recipe.policy.weight_decay, fused=True
        )
        self.versions: deque[PreTrainedModel] = deque(maxlen=recipe.grpo.async_grpo.lag)
        self._prompt_generator, self._sampling_generator, self._order_generator = (
            torch.Generator().manual_seed(seed * 3 + offset) for offset in range(3)
        )
        self._updates = self._steps = 0
        self._prestep_pass = PrestepPass(loss.config)
        self._record_settings = loss.config.record
        self._flight_recorder: FlightRecorder | None = None
        if self._record_settings is not None and ranks.is_first:
            facts = {
                "loop": "lab",
                "sampler": self.sampler.name,
                "trainer": recipe.policy.precision,
                "experts": recipe.policy.model.num_experts,
            }
            self._flight_recorder = FlightRecorder(loss.config, facts=facts)

    def steps(self) -> Iterator[tuple[dict[str, float], Rollout]]:
        """Train for the recipe's number of steps; yield each step's metrics and rollout batch."""
        for _ in range(self.recipe.grpo.max_num_steps):
            yield self.step()

    def step(self) -> tuple[dict[str, float], Rollout]:
        """Collect one rollout batch and take the optimiser steps on it.

        Returns:
            The metrics and the batch. A metric is the mean over the optimiser steps, or the extreme if its name ends in
            ``_min`` or ``_max``.
        """
        start_time = time.perf_counter()
        generators = (self._prompt_generator, self._sampling_generator)
        entropy = self._record_settings is not None and self._record_settings.entropy
        versions = (*self.versions, self.policy)
        rollout = collect_rollout(
            versions,
            self.reference,
            self.recipe,
            self.task,
            generators,
            self.engine,
            self.sampler,
            entropy=entropy,
            loss=self.loss.config,
        )
        rollout_end_time = time.perf_counter()
        if self.versions.maxlen and (self.engine.ranks.is_first or self.recipe.policy.generation.logprobs == "trainer"):
            self.versions.append(copy.deepcopy(self.policy).requires_grad_(False))
        rollout.data[TRAINING_WEIGHT_VERSION] = torch.full_like(rollout.data["input_lengths"], self._steps)
        rollout.data[TOKEN_WEIGHT_VERSIONS] = self._steps - rollout.data["weight_age"]
        decision = self._prestep_pass(rollout.data)
        if self._record_settings is not None:
            self.engine.recorded_curr = torch.zeros_like(rollout.data[PREV_LOGPROBS])
        if decision.train:
            data = {**rollout.data, **decision.changes, "row": torch.arange(len(rollout.data["rewards"]))}
            reports = [self._update(data, step) | decision.metrics for step in self._document_steps(data)]
        else:
            untrained = untrained_metrics(self.loss, [{**rollout.data, **decision.changes}], decision)
            report = {name: value for name, (value,) in untrained.items()}
            reports = [{**report, "grad_norm": 0.0, "skipped_update": 1.0, "lr": self._learning_rate()}]
        self._record(rollout.data, updated=decision.train)
        self._steps += 1
        end_time = time.perf_counter()
        metrics = {
            "reward": rollout.reward,
            "mean_response_length": rollout.response_length,
            **rollout.origin_metrics,
            **summarize_step(merge_metrics(reports, 1.0 / len(reports))),
            **self._validate(),
            "generation_seconds": rollout_end_time - start_time,
            "step_seconds": end_time - start_time,
        }
        return metrics, rollout

    def _validate(self) -> dict[str, float]:
        """Return mean reward and measures on validation prompts if a validation is due, under engine and trainer.

        ``validation/…`` are of responses that the generation engine samples, which uncorrected training favours;
        ``validation_trainer/…`` of the policy in the training engine's arithmetic. Random draws are always the same.
        """
        grpo = self.recipe.grpo
        is_due = grpo.val_period and (self._steps % grpo.val_period == 0 or self._steps == grpo.max_num_steps)
        if not is_due or not self.engine.ranks.is_first:
            return {}
        metrics: dict[str, float] = {}
        for name, sampler in (("validation", self.sampler), ("validation_trainer", trainer_sampler(self.recipe))):
            generator = torch.Generator().manual_seed(_VALIDATION_SEED)
            prompts = draw_prompts(self.task, grpo.max_val_samples, generator, held_out=True)
            sampled = sampler.sample((self.policy,), prompts, generator)
            measures = {"reward": float(compute_rewards(self.task, prompts, sampled).mean())}
            measures |= mean_measures(self.task, sampled)
            metrics |= {f"{name}/{key}": value for key, value in measures.items()}
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, which is everything that the recipe does not determine."""
        return {
            "policy": self.policy.state_dict(),
            "versions": [policy.state_dict() for policy in self.versions],
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "counts": (self._updates, self._steps),
            "vetoed": (self._prestep_pass.vetoed, self._prestep_pass.in_a_row),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""
        for weights in state["versions"]:
            self.versions.append(copy.deepcopy(self.policy).requires_grad_(False))
            self.versions[-1].load_state_dict(weights)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        self._updates, self._steps = state["counts"]
        self._prestep_pass.vetoed, self._prestep_pass.in_a_row = state["vetoed"]

    @property
    def _generators(self) -> tuple[torch.Generator, ...]:
        return self._prompt_generator, self._sampling_generator, self._order_generator

    def _record(self, data: Mapping[str, Tensor], *, updated: bool) -> None:
        """Record the step if ``loss_fn.record`` is set; ``updated`` is False if the optimiser step was skipped."""
        if self._record_settings is None or self.engine.recorded_curr is None:
            return
        curr, self.engine.recorded_curr = self.engine.ranks.sum_shards(self.engine.recorded_curr), None
        staleness = data["weight_age"].amax(dim=1)
        extra_columns = {"weight_version": self._steps - staleness, "staleness": staleness}
        if updated:
            extra_columns["curr_logprobs"] = curr
        if self._flight_recorder is not None:
            self._flight_recorder.record(self._steps + 1, {**data, **extra_columns})

    def close(self) -> None:
        """Wait until all records are written."""
        if self._flight_recorder is not None:
            self._flight_recorder.recorder.close()

    def _document_steps(self, data: Mapping[str, Tensor]) -> Iterator[DocumentStep[Tensor]]:
        """Yield the optimiser steps of a rollout, as microbatches of its shuffled rows.

        The last step may be smaller than the others and is then normalised by its actual counts. So no response is
        dropped or left for the next rollout, when the policy has changed.
        """
        settings, dp = self.recipe.policy, self.engine.ranks.dp
        trained = data[TOKEN_MASK][:, 1:] * data["sample_mask"][:, None]
        order = torch.randperm(len(trained), generator=self._order_generator)
        source = iter(torch.split(order, settings.train_micro_batch_size)[dp.rank :: dp.size])

        def count(rows: Tensor) -> tuple[int, int]:
            return int(data["sample_mask"][rows].sum()), int(trained[rows].sum())

        target = settings.documents
        while (step := collect_documents(source, docs_per_step=target, count=count, group=dp.group)) is not None:
            yield step

    def _learning_rate(self) -> float:
        return self.recipe.policy.lr * min(1.0, self._updates / max(1, self.recipe.policy.warmup_steps))

    def _update(self, data: Mapping[str, Tensor], step: DocumentStep[Tensor]) -> dict[str, float]:
        self._updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad()
        batches = ({key: value[rows] for key, value in data.items()} for rows in step.microbatches if rows is not None)
        metrics = accumulate_gradients(self.engine, self.policy, self.loss, batches, step.documents, step.tokens)
        if self.loss.config.denominator == "kept_in_loss":
            gradients = [weight.grad for weight in self.policy.parameters() if weight.grad is not None]
            torch._foreach_mul_(gradients, kept_factor(metrics))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.policy.max_grad_norm)
        # A step with a non-finite gradient would ruin the weights; NeMo-RL's Megatron optimiser also skips it.
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.optimizer.step()
        return {
            **metrics,
            "grad_norm": float(norm),
            "skipped_update": float(not is_finite),
            "lr": self._learning_rate(),
        }


def accumulate_gradients(
    engine: TrainingEngine,
    policy: PreTrainedModel,
    loss: PolicyLoss,
    microbatches: Iterable[Mapping[str, Tensor]],
    documents: int,
    tokens: int,
) -> dict[str, float]:
    """Accumulate the gradients of one optimiser step over this rank's microbatches of [B, T] and [B] tensors.

    Every microbatch's loss is divided by the numbers of responses and trained tokens of the complete step, over all
    ranks, so that losses and gradients add up. On every rank the policy gets the gradients of the complete step.

    Returns: the metrics of the complete step.
    """
    reports = []
    for part in microbatches:
        value, metrics = engine.evaluate(policy, loss, part, documents, tokens)
        torch.autograd.backward(value)
        reports.append({key: float(metric) for key, metric in metrics.items()})
    engine.ranks.sum_gradients(policy.parameters(), sharded=policy.lm_head.weight)
    return merge_metrics(engine.ranks.gather_data_parallel(reports), 1.0)


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
