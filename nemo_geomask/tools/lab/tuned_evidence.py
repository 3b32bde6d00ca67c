"""Runs and tables of the comparison with tuned baselines, as ``docs/evidence/protocol.md`` fixes them.

``python -m nemo_geomask.tools.lab.tuned_evidence REGIME bound|rate|confirm --out DIR`` trains what is missing of a
stage, and writes the curves of its finished runs to ``docs/evidence/tuned/REGIME.parquet``. Without arguments it
rewrites the tables of ``docs/background/evidence.md`` from these files. ``docs/evidence/tuned.toml`` has regimes,
variants and bounds.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.tools.lab.curve_files import read_columns, write_columns
from nemo_geomask.tools.lab.progress import Progress
from nemo_geomask.tools.lab.run_queue import train
from nemo_geomask.tools.lab.run_store import Run, RunCurves
from nemo_geomask.tools.lab.train_recipe import parse_seeds, plan_runs
from nemo_geomask.tools.lab.tuned_comparison import Cell, TunedRun, choose_bounds, choose_rates, comparison_tables
from nemo_geomask.tools.shared.markdown import replace_marked_text

__all__ = ["Regime", "Stage", "TunedVariant", "load_tuned_runs", "plan_stage", "read_regimes", "write_tuned_runs"]

Stage = Literal["bound", "rate", "confirm"]
"""Stage of the protocol.

``bound`` searches the bound at one learning rate, ``rate`` the learning rate, and ``confirm`` is the confirmation.
"""

_METRICS = ("reward", "validation/reward", "approx_entropy", "grad_norm")
_METADATA_KEY = b"nemo_geomask.tuned_evidence"


@dataclass(frozen=True)
class TunedVariant:
    """A variant with the bounds that are tried.

    Attributes:
        name: its name in tables.
        compare: its SPEC, as ``--compare`` of ``nemo-geomask lab`` takes it.
        bounds: for each bound, the overrides that set it.
        published: number of the bound that the source publishes.
    """

    name: str
    compare: str
    bounds: Sequence[Sequence[str]]
    published: int


@dataclass(frozen=True)
class Regime:
    """A regime of the protocol.

    Attributes:
        name: its name, and that of its data file.
        recipe: path of the recipe, from the repository's root.
        overrides: overrides of the recipe in all runs.
        variants: the variants; the first one has no correction.
        learning_rates: the grid, ascending.
        search_rate: learning rate at which the bounds are searched.
        search_seeds: seeds of the search.
        confirmation_seeds: seeds of the confirmation.
    """

    name: str
    recipe: str
    overrides: Sequence[str]
    variants: Sequence[TunedVariant]
    learning_rates: Sequence[float]
    search_rate: float
    search_seeds: Sequence[int]
    confirmation_seeds: Sequence[int]

    @property
    def published(self) -> dict[str, int]:
        """Number of each variant's published bound."""
        return {variant.name: variant.published for variant in self.variants}


def read_regimes(path: Path) -> dict[str, Regime]:
    """Read the regimes of ``tuned.toml``, by name."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rates, search_rate = data.pop("learning_rates"), data.pop("search_rate")
    seeds = {key: parse_seeds(data.pop(key)) for key in ("search_seeds", "confirmation_seeds")}
    return {
        name: Regime(
            name,
            settings["recipe"],
            settings["overrides"],
            [TunedVariant(title, **variant) for title, variant in settings["variants"].items()],
            rates,
            search_rate,
            **seeds,
        )
        for name, settings in data.items()
    }


def plan_stage(
    regime: Regime, stage: Stage, runs: Iterable[TunedRun], out: Path, seeds: Sequence[int] | None = None
) -> dict[Cell, list[Run]]:
    """Plan the runs of a stage, by variant, bound and learning rate.

    Args:
        regime: the regime.
        stage: ``rate`` needs the runs of ``bound``, and ``confirm`` those of both.
        runs: finished runs of earlier stages.
        out: folder of all runs.
        seeds: some of the stage's seeds; None: all.

    Raises:
        ConfigError: a run of an earlier stage is missing, or a seed does not belong to the stage.
    """
    stage_seeds = regime.confirmation_seeds if stage == "confirm" else regime.search_seeds
    chosen_seeds = stage_seeds if seeds is None else seeds
    if foreign := sorted(set(chosen_seeds) - set(stage_seeds)):
        raise ConfigError(f"--seeds: {foreign} are not seeds of the stage '{stage}', which has {list(stage_seeds)}")
    search = [run for run in runs if run.seed in regime.search_seeds]
    names = [variant.name for variant in regime.variants]
    if stage == "bound":
        cells = [
            Cell(variant.name, bound, regime.search_rate)
            for variant in regime.variants
            for bound in range(len(variant.bounds))
        ]
    else:
        bounds = choose_bounds(search, names, regime.published, regime.search_rate, regime.search_seeds)
        if stage == "confirm":
            choose_rates(search, bounds, regime.learning_rates, regime.search_seeds)  # raises if a run is missing
        cells = [Cell(name, bounds[name], rate) for name in names for rate in regime.learning_rates]
    by_name = {variant.name: variant for variant in regime.variants}
    seed_text = ",".join(map(str, chosen_seeds))
    planned: dict[Cell, list[Run]] = {}
    for position, cell in enumerate(cells):
        variant = by_name[cell.variant]
        overrides = [*regime.overrides, *variant.bounds[cell.bound], f"policy.lr={cell.learning_rate:g}"]
        planned[cell] = [
            replace(run, label=cell.label, position=position)
            for run in plan_runs(
                Path(regime.recipe),
                overrides,
                compare=variant.compare,
                vary=(),
                seeds=seed_text,
                loss_from=None,
                out=out,
            )
        ]
    return planned


def write_tuned_runs(runs: Iterable[TunedRun], path: Path) -> None:
    """Write the runs' metrics of every step in float32, and for each run its machine and versions."""
    ordered = sorted(runs, key=lambda run: (run.seed, run.cell))
    rows: dict[str, list[Any]] = {name: [] for name in ("run", "step", *_METRICS)}
    facts = []
    for index, run in enumerate(ordered):
        facts.append(
            {
                "variant": run.cell.variant,
                "bound": run.cell.bound,
                "learning_rate": run.cell.learning_rate,
                "seed": run.seed,
                **{key: run.curves.facts.get(key) for key in ("machine", "versions", "settings")},
            }
        )
        rows["run"] += [index] * run.curves.steps
        rows["step"] += range(1, run.curves.steps + 1)
        for metric in _METRICS:
            rows[metric] += run.curves.series(metric)
    types = {"run": "int32", "step": "int32", **dict.fromkeys(_METRICS, "float32")}
    write_columns(path, rows, types, _METADATA_KEY, facts)


def load_tuned_runs(path: Path) -> list[TunedRun]:
    """Read what :func:`write_tuned_runs` wrote; no runs if there is no such file."""
    if not path.exists():
        return []
    facts, series = read_columns(path, _METADATA_KEY)
    columns: list[dict[str, list[float]]] = [{name: [] for name in ("step", *_METRICS)} for _ in facts]
    for row, index in enumerate(series["run"]):
        for name, values in columns[index].items():
            values.append(series[name][row])
    return [
        TunedRun(
            Cell(fact["variant"], fact["bound"], fact["learning_rate"]),
            RunCurves({**fact, "label": fact["variant"], "finished": True}, curves),
        )
        for fact, curves in zip(facts, columns, strict=True)
    ]


def _train_stage(regime: Regime, stage: Stage, arguments: argparse.Namespace) -> bool:
    """Train what is missing of a stage and write its finished runs; return False if the user interrupted it."""
    path = arguments.docs / "evidence" / "tuned" / f"{regime.name}.parquet"
    stored = load_tuned_runs(path)
    stored_keys = {(run.cell, run.seed) for run in stored}
    seeds = parse_seeds(arguments.seeds) if arguments.seeds else None
    planned = plan_stage(regime, stage, stored, arguments.out / regime.name, seeds)
    # All runs of a seed come from one machine, so one seed is finished before the next one begins.
    missing = sorted(
        ((run.recipe.grpo.seed, cell, run) for cell, runs in planned.items() for run in runs),
        key=lambda entry: entry[:2],
    )
    missing = [entry for entry in missing if (entry[1], entry[0]) not in stored_keys]
    if not missing:
        return True
    console = require("rich.console", "the lab needs", "demo").Console()
    complete = train(
        [run for *_, run in missing], Progress(console, len({seed for seed, *_ in missing})), jobs=arguments.jobs
    )
    finished = [
        TunedRun(cell, RunCurves.read(run.steps_file))
        for _, cell, run in missing
        if run.steps_file.exists() and run.finished
    ]
    write_tuned_runs([*stored, *finished], path)
    return complete


def rewrite_tables(docs: Path, regimes: Mapping[str, Regime]) -> str:
    """Return the text of ``evidence.md`` with the tables of all regimes that it has marks for."""
    page = docs / "background" / "evidence.md"
    text = page.read_text(encoding="utf-8")
    for regime in regimes.values():
        if f"<!-- tuned_{regime.name}: begin -->" in text:
            runs = load_tuned_runs(docs / "evidence" / "tuned" / f"{regime.name}.parquet")
            tables = comparison_tables(
                runs,
                [variant.name for variant in regime.variants],
                regime.published,
                regime.learning_rates,
                regime.search_rate,
                regime.search_seeds,
                regime.confirmation_seeds,
            )
            text = replace_marked_text(text, f"tuned_{regime.name}", tables, page=page.name)
    return text


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_geomask.tools.lab.tuned_evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("regime", nargs="?", help="a regime of tuned.toml; none: rewrite the tables")
    parser.add_argument("stage", nargs="?", choices=get_args(Stage), help="what to train")
    parser.add_argument("--seeds", help="some of the stage's seeds, such as 301..303 (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("results/tuned"), help="folder of the runs")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the pages and data (default: docs)")
    arguments = parser.parse_args()
    regimes = read_regimes(arguments.docs / "evidence" / "tuned.toml")
    if arguments.regime is not None:
        if arguments.regime not in regimes or arguments.stage is None:
            parser.error(
                f"name a regime and a stage; regimes: {', '.join(regimes)}; stages: {', '.join(get_args(Stage))}"
            )
        _train_stage(regimes[arguments.regime], arguments.stage, arguments)
    (arguments.docs / "background" / "evidence.md").write_text(
        rewrite_tables(arguments.docs, regimes), encoding="utf-8"
    )


if __name__ == "__main__":
    _main()
