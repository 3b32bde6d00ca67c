"""Tables and figures of ``docs/evidence.md`` and ``docs/lab.md``, generated from the data in ``docs/evidence/``.

``python -m nemo_geomask.tools.lab.evidence`` rewrites them. With ``--collect NAME DIR…`` it first writes the metrics of
the runs in these folders to ``docs/evidence/NAME.parquet``. ``nemo_geomask/tools/lab/evidence.toml`` defines the
columns and figures for each data file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.optional import require
from nemo_geomask.tools.lab.lab_plot import write_plot
from nemo_geomask.tools.lab.outcome import final_reward, group_by_variant, has_collapsed
from nemo_geomask.tools.lab.run_store import RunCurves, read_curves
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL, mean_interval
from nemo_geomask.tools.shared.markdown import markdown_table, replace_marked_text
from nemo_geomask.tools.shared.palette import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION

__all__ = [
    "EVIDENCE_SPECS",
    "EvidenceSpec",
    "SeedMean",
    "collect_runs",
    "draw_figure",
    "load_runs",
    "rewrite_page",
    "search_table",
    "split_runs",
]

_KEY = b"nemo_geomask.evidence"
_FACTS = ("corrected", "chance", "sampler", "precision", "finished", "versions", "settings")
_COLOURS = (PURPLE, GREEN, BLUE, VERMILION, ORANGE, SKY_BLUE)
_MIN_TOKENS = 20
Runs = Sequence[RunCurves]


@dataclass(frozen=True)
class SeedMean:
    """Table column with a metric's mean over a run's steps, then over seeds, and its confidence interval.

    The interval is by Student's t, over seeds.

    Attributes:
        title: the column's header.
        metric: the metric's name.
        number_format: format specification of a number.
        last_steps: number of steps at the end of the run to average over; 0: all steps.
        is_paired: subtract the base variant's mean on the same seed.
        shows_interval: show the interval.
    """

    title: str
    metric: str
    number_format: str = ".3f"
    last_steps: int = 0
    is_paired: bool = False
    shows_interval: bool = True

    def by_seed(self, runs: Runs) -> dict[int, float]:
        """Return each seed's mean; seeds on which the metric was never finite are left out."""
        series_by_seed = {run.seed: run.series(self.metric)[-self.last_steps :] for run in runs}
        finite = {seed: [value for value in series if math.isfinite(value)] for seed, series in series_by_seed.items()}
        return {seed: fmean(series) for seed, series in sorted(finite.items()) if series}

    def estimate(self, runs: Runs, base: Runs) -> tuple[float, tuple[float, float] | None] | None:
        """Return the mean over seeds and its interval; None if no seed has a value."""
        values = self.by_seed(runs)
        if self.is_paired:
            base_values = self.by_seed(base) if runs[0].label != base[0].label else {}
            values = {seed: value - base_values[seed] for seed, value in values.items() if seed in base_values}
        return (fmean(values.values()), mean_interval(list(values.values()))) if values else None

    def cell(self, runs: Runs, base: Runs) -> str:
        """Return the text of the table's cell for a variant's runs."""
        estimate = self.estimate(runs, base)
        if estimate is None:
            return "–"
        mean, interval = estimate
        # The option z formats a rounded -0 without its sign.
        style = f"{'+' * self.is_paired}z{self.number_format}"
        interval_text = (
            ""
            if interval is None or not self.shows_interval
            else " ({} to {})".format(*(format(x, style) for x in interval))
        )
        return f"{mean:{style}}{interval_text}"


def _count_better_seeds(runs: Runs, base: Runs) -> str:
    rewards, base_rewards = (
        {run.seed: final_reward(run.series("reward")) for run in variant} for variant in (runs, base)
    )
    shared = rewards.keys() & base_rewards.keys()
    return (
        "–"
        if runs[0].label == base[0].label
        else f"{sum(rewards[seed] > base_rewards[seed] for seed in shared)} of {len(shared)}"
    )


def _reward_range(runs: Runs, base: Runs) -> str:
    rewards = [final_reward(run.series("reward")) for run in runs]
    return f"{min(rewards):.3f}, {max(rewards):.3f}"


_COUNTS: dict[str, Callable[[Runs, Runs], str]] = {
    "seeds": lambda runs, base: str(len(runs)),
    "lowest, highest": _reward_range,
    "better on": _count_better_seeds,
    "collapsed": lambda runs, base: str(sum(has_collapsed(run.series("reward")) for run in runs)),
}


@dataclass(frozen=True)
class EvidenceSpec:
    """Specification of the table and figures that are made from one data file.

    Attributes:
        columns: the table's columns after that of the variant: means over seeds, or keys of ``_COUNTS``.
        rows: the variants in the table, in its order: the name in the table by the variant's label. If empty, the table
            has all variants under their labels, highest reward first. Other variants are compared with that of the
            first row; if ``rows`` is empty, with the first variant in the data.
        curves: metric of the figure's left half; empty: no figure.
        plotted_rows: names of the rows in the left half; empty: the two best, the base and the worst.
        dot_column: title of the column in the figure's right half.
        curve_label: label of the y axis of ``curves``.
        panel_file: file name, in the docs folder, of the figure that ``nemo-geomask lab report`` draws; empty: none.
    """

    columns: Sequence[SeedMean | str]
    rows: Mapping[str, str] = field(default_factory=dict)
    curves: str = ""
    plotted_rows: Sequence[str] = ()
    dot_column: str = ""
    curve_label: str = "mean reward"
    panel_file: str = ""

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics in the data file."""
        measured = (column.metric for column in self.columns if isinstance(column, SeedMean))
        return list(dict.fromkeys(("reward", *filter(None, (self.curves, *measured)))))

    def base(self, curves: Runs) -> Runs:
        """Return the runs of the base variant, with which the other variants are compared."""
        by_label = group_by_variant(curves)
        return by_label[next(iter(self.rows or by_label))]

    def variants(self, curves: Runs) -> dict[str, Runs]:
        """Return the runs of each variant by its name in the table, in the table's order."""
        by_label = group_by_variant(curves)
        if self.rows:
            return {name: by_label[label] for label, name in self.rows.items() if label in by_label}
        ranked = sorted(
            by_label, key=lambda label: -fmean(final_reward(run.series("reward")) for run in by_label[label])
        )
        return {f"`{label}`": by_label[label] for label in ranked}


def _read_evidence_specs() -> dict[str, EvidenceSpec]:
    data = tomllib.loads(files("nemo_geomask.tools.lab").joinpath("evidence.toml").read_text(encoding="utf-8"))
    columns = {name: SeedMean(**settings) for name, settings in data.pop("column").items()}
    return {
        name: EvidenceSpec(
            **{**settings, "columns": tuple(columns.get(column, column) for column in settings["columns"])}
        )
        for name, settings in data.items()
    }


EVIDENCE_SPECS = _read_evidence_specs()
"""Specification for each data file, by the file's name without ``.parquet``."""


def collect_runs(curves: Iterable[RunCurves], path: Path, spec: EvidenceSpec) -> None:
    """Write the metrics of ``spec`` for every step of the runs, in float32; variants without correction come first.

    Raises: ConfigError: a run is not finished.
    """
    arrow, parquet = require("pyarrow", "the lab needs", "demo"), require("pyarrow.parquet", "the lab needs", "demo")
    curves = sorted(curves, key=lambda curve: not curve.label.split(" ")[0].endswith(":none"))
    facts: dict[str, dict[str, Any]] = {}
    metrics = ["geomask/kept_tokens" if metric == "removed" else metric for metric in spec.metrics]
    rows: dict[str, list[Any]] = {name: [] for name in ("variant", "seed", "step", *metrics)}
    for curve in curves:
        if not curve.finished:
            raise ConfigError(
                f"the run of '{curve.label}' on seed {curve.seed} has {curve.steps} steps and is not finished"
            )
        facts.setdefault(curve.label, {key: curve.facts[key] for key in _FACTS})
        rows["variant"] += [curve.label] * curve.steps
        rows["seed"] += [curve.seed] * curve.steps
        rows["step"] += range(1, curve.steps + 1)
        for metric in metrics:
            rows[metric] += curve.series(metric)
    types = {"seed": arrow.int32(), "step": arrow.int32(), **dict.fromkeys(metrics, arrow.float32())}
    table = arrow.table({name: arrow.array(values, types.get(name)) for name, values in rows.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(facts)}), path, compression="zstd")


def split_runs(folders: Iterable[Path], dimension: str, edges: Sequence[float]) -> list[RunCurves]:
    """Split the tokens of recorded runs by a dimension; return the curves of each part as if it were a separate run.

    Args:
        folders: folders of runs that were recorded with ``loss_fn.record.dir: records``.
        dimension: a dimension of ``nemo-geomask diagnose --by``.
        edges: boundaries of the parts; each has to be an edge of the dimension's bins.

    Returns:
        One entry for each run and part, with a value for each recorded step. ``tokens`` and ``mismatch`` are the part's
        shares of the step's trained tokens and of their sum of |Δ|. ``geomask/mismatch_abs`` is the part's mean |Δ|, or
        NaN if it has fewer than 20 tokens. |Δ| is capped at 1 nat, as in the diagnosis.
    """
    from nemo_geomask.tools.diagnose import BIN_SUMS, DIMENSIONS_BY_NAME, find_runs, survey_run

    parts_as_runs = []
    bins = DIMENSIONS_BY_NAME[dimension]
    bounds = [0, *(list(bins.edges).index(edge) + 1 for edge in edges), bins.bin_count]
    sum_columns = [BIN_SUMS.index(name) for name in ("tokens", "capped_abs")]
    for file in (path for place in folders for path in sorted(place.rglob("steps/*.parquet"))):
        run = RunCurves.read(file)
        (recorded,) = find_runs([file.parent.parent / file.stem / "records"])
        steps = [
            window.bin_sums[dimension][:, sum_columns] for _, window in sorted(survey_run(recorded).windows.items())
        ]
        for first, last in itertools.pairwise(bounds):
            parts = [(cells[first:last].sum(axis=0), cells.sum(axis=0)) for cells in steps]
            columns: dict[str, list[float]] = {
                "reward": [math.nan] * len(steps),
                "step": list(range(1, len(steps) + 1)),
                "tokens": [part[0] / total[0] for part, total in parts],
                "mismatch": [part[1] / total[1] for part, total in parts],
                "geomask/mismatch_abs": [
                    part[1] / part[0] if part[0] >= _MIN_TOKENS else math.nan for part, _ in parts
                ],
            }
            label = f"{run.label} {dimension}={bins.label(first, last - 1)}"
            parts_as_runs.append(RunCurves({**run.facts, "label": label, "variant": label}, columns))
    return parts_as_runs


def load_runs(path: Path) -> list[RunCurves]:
    """Read the runs of a data file; variants keep the order in which they were collected."""
    table = require("pyarrow.parquet", "the lab needs", "demo").read_table(path)
    facts = json.loads(table.schema.metadata[_KEY])
    columns: dict[str, list[Any]] = {
        name: [math.nan if value is None else value for value in table[name].to_pylist()] for name in table.column_names
    }
    runs: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row, key in enumerate(zip(columns.pop("variant"), columns.pop("seed"), strict=True)):
        run = runs.setdefault(key, {name: [] for name in columns})
        for name, values in run.items():
            values.append(columns[name][row])
    return [
        RunCurves({**facts[label], "label": label, "variant": label, "seed": seed}, run)
        for (label, seed), run in runs.items()
    ]


def _evidence_table(curves: Runs, spec: EvidenceSpec) -> str:
    base = spec.base(curves)
    titles = [column.title if isinstance(column, SeedMean) else column for column in spec.columns]
    rows = []
    for name, runs in spec.variants(curves).items():
        cells = (
            column.cell(runs, base) if isinstance(column, SeedMean) else _COUNTS[column](runs, base)
            for column in spec.columns
        )
        rows.append((name, *cells))
    return markdown_table(("variant", *titles), rows)


def draw_figure(curves: Runs, path: Path, spec: EvidenceSpec) -> None:
    """Draw the figure of ``spec``: curves of a metric for some variants, and one column's intervals for all of them."""
    require("matplotlib", "the lab needs", "demo").use("Agg")
    pyplot = require("matplotlib.pyplot", "the lab needs", "demo")
    figure, (curve_axes, dot_axes) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1, 1.1]})
    variants = spec.variants(curves)
    base = spec.base(curves)
    names = list(variants)
    first = next(name for name in names if variants[name][0].label == base[0].label)
    shown = spec.plotted_rows or dict.fromkeys([*names[:2], first, names[-1]])
    for name, colour in zip(shown, _COLOURS, strict=False):
        series = [run.series(spec.curves) for run in variants[name]]
        for values in series:
            curve_axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=0.4, alpha=0.4)
        means = [fmean(step) for step in zip(*series, strict=True)]
        curve_axes.plot(range(1, len(means) + 1), means, color=colour, linewidth=2.2, label=name.replace("`", ""))
    if spec.curves == "reward":
        curve_axes.axhline(curves[0].facts["chance"], color="0.35", linewidth=1, linestyle=":", label="chance")
    curve_axes.set(
        xlabel="step (rollout batch)", ylabel=spec.curve_label, title=f"{len(base)} seeds, thin; their mean, thick"
    )
    curve_axes.set_ylim(min(0, curve_axes.get_ylim()[0]), 1.35 * curve_axes.get_ylim()[1])
    curve_axes.legend(fontsize="small", loc="upper left")
    measure = next(
        column for column in spec.columns if isinstance(column, SeedMean) and column.title == spec.dot_column
    )
    estimates = {name: measure.estimate(runs, base) for name, runs in variants.items()}
    dots = [(name, *estimate) for name, estimate in reversed(estimates.items()) if estimate is not None]
    for height, (_, mean, interval) in enumerate(dots):
        low, high = interval or (mean, mean)
        verdict_colour = GREEN if low > 0 else VERMILION if high < 0 else "0.45"
        colour = verdict_colour if measure.is_paired else BLUE
        dot_axes.plot([low, high], [height, height], color=colour, linewidth=2)
        dot_axes.plot(mean, height, "o", color=colour)
    labels = [name.strip("`").split(" ", 1)[-1].replace(" ", "\n") if name[0] == "`" else name for name, *_ in dots]
    dot_axes.set_yticks(range(len(dots)), labels, fontsize="small")
    dot_axes.axvline(0, color="0.35", linewidth=1)
    dot_axes.set(
        xlabel=f"{spec.curve_label}: {spec.dot_column}" if measure.is_paired else spec.dot_column,
        title=f"mean over seeds, {CONFIDENCE_LABEL}",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def search_table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the table of ``search.csv``: mean rewards, and intervals of the difference from the first variant."""
    by_setting: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        cells = by_setting.setdefault((row["setting"], row["lr"]), {})
        cells.setdefault(row["variant"], {})[row["seed"]] = float(row["reward"])
    variants = list(dict.fromkeys(variant for cells in by_setting.values() for variant in cells))

    def cell(cells: Mapping[str, Mapping[str, float]], variant: str) -> str:
        rewards, base = cells.get(variant), cells.get(variants[0], {})
        if rewards is None:
            return "–"
        differences = [value - base[seed] for seed, value in rewards.items() if seed in base]
        interval = mean_interval(differences) if variant != variants[0] else None
        return f"{fmean(rewards.values()):.3f}" + (
            "" if interval is None else " ({:+.3f} to {:+.3f})".format(*interval)
        )

    head = ["", "lr", *(variant if " " in variant or variant == "none" else f"`{variant}`" for variant in variants)]
    return markdown_table(
        head, ((*key, *(cell(cells, variant) for variant in variants)) for key, cells in by_setting.items())
    )


def rewrite_page(page: Path) -> str:
    """Return the page's text with tables generated from the data in ``evidence/``."""
    text = page.read_text(encoding="utf-8")
    with (page.parent / "evidence" / "search.csv").open(encoding="utf-8", newline="") as file:
        for name, rows in itertools.groupby(csv.DictReader(file), key=lambda row: row["table"]):
            if f"<!-- {name}: begin -->" in text:
                text = replace_marked_text(text, name, search_table(rows), page=page.name)
    for path in sorted((page.parent / "evidence").glob("*.parquet")):
        if f"<!-- {path.stem}: begin -->" in text:
            text = replace_marked_text(
                text, path.stem, _evidence_table(load_runs(path), EVIDENCE_SPECS[path.stem]), page=page.name
            )
    return text


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_geomask.tools.lab.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("docs", nargs="?", type=Path, default=Path("docs"), help="folder of the pages (default: docs)")
    parser.add_argument(
        "--collect", nargs="+", metavar=("NAME", "DIR"), help="name of the data file to write, and folders of runs"
    )
    parser.add_argument(
        "--split",
        nargs="+",
        metavar=("DIMENSION", "EDGE"),
        help="with --collect: split the tokens of recorded runs by a dimension, at these edges",
    )
    arguments = parser.parse_args()
    folder = arguments.docs / "evidence"
    if arguments.collect:
        name, *folders = arguments.collect[0], *map(Path, arguments.collect[1:])
        if arguments.split:
            curves = split_runs(folders, arguments.split[0], [float(edge) for edge in arguments.split[1:]])
        else:
            curves = read_curves(folders)
        collect_runs(curves, folder / f"{name}.parquet", EVIDENCE_SPECS[name])
    for path in sorted(folder.glob("*.parquet")):
        curves, spec = load_runs(path), EVIDENCE_SPECS[path.stem]
        if spec.curves:
            draw_figure(curves, path.with_suffix(".png"), spec)
        if spec.panel_file:
            write_plot(curves, arguments.docs / spec.panel_file)
    for page in (arguments.docs / "evidence.md", arguments.docs / "lab.md"):
        page.write_text(rewrite_page(page), encoding="utf-8")


if __name__ == "__main__":
    _main()
