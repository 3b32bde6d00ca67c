"""From a recipe's path to trained runs and their report: what ``nemo-geomask lab`` does."""

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
from nemo_geomask.lab.compare import ComparedLoss, parse_compare
from nemo_geomask.lab.diagnosed import print_diagnosis
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.outcome import TARGET
from nemo_geomask.lab.progress import Progress
from nemo_geomask.lab.recipe import SEEDS, LabRecipe
from nemo_geomask.lab.report import report
from nemo_geomask.lab.run import train
from nemo_geomask.lab.runs import SHARED, Course, Run
from nemo_geomask.recipe import load_recipe

__all__ = ["main", "parse_seeds", "parse_vary", "plan", "report_main"]


def main(
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
    """Train what is not trained yet, write the outputs and print the table.

    Args:
        path: the recipe.
        overrides: ``key.path=value``.
        compare: SPECs, separated by commas; None takes the recipe's ``lab.compare``, or its ``loss_fn`` alone.
        vary: ``key.path=value,value,…``; of several, every combination.
        seeds: ``1..10`` or ``1,2,5``; None: the recipe's ``grpo.seed``.
        loss_from: a NeMo-RL recipe, whose ``loss_fn:`` takes the place of the lab recipe's.
        jobs: processes that train; None: one a core, as long as there are runs.
        out: folder of the outputs; None makes one under ``results/lab``. Runs that are there are not trained again.

    Returns:
        0, 1 if a run failed, or 130 when interrupted.

    Raises:
        GeomaskError: a mistake in the recipe, a flag or the installation.
    """
    path = Path(path)
    folder = out or Path("results", "lab", f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    runs = plan(path, overrides, compare=compare, vary=vary, seeds=seeds, loss_from=loss_from, out=folder)
    console = _console()
    require("matplotlib")
    progress = Progress(console, len({run.recipe.grpo.seed for run in runs}))
    complete = train(runs, progress, jobs=_jobs(jobs, runs))
    if not any(run.file.exists() for run in runs):
        console.print("No step was completed; nothing to report.")
        return 130
    report([folder], folder, console, first=runs[0].label)
    print_diagnosis([Course.read(run.file) for run in runs if run.file.exists()], folder, console)
    console.print(f"Steps, rollouts and summary: {folder}", highlight=False, markup=False)
    return 130 if not complete else 0 if all(run.finished for run in runs) else 1


def report_main(places: Sequence[str], *, baseline: str | None, target: float | None, out: Path | None) -> int:
    """Report all runs in some folders; the plot and the summary go to ``out``, else to the first of them."""
    if not places:
        raise ConfigError("lab report: which runs? nemo-geomask lab report DIR [DIR …]")
    folders = [Path(place) for place in places]
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out: {out} can't be made a folder: {error.strerror or error}") from None
    target = TARGET if target is None else target
    report(folders, out or folders[0], _console(), baseline=baseline, target=target)
    return 0


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    compare: str | None,
    vary: Sequence[str],
    seeds: str | None,
    loss_from: Path | None,
    out: Path,
) -> list[Run]:
    """The runs that :func:`main` trains, a seed's beside each other.

    Raises:
        ConfigError: a mistake in the recipe or a flag, or two variants that are the same.
    """
    runs: list[Run] = []
    for point in itertools.product(*map(parse_vary, vary)):
        with _with_loss_from(path, loss_from) as file:
            data = load_recipe(file, [*overrides, *point], new_keys=True)
        recipe = LabRecipe.read(data, source=path.name)
        told = "".join(f" {setting}" for setting in point)
        for variant in _variants(recipe, compare):
            for seed in parse_seeds(seeds) if seeds else (recipe.grpo.seed,):
                grpo = recipe.grpo.model_copy(update={"seed": seed})
                own = recipe.model_copy(update={"loss_fn": dict(variant.loss_fn), "grpo": grpo})
                runs.append(Run(variant.label + told, own, out))
    seen: dict[tuple[str, int], Run] = {}
    for run in runs:
        same = seen.setdefault((json.dumps(run.settings, sort_keys=True), run.recipe.grpo.seed), run)
        if same is not run:
            raise ConfigError(
                f"'{same.label}' and '{run.label}' are the same settings; their curves would be equal. Remove one"
            )
    return sorted(runs, key=lambda run: run.recipe.grpo.seed)


def parse_seeds(text: str) -> tuple[int, ...]:
    """``1..10``, ``1,2,5`` or both: ``1..3,7``.

    Raises:
        ConfigError: it is neither, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last >= SEEDS:
            raise ConfigError(f"--seeds: '{text}' names {last}; a seed is below {SEEDS}")
        if first > last:
            raise ConfigError(f"--seeds: '{text}' is no list of seeds; write 1..10, 1,2,5 or 1..3,7")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: '{text}' names a seed twice")
    return tuple(seeds)


def parse_vary(text: str) -> list[str]:
    """``key=v1,v2`` as the overrides ``key=v1`` and ``key=v2``, by Hydra's grammar.

    Raises:
        ConfigError: it is no such list, or the key is one that all runs share.
    """
    parser = require("hydra.core.override_parser.overrides_parser").OverridesParser
    try:
        (parsed,) = parser.create().parse_overrides(overrides=[text])
        if not parsed.is_sweep_override():
            raise ValueError("it has one value")
        values = list(parsed.sweep_string_iterator())
    except Exception as error:
        raise ConfigError(
            f"--vary: '{text}': {str(error).splitlines()[0]}; write key=value,value,…, such as "
            "loss_fn.reference_policy_kl_type=k1,k2,k3"
        ) from None
    key = parsed.get_key_element()
    section, _, name = key.partition(".")
    if key == "grpo.seed" or (section == "lab" and name.partition(".")[0] in SHARED):
        fix = "--seeds" if key == "grpo.seed" else "an override, since it does not change what is trained"
        raise ConfigError(f"--vary: {key} can't be varied; use {fix}")
    return [f"{key}={value}" for value in values]


def _variants(recipe: LabRecipe, compare: str | None) -> tuple[ComparedLoss, ...]:
    specs = recipe.lab.compare if compare is None else compare
    if specs:
        return parse_compare(specs, recipe.loss_fn, recipe.lab)
    return (ComparedLoss(str(recipe.loss_fn.get("name", "clipped_pg")), recipe.loss_fn),)


def _jobs(asked: int | None, runs: Sequence[Run]) -> int:
    """Processes that train; runs of several ranks, and vLLM, take the cores by themselves."""
    recipe = runs[0].recipe
    alone = None
    if any(run.recipe.lab.processes > 1 for run in runs):
        alone = "lab.tp, lab.cp and lab.dp"
    elif any(run.recipe.policy.generation.backend == "vllm" for run in runs):
        alone = "policy.generation.backend: vllm"
    if asked is not None and asked < 1:
        raise ConfigError(f"--jobs: {asked} processes can't train; write 1 or more")
    if alone is not None:
        if asked is not None and asked > 1:
            raise ConfigError(f"--jobs: {asked} runs at a time don't go together with {alone}; leave one of them out")
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, cores // recipe.lab.num_threads)


@contextlib.contextmanager
def _with_loss_from(path: Path, other: Path | None) -> Iterator[Path]:
    """A recipe's path; with another recipe, that of a file that inherits from it and has the other's ``loss_fn:``."""
    if other is None:
        yield path
        return
    block = load_recipe(other).get("loss_fn")
    if not isinstance(block, dict):
        raise ConfigError(f"--loss-from: {other} has no loss_fn: block")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        data = {"defaults": str(path.resolve()), "loss_fn": {"_override_": True, **block}}
        file.write_text(require("yaml").safe_dump(data), encoding="utf-8")
        yield file


def _console() -> Any:
    console = require("rich.console").Console()
    if not console.is_terminal:
        # A file or a pipe has no width of its own; the default would cut the table.
        console.width = 110
    return console
