"""Columns, rows and figures of the evidence pages, as ``columns.toml`` defines them for each data file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from nemo_geomask.tools.lab.outcome import best_reward, final_reward, group_by_variant, has_collapsed
from nemo_geomask.tools.lab.run_store import RunCurves
from nemo_geomask.tools.shared.intervals import mean_interval
from nemo_geomask.tools.shared.palette import LineLook, line_look
from tests.helpers.interval_text import format_interval

Runs = Sequence[RunCurves]
"""Curves of several runs, which belong to one variant or to several."""


@dataclass(frozen=True)
class SeedMean:
    """Table column with a metric's mean over a run's steps, then over seeds, and its confidence interval.

    The interval is by Student's t, over seeds.

    Attributes:
        title: the column's header.
        metric: the metric's name.
        number_format: format specification of a number.
        last_steps: number of steps at the end of the run to average over; 0: all steps.
        weights: metric that weights the steps; empty: all alike.
        is_paired: subtract the baseline's mean on the same seed.
        shows_interval: show the interval.
    """

    title: str
    metric: str
    number_format: str = ".3f"
    last_steps: int = 0
    weights: str = ""
    is_paired: bool = False
    shows_interval: bool = True

    def by_seed(self, runs: Runs) -> dict[int, float]:
        """Return each seed's mean; seeds on which the metric was never finite are left out."""
        means = {}
        for run in sorted(runs, key=lambda run: run.seed):
            values = run.series(self.metric)[-self.last_steps :]
            weights = run.series(self.weights)[-self.last_steps :] if self.weights else [1.0] * len(values)
            finite = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
            if finite:
                means[run.seed] = fmean([value for value, _ in finite], [weight for _, weight in finite])
        return means

    def estimate(self, runs: Runs, baseline: Runs) -> tuple[float, tuple[float, float] | None] | None:
        """Return the mean over seeds and its interval; None if no seed has a value."""
        values = self.by_seed(runs)
        if self.is_paired:
            baseline_values = self.by_seed(baseline) if runs[0].label != baseline[0].label else {}
            values = {seed: value - baseline_values[seed] for seed, value in values.items() if seed in baseline_values}
        return (fmean(values.values()), mean_interval(list(values.values()))) if values else None

    def cell(self, runs: Runs, baseline: Runs) -> str:
        """Return the text of the table's cell for a variant's runs."""
        estimate = self.estimate(runs, baseline)
        if estimate is None:
            return "–"
        mean, interval = estimate
        # The option z formats a rounded -0 without its sign.
        style = f"{'+' * self.is_paired}z{self.number_format}"
        return f"{mean:{style}}{format_interval(interval if self.shows_interval else None, style)}"


def _count_better_seeds(runs: Runs, baseline: Runs) -> str:
    rewards, baseline_rewards = (
        {run.seed: final_reward(run.series("reward")) for run in variant} for variant in (runs, baseline)
    )
    shared = rewards.keys() & baseline_rewards.keys()
    return (
        "–"
        if runs[0].label == baseline[0].label
        else f"{sum(rewards[seed] > baseline_rewards[seed] for seed in shared)} of {len(shared)}"
    )


def _reward_range(runs: Runs, baseline: Runs) -> str:
    rewards = [final_reward(run.series("reward")) for run in runs]
    return f"{min(rewards):.3f}, {max(rewards):.3f}"


def _fall_from_best(runs: Runs, baseline: Runs) -> str:
    rewards = [run.series("reward") for run in runs]
    falls = [final_reward(series) - best_reward(series) for series in rewards]
    return f"{fmean(falls):+z.3f}{format_interval(mean_interval(falls), '+z.3f')}"


COMPUTED_COLUMNS: dict[str, Callable[[Runs, Runs], str]] = {
    "seeds": lambda runs, baseline: str(len(runs)),
    "lowest, highest": _reward_range,
    "better on": _count_better_seeds,
    "best 10 steps": lambda runs, baseline: f"{fmean(best_reward(run.series('reward')) for run in runs):.3f}",
    "last 10 minus best 10": _fall_from_best,
    "collapsed": lambda runs, baseline: str(sum(has_collapsed(run.series("reward")) for run in runs)),
}
"""Columns that are not a mean over seeds: by title, a function of the variant's runs and the baseline's."""


@dataclass(frozen=True)
class EvidenceSpec:
    """Specification of the table and figures that are made from one data file.

    Attributes:
        columns: the table's columns after that of the variant: means over seeds, or keys of :data:`COMPUTED_COLUMNS`.
        rows: the variants in the table, in its order: the name in the table by the variant's label. If empty, the table
            has all variants under their labels, highest reward first. Other variants are compared with that of the
            first row; if ``rows`` is empty, with the first variant in the data.
        curves: metric of the figure's left half; empty: no figure.
        plotted_rows: names of the rows in the left half.
        dot_column: title of the column in the figure's right half.
        curve_label: label of the y axis of ``curves``.
    """

    columns: Sequence[SeedMean | str]
    rows: Mapping[str, str] = field(default_factory=dict)
    curves: str = ""
    plotted_rows: Sequence[str] = ()
    dot_column: str = ""
    curve_label: str = "mean reward"

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics in the data file."""
        means = [column for column in self.columns if isinstance(column, SeedMean)]
        names = (self.curves, *(name for column in means for name in (column.metric, column.weights)))
        return list(dict.fromkeys(("reward", *filter(None, names))))

    def baseline_runs(self, curves: Runs) -> Runs:
        """Return the runs of the variant with which the others are compared."""
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


_TABLE = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
_FIGURES = _TABLE.pop("figures")


def figure_name(row: str) -> str:
    """Return the name in figures of a table's row."""
    return str(_FIGURES["names"].get(row, row))


def figure_look(name: str) -> LineLook:
    """Return colour and line style of a variant, which are the same in all figures.

    Raises: ValueError: ``looks`` in ``columns.toml`` does not list the variant.
    """
    return line_look(_FIGURES["looks"].index(name))


def _read_evidence_specs() -> dict[str, EvidenceSpec]:
    columns = {name: SeedMean(**settings) for name, settings in _TABLE.pop("column").items()}
    return {
        name: EvidenceSpec(
            **{**settings, "columns": tuple(columns.get(column, column) for column in settings["columns"])}
        )
        for name, settings in _TABLE.items()
    }


EVIDENCE_SPECS = _read_evidence_specs()
"""Specification for each data file, by the file's name without ``.parquet``."""
