"""Runs of the comparison with tuned baselines, as ``docs/evidence/protocol.md`` fixes them, and their data files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.progress import Progress
from nemo_geomask.tools.lab.run_queue import train
from nemo_geomask.tools.lab.run_store import Run, RunCurves, read_columns, write_columns
from nemo_geomask.tools.lab.train_recipe import plan_runs
from nemo_geomask.tools.shared.flat_settings import differing_keys, flatten_settings
from tests.evidence.lab.choice import Cell, TunedRun, choose, choose_bound, choose_bounds
from tests.evidence.lab.comparison import TunedComparison, compare_tuned_runs
from tests.evidence.lab.figures import draw_comparison, draw_mismatch
from tests.evidence.lab.regimes import Regime
from tests.evidence.lab.tables import comparison_tables, mismatch_tables, sensitivity_table

Stage = Literal["baseline", "bound", "rate", "confirm", "below", "sensitivity"]
"""Stage of the protocol.

``baseline`` searches the bound of the first variant at one learning rate, ``bound`` that of all, ``rate`` the learning
rate; then ``confirm``. ``below`` runs rates below the grid, for variants that chose its lowest, and ``sensitivity``
further bounds, masks and weights; both are on the search seeds and choose nothing.
"""

_HEAD = """# Tables of the tuned comparisons

`make docs` makes this page from the data in `tuned/`. [Evidence](../background/evidence.md) says what was found, and
how to read it; the [protocol](protocol.md) says what was run, and why. Rewards of every bound are means over five seeds
at a learning rate of 2e-3, and not tested."""

_METRICS = ("reward", "validation/reward", "approx_entropy", "grad_norm")
_FURTHER_METRICS = (
    *("validation_trainer/reward", "validation_trainer/correct_after_found"),
    *("validation_trainer/correct_after_nothing", "validation/correct_after_found"),
)
_METADATA_KEY = b"nemo_geomask.tuned_evidence"


def plan_stage(
    regime: Regime, stage: Stage, runs: Iterable[TunedRun], out: Path, seeds: Sequence[int] | None = None
) -> dict[Cell, list[Run]]:
    """Plan the runs of a stage, by variant, bound and learning rate; on some of its seeds, or all.

    ``runs`` are finished runs of earlier stages, which choose. ``rate`` needs those of ``bound``, ``confirm`` and
    ``below`` those of both. ``bound`` and ``sensitivity`` need those of ``baseline`` where the regime builds on them.

    Raises: ConfigError: a run of an earlier stage is missing, or a seed does not belong to the stage.
    """
    runs = list(runs)
    stage_runs = _stage_runs(regime, stage, runs)
    stage_seeds = list(dict.fromkeys(seed for _, seed in stage_runs))
    chosen_seeds = stage_seeds if seeds is None else seeds
    if foreign := sorted(set(chosen_seeds) - set(stage_seeds)):
        raise ConfigError(f"--seeds: {foreign} are not seeds of the stage '{stage}', which has {stage_seeds}")
    planned: dict[Cell, list[Run]] = {}
    for position, cell in enumerate(dict.fromkeys(cell for cell, _ in stage_runs)):
        cell_seeds = [seed for other, seed in stage_runs if other == cell and seed in chosen_seeds]
        if not cell_seeds:
            continue
        variant = (regime.sensitivity if stage == "sensitivity" else regime.variants)[cell.variant]
        overrides = [
            *regime.overrides,
            *_baseline_overrides(regime, cell.variant, runs),
            *variant.bounds[cell.bound],
            f"policy.lr={cell.learning_rate:g}",
        ]
        planned[cell] = [
            replace(run, label=cell.label, position=position)
            for run in plan_runs(
                Path(regime.recipe),
                overrides,
                compare=variant.compare,
                vary=(),
                seeds=",".join(map(str, cell_seeds)),
                loss_from=None,
                out=out,
            )
        ]
    return planned


def _baseline_overrides(regime: Regime, variant: str, runs: Sequence[TunedRun]) -> Sequence[str]:
    """Return the overrides that a variant takes over from the first one."""
    if not regime.builds_on_baseline or variant == regime.baseline:
        return ()
    return regime.variants[regime.baseline].bounds[choose_bound(runs, regime, regime.baseline)]


def _stage_runs(regime: Regime, stage: Stage, runs: Iterable[TunedRun]) -> list[tuple[Cell, int]]:
    """Return cell and seed of each run of a stage."""
    search = [run for run in runs if run.seed in regime.search_seeds]
    if stage == "confirm":
        return choose(search, regime).confirmation
    if stage == "below":
        cells = choose(search, regime).below_grid
    elif stage == "rate":
        bounds = choose_bounds(search, regime)
        cells = [Cell(name, bound, rate) for name, bound in bounds.items() for rate in regime.learning_rates]
    else:
        baseline = {regime.baseline: regime.variants[regime.baseline]}
        tried = {"baseline": baseline, "bound": regime.variants, "sensitivity": regime.sensitivity}[stage]
        cells = [Cell(name, bound, regime.search_rate) for name, variant in tried.items() for bound in variant.bounds]
    return [(cell, seed) for cell in cells for seed in regime.search_seeds]


def check_settings(stored: Iterable[TunedRun], planned: Mapping[Cell, Sequence[Run]]) -> None:
    """Check that stored runs have the settings that the plan gives to their cell.

    A run that was stored before a setting existed has its default.

    Raises: ConfigError: a stored run has others, for example because the recipe was edited since.
    """
    defaults = flatten_settings(Run("", LabRecipe(), Path()).settings)
    for run in stored:
        plan = next(iter(planned.get(run.cell, ())), None)
        settings = run.curves.facts.get("settings")
        if plan is None or settings is None:
            continue
        expected, stored_settings = flatten_settings(plan.settings), defaults | flatten_settings(settings)
        if differ := differing_keys(expected, stored_settings):
            raise ConfigError(
                f"the stored run of '{run.cell.label}' on seed {run.seed} has other settings than the plan: "
                + ", ".join(f"{key}: {stored_settings.get(key)} instead of {expected.get(key)}" for key in differ)
            )


def check_stored_runs(regime: Regime, stored: Sequence[TunedRun]) -> None:
    """Check the settings of all stored runs of a regime, as :func:`check_settings` does, in the stages that were run.

    Raises: ConfigError: a stored run has other settings than its cell.
    """
    for stage in get_args(Stage) if stored else ():
        try:
            _stage_runs(regime, stage, stored)
        except ConfigError:
            return  # an earlier stage is incomplete
        check_settings(stored, plan_stage(regime, stage, stored, Path("results")))


def with_missing_steps(curves: RunCurves, steps: int) -> RunCurves:
    """Return the curves of a run that raised an error, in which each missing step has a reward of 0."""
    absent = steps - curves.steps
    names = (*_METRICS, *_FURTHER_METRICS)
    columns = {name: [*curves.series(name), *[0.0 if name == "reward" else math.nan] * absent] for name in names}
    return RunCurves({**curves.facts, "finished": True}, {"step": list(range(1, steps + 1)), **columns})


def write_tuned_runs(runs: Iterable[TunedRun], path: Path) -> None:
    """Write the runs' metrics of every step in float32, and for each run its machine and versions."""
    ordered = sorted(runs, key=lambda run: (run.seed, run.cell))
    further = [name for name in _FURTHER_METRICS if any(name in run.curves.columns for run in ordered)]
    metrics = [*_METRICS, *further]
    rows: dict[str, list[Any]] = {name: [] for name in ("run", "step", *metrics)}
    facts = []
    for index, run in enumerate(ordered):
        facts.append(
            {
                "variant": run.cell.variant,
                "bound": run.cell.bound,
                "learning_rate": run.cell.learning_rate,
                "seed": run.seed,
                **{
                    key: run.curves.facts[key]
                    for key in ("machine", "versions", "settings", "chance", "error")
                    if key in run.curves.facts
                },
            }
        )
        rows["run"] += [index] * run.curves.steps
        rows["step"] += range(1, run.curves.steps + 1)
        for metric in metrics:
            rows[metric] += run.curves.series(metric)
    types = {"run": "int32", "step": "int32", **dict.fromkeys(metrics, "float32")}
    write_columns(path, rows, types, _METADATA_KEY, facts)


def load_tuned_runs(path: Path, outcome: str = "reward") -> list[TunedRun]:
    """Read what :func:`write_tuned_runs` wrote; no runs if there is no such file. ``outcome`` is the regime's."""
    if not path.exists():
        return []
    facts, series = read_columns(path, _METADATA_KEY)
    columns: list[dict[str, list[float]]] = [{name: [] for name in series if name != "run"} for _ in facts]
    for row, index in enumerate(series["run"]):
        for name, values in columns[int(index)].items():
            values.append(series[name][row])
    return [
        TunedRun(
            Cell(fact["variant"], fact["bound"], fact["learning_rate"]),
            RunCurves({**fact, "label": fact["variant"], "finished": True}, curves),
            outcome,
        )
        for fact, curves in zip(facts, columns, strict=True)
    ]


def train_stage(
    regime: Regime, stage: Stage, *, docs: Path, out: Path, seeds: Sequence[int] | None = None, jobs: int = 1
) -> bool:
    """Train what is missing of a stage and write its finished runs; return False if the user interrupted it."""
    path = docs / "evidence" / "tuned" / f"{regime.name}.parquet"
    stored = load_tuned_runs(path, regime.outcome)
    stored_keys = {(run.cell, run.seed) for run in stored}
    planned = plan_stage(regime, stage, stored, out / regime.name, seeds)
    # All runs of a seed come from one machine, so one seed is finished before the next one begins.
    missing = sorted(
        ((run.recipe.grpo.seed, cell, run) for cell, runs in planned.items() for run in runs),
        key=lambda entry: entry[:2],
    )
    missing = [entry for entry in missing if (entry[1], entry[0]) not in stored_keys]
    if not missing:
        return True
    runs = [run for *_, run in missing]
    complete = train(runs, Progress(runs), jobs=jobs)
    finished = []
    for _, cell, run in missing:
        if not run.steps_file.exists():
            continue
        curves = RunCurves.read(run.steps_file)
        if "error" in curves.facts:
            curves = with_missing_steps(curves, run.recipe.grpo.max_num_steps)
        if curves.finished:
            finished.append(TunedRun(cell, curves, regime.outcome))
    write_tuned_runs([*stored, *finished], path)
    return complete


def tuned_page(folder: Path, regimes: Mapping[str, Regime]) -> str:
    """Return the text of ``tuned.md`` in the folder of the data: tables of all regimes, and of their bounds.

    A regime without a complete confirmation has a sentence in place of its tables.
    """
    blocks = [_HEAD]
    stored = {
        name: load_tuned_runs(folder / "tuned" / f"{name}.parquet", regime.outcome) for name, regime in regimes.items()
    }
    named = {name: regime for name, regime in regimes.items() if regime.primary}
    if comparisons := _complete_comparisons(stored, named):
        tables = f"![Rewards over the steps, and differences](tuned/mismatch.png)\n\n{mismatch_tables(comparisons)}"
        if missing := [r.title for r in named.values() if all(r is not c.regime for c in comparisons)]:
            tables += f"\n\nNot enough data: {'; '.join(missing)}."
    else:
        tables = "Not enough data."
    blocks += ["## The mismatch itself", tables] if named else []
    for name, regime in regimes.items():
        if name in named:
            continue
        try:
            tables = comparison_tables(compare_tuned_runs(stored[name], regime))
        except ConfigError as error:
            tables = f"Not enough data: {error}."
        else:
            tables = f"![Rewards by learning rate, and differences](tuned/{name}.png)\n\n{tables}"
        blocks += [f"## {regime.title}", tables]
    for name, regime in regimes.items():
        if regime.sensitivity:
            blocks += [f"## {regime.title}: every bound", sensitivity_table(stored[name], regime)]
    return "\n\n".join(blocks) + "\n"


def _complete_comparisons(
    stored: Mapping[str, Sequence[TunedRun]], regimes: Mapping[str, Regime]
) -> list[TunedComparison]:
    """Return the comparisons of the regimes whose confirmation is complete; none if that of the first is not."""
    complete = []
    for name, regime in regimes.items():
        with contextlib.suppress(ConfigError):
            complete.append(compare_tuned_runs(stored[name], regime))
    return complete if complete and complete[0].regime is next(iter(regimes.values())) else []


def draw_regimes(folder: Path, regimes: Mapping[str, Regime]) -> None:
    """Draw the figure of each regime whose confirmation is complete, and one of those with a named comparison."""
    named = {name: regime for name, regime in regimes.items() if regime.primary}
    stored = {
        name: load_tuned_runs(folder / "tuned" / f"{name}.parquet", regime.outcome) for name, regime in named.items()
    }
    if comparisons := _complete_comparisons(stored, named):
        draw_mismatch(comparisons, folder / "tuned" / "mismatch.png")
    for name, regime in regimes.items():
        if regime.primary:
            continue
        path = folder / "tuned" / f"{name}.parquet"
        with contextlib.suppress(ConfigError):
            draw_comparison(compare_tuned_runs(load_tuned_runs(path, regime.outcome), regime), path.with_suffix(".png"))
