"""Train the variants of a comparison one after another and write what came of it."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.advantages import kl_of_reward
from nemo_geomask.lab.compare import ComparedLoss
from nemo_geomask.lab.dump import write_rollout
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.progress import Progress
from nemo_geomask.lab.ranks import Ranks, company
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.results import LabResult, VariantResult
from nemo_geomask.lab.rollout import Rollout
from nemo_geomask.lab.samplers import build_sampler
from nemo_geomask.lab.task import task_of
from nemo_geomask.lab.trainer import Trainer
from nemo_geomask.losses import PolicyLoss

__all__ = ["run_lab"]


def run_lab(recipe: LabRecipe, variants: Sequence[ComparedLoss], out: Path, progress: Progress) -> LabResult:
    """Train each variant from the same weights on the same prompts.

    Losses are built, the optional packages imported and the generation engine started before anything trains, so that
    a mistake in the last variant shows at once. Ctrl-C ends the training and keeps what there is. With ``lab.tp``,
    ``cp`` or ``dp`` above 1 this process is the first of their product, and the only one that samples, writes and
    reports.

    Args:
        recipe: the settings.
        variants: what to compare; at least one.
        out: folder to create; gets ``metrics.jsonl``, ``config.yaml`` and a folder of rollouts for each variant.
        progress: shows how far things are.

    Returns:
        The histories of all variants that took at least one step.

    Raises:
        ConfigError: a variant's loss can't be built, or ``out`` holds an earlier run.
        MissingDependencyError: transformers, or the vLLM that the recipe asks for, is not installed.
        RankError: another process of the run died.
    """
    variants = [_recorded(variant, out) for variant in variants]
    losses = [_loss(variant, recipe) for variant in variants]
    for module in ("transformers", "yaml"):
        require(module)
    _prepare(out)
    if recipe.policy.generation.backend == "vllm":
        progress.note("Starting vLLM.")
    sampler = build_sampler(recipe)
    in_force = [_settings(loss) for loss in losses]
    _write_config(recipe, variants, in_force, out / "config.yaml")
    results: list[VariantResult] = []
    chance = task_of(recipe.env).chance
    beside = functools.partial(_train_beside, recipe, [variant.loss_fn for variant in variants])
    lab = recipe.lab
    with (out / "metrics.jsonl").open("w", encoding="utf-8", buffering=1) as log, progress:
        if lab.processes > 1:
            progress.note(f"Starting {lab.processes} processes: tp {lab.tp}, cp {lab.cp}, dp {lab.dp}.")
        try:
            with company(beside, tp=lab.tp, cp=lab.cp, dp=lab.dp) as ranks:
                for variant, loss, settings in zip(variants, losses, in_force, strict=True):
                    corrected = bool(settings.get("use_importance_sampling_correction"))
                    result = VariantResult(variant.label, settings, corrected)
                    results.append(result)
                    progress.start(variant.label, recipe.grpo.max_num_steps, chance)
                    _train(Trainer(recipe, loss, ranks, sampler), result, log, out, progress)
        except KeyboardInterrupt:
            progress.note("Interrupted: writing what was trained so far.")
    return LabResult(
        variants=[result for result in results if result.history],
        chance=chance,
        seed=recipe.grpo.seed,
        sampler=sampler.name,
        precision=recipe.policy.precision,
        out=out,
    )


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be used: {error.strerror or error}") from None
    if held:
        raise ConfigError(f"--out: {out} is not empty (it holds {held[0]}); choose another folder")
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out: {out} can't be written to; choose another folder")


def _train(trainer: Trainer, result: VariantResult, log: IO[str], out: Path, progress: Progress) -> None:
    recipe = trainer.recipe
    folder = out / _slug(result.label)
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    step, rollout = 0, None
    written = 0

    def dump(number: int, batch: Rollout) -> None:
        write_rollout(batch, trainer.task, folder / f"train_data_step{number}.jsonl")

    try:
        for step, (metrics, rollout) in enumerate(trainer.steps(), start=1):
            result.history.append(metrics)
            result.seconds = time.perf_counter() - began
            # JSON has no inf or NaN: null stands for them.
            finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
            entry = {"step": step, "seed": recipe.grpo.seed, "variant": result.label, **finite}
            log.write(json.dumps(entry) + "\n")
            if step % recipe.lab.rollouts_every == 0:
                dump(step, rollout)
                written = step
            progress.advance(metrics["reward"])
        result.complete = True
    finally:
        trainer.close()
        if rollout is not None and written != step:
            dump(step, rollout)


def _train_beside(recipe: LabRecipe, blocks: Sequence[Mapping[str, Any]], ranks: Ranks) -> None:
    """What the other ranks do while the first trains and writes."""
    for block in blocks:
        for _ in Trainer(recipe, build_loss(block), ranks).steps():
            pass


def _recorded(variant: ComparedLoss, out: Path) -> ComparedLoss:
    """The variant with a folder of its own for its records: in that of its rollouts, or in an absolute one."""
    record = variant.loss_fn.get("record")
    if not isinstance(record, Mapping) or not isinstance(record.get("dir"), str):
        return variant
    given, slug = Path(record["dir"]), _slug(variant.label)
    place = given / slug if given.is_absolute() else out / slug / given
    return replace(variant, loss_fn={**variant.loss_fn, "record": {**record, "dir": str(place)}})


def _loss(variant: ComparedLoss, recipe: LabRecipe) -> PolicyLoss:
    try:
        loss = build_loss(variant.loss_fn)
        kl_of_reward(loss.config, recipe.grpo)
        return loss
    except ConfigError as error:
        where = f"variant '{variant.label}'"
        raise type(error)(*(replace(problem, where=where) for problem in error.problems)) from None


def _settings(loss: PolicyLoss) -> Mapping[str, Any]:
    settings: dict[str, Any] = loss.config.model_dump(mode="json")
    return settings


def _write_config(
    recipe: LabRecipe, variants: Sequence[ComparedLoss], in_force: Sequence[Mapping[str, Any]], path: Path
) -> None:
    yaml = require("yaml")
    resolved = recipe.model_dump(mode="json")
    resolved["variants"] = {variant.label: dict(settings) for variant, settings in zip(variants, in_force, strict=True)}
    path.write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", label)
