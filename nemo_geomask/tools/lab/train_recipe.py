"""Implementation of ``nemo-geomask lab``: plans the runs of a recipe, trains them and reports on them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.recipe import load_recipe
from nemo_geomask.tools.lab.compare_specs import DEFAULT_LOSS, parse_compare
from nemo_geomask.tools.lab.lab_recipe import SEEDS, LabRecipe
from nemo_geomask.tools.lab.lab_report import report_results
from nemo_geomask.tools.lab.progress import Progress
from nemo_geomask.tools.lab.run_queue import train
from nemo_geomask.tools.lab.run_store import COMPUTE_KEYS, Run

_OPTIONS = "loss_fn.options"


def train_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    compare: str | None = None,
    vary: Sequence[str] = (),
    seeds: str | None = None,
    loss_from: Path | None = None,
    jobs: int | None = None,
    out: Path | None = None,
) -> int:
    """Train the runs of a recipe that are not finished, write the outputs and print the table; return the exit status.

    The options are those of ``nemo-geomask lab``; None and empty ones take the recipe's settings. The status is 1 if a
    run failed, and 130 if the user interrupted it.

    Raises: GeomaskError: the recipe, an option or the installation is invalid.
    """
    require("matplotlib", "the lab needs", "demo")  # before the recipe, which needs a smaller extra
    path = Path(path)
    folder = out or Path("results", "lab", f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    runs = plan_runs(path, overrides, compare=compare, vary=vary, seeds=seeds, loss_from=loss_from, out=folder)
    steps = sum(run.recipe.grpo.max_num_steps for run in runs)
    print(f"{len(runs)} runs, {steps} steps, to {folder}. After an interruption, --out {folder} continues there.")
    complete = train(runs, Progress(runs), jobs=choose_jobs(jobs, runs))
    if not any(run.steps_file.exists() for run in runs):
        print("No step was completed; nothing to report.")
        return 130
    report_results([folder], folder)
    print(f"Steps, rollouts and summary: {folder}\nPlot: {folder / 'lab.png'}")
    if any(run.recipe.loss_fn.get("record") for run in runs):
        print(f"Diagnosis of the records: nemo-geomask diagnose {folder}")
    return 130 if not complete else 0 if all(run.finished for run in runs) else 1


def report_runs(places: Sequence[str], *, baseline: str | None, out: Path | None) -> int:
    """Report on all runs in the folders; write the plot and summary to ``out``, or else to the first folder."""
    require("matplotlib", "the lab needs", "demo")  # before the folders
    if not places:
        raise ConfigError("lab report needs folders of runs: nemo-geomask lab report DIR [DIR …]")
    folders = [Path(place) for place in places]
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out: the folder {out} can't be created: {error.strerror or error}") from None
    folder = out or folders[0]
    report_results(folders, folder, baseline=baseline)
    print(f"Plot: {folder / 'lab.png'}")
    return 0


def plan_runs(
    path: Path,
    overrides: Sequence[str],
    *,
    compare: str | None,
    vary: Sequence[str],
    seeds: str | None,
    loss_from: Path | None,
    out: Path,
) -> list[Run]:
    """Plan the runs that :func:`train_recipe` trains, sorted by seed.

    Raises: ConfigError: the recipe or an option is invalid, or two variants have the same settings.
    """
    by_settings: dict[tuple[str, int], Run] = {}
    positions: dict[str, int] = {}
    for combination in itertools.product(*map(parse_vary, vary)):
        with _recipe_with_loss(path, loss_from) as file:
            recipe = LabRecipe.read(load_recipe(file, [*overrides, *combination], new_keys=True), source=path.name)
        for spec, loss_fn in _compared_losses(recipe, compare).items():
            has_options = "options" in loss_fn
            applicable = [text for text in combination if has_options or not text.lstrip("+").startswith(_OPTIONS)]
            label = " ".join([spec, *applicable])
            position = positions.setdefault(label, len(positions))
            for seed in parse_seeds(seeds) if seeds else (recipe.grpo.seed,):
                grpo = recipe.grpo.model_copy(update={"seed": seed})
                run_recipe = recipe.model_copy(update={"loss_fn": loss_fn, "grpo": grpo})
                run = Run(label, run_recipe, out, position)
                same = by_settings.setdefault((json.dumps(run.settings, sort_keys=True), seed), run)
                # A variant without options is the same for all values of an option.
                is_planned = same.label == label and len(applicable) < len(combination)
                if same is not run and not is_planned:
                    raise ConfigError(
                        f"'{same.label}' and '{run.label}' have the same settings, so their curves would be equal. "
                        "Remove one"
                    )
    return sorted(by_settings.values(), key=lambda run: run.recipe.grpo.seed)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds: ``1..10``, ``1,2,5`` or both, ``1..3,7``.

    Raises: ConfigError: the text is not a list of seeds, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last >= SEEDS:
            raise ConfigError(f"--seeds: '{text}' names {last}; a seed is below {SEEDS}")
        if first > last:
            raise ConfigError(f"--seeds: '{text}' is not a list of seeds; write 1..10, 1,2,5 or 1..3,7")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: '{text}' names a seed twice")
    return tuple(seeds)


def parse_vary(text: str) -> list[str]:
    """Split ``key=v1,v2``, in Hydra's grammar, into the overrides ``key=v1`` and ``key=v2``.

    Raises: ConfigError: the text has another form, or the key must be the same in all runs.
    """
    parser = require("hydra.core.override_parser.overrides_parser", "the lab needs", "demo").OverridesParser
    try:
        (parsed,) = parser.create().parse_overrides(overrides=[text])
        if not parsed.is_sweep_override():
            raise ValueError("it has only one value")
        values = list(parsed.sweep_string_iterator())
    except Exception as error:
        raise ConfigError(
            f"--vary: '{text}': {str(error).splitlines()[0]}; write key=value,value,…, such as "
            "loss_fn.reference_policy_kl_type=k1,k2,k3"
        ) from None
    key = parsed.get_key_element()
    section, _, name = key.partition(".")
    if key == "grpo.seed" or (section == "lab" and name.partition(".")[0] in COMPUTE_KEYS):
        fix = "--seeds" if key == "grpo.seed" else "an override, since it does not change what is trained"
        raise ConfigError(f"--vary: {key} can't be varied; use {fix}")
    return [f"{key}={value}" for value in values]


def _compared_losses(recipe: LabRecipe, compare: str | None) -> dict[str, dict[str, Any]]:
    """Return the ``loss_fn:`` block of each variant by its SPEC, or that of the recipe by its loss's name."""
    specs = recipe.lab.compare if compare is None else compare
    if specs:
        return parse_compare(specs, recipe.loss_fn, recipe.lab)
    return {str(recipe.loss_fn.get("name", DEFAULT_LOSS)): recipe.loss_fn}


def choose_jobs(requested: int | None, runs: Sequence[Run]) -> int:
    """Return the number of training processes; 1 if a run has several ranks or vLLM, which use several cores.

    On a GPU it is 1, too, unless the user requests more, since the runs share its memory.
    """
    recipe = runs[0].recipe
    reason = None
    if any(run.recipe.lab.processes > 1 for run in runs):
        reason = "lab.tp, lab.cp and lab.dp"
    elif any(run.recipe.policy.generation.backend == "vllm" for run in runs):
        reason = "policy.generation.backend: vllm"
    if requested is not None and requested < 1:
        raise ConfigError(f"--jobs: {requested} processes can't train; write 1 or more")
    if reason is not None:
        if requested is not None and requested > 1:
            raise ConfigError(
                f"--jobs: {requested} runs at a time can't be combined with {reason}; leave out one of them"
            )
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    default = 1 if recipe.lab.device == "cuda" else max(1, cores // recipe.lab.num_threads)
    return requested or default


@contextlib.contextmanager
def _recipe_with_loss(path: Path, loss_from: Path | None) -> Iterator[Path]:
    """Yield the recipe's path, or that of a temporary copy with the ``loss_fn:`` block of the recipe ``loss_from``."""
    if loss_from is None:
        yield path
        return
    block = load_recipe(loss_from).get("loss_fn")
    if not isinstance(block, dict):
        raise ConfigError(f"--loss-from: {loss_from} has no loss_fn: block")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        # The variants of the lab's recipe are of its own loss.
        data = {"defaults": str(path.resolve()), "lab": {"compare": []}, "loss_fn": {"_override_": True, **block}}
        file.write_text(require("yaml", "the lab needs", "demo").safe_dump(data), encoding="utf-8")
        yield file
