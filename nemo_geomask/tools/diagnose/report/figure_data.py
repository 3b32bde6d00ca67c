"""Figures of runs as plain numbers: by step, by dimension, by prompt group, and of logged metrics.

``figure_rendering`` draws them. A curve has at most :data:`MAX_POINTS` points, so that
the report of a long run is not larger than that of a short one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from nemo_geomask.tools.diagnose.explain.verdict import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS, Dimension
from nemo_geomask.tools.diagnose.measure.quantities import (
    BIN_MEASURES,
    QUANTITIES,
    REMOVED_SHARES,
    Quantity,
    measure_bins,
)
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics, Window
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS, HealthLimit

MAX_POINTS = 240
"""Largest number of points of a curve; the steps of a longer run are pooled."""

_LOG2_RATIO_EDGES = np.arange(-4.0, 4.5, 0.5)
_MAIN_QUANTITIES = ("noise", "reward", "response length", "masked out", "staleness")
"""Quantities whose figures are in the page's first section; the figures of the others are in a folded section."""
_FIRST_METRICS = ("reward", "token_mult_prob_error", "gen_kl_error", "loss", "grad_norm")
"""Logged metrics that are listed first."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure, or one set of points.

    Attributes:
        run: index of the run, which chooses the colour.
        name: name among the run's curves; empty if the run has one curve.
        x: step numbers, or indices into the figure's ``x_labels``.
        y: values; NaN where there is none.
        low, high: ends of the confidence interval; empty if there is none.
        style: number of the line style, or of the symbol of points.
        labels: names of the points; empty for a line.
    """

    run: int
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        key: unique name, from which the PNG's file name is derived.
        title: heading.
        definition: caption.
        section: id of the page's section.
        x_title, y_title: titles of the axes; a named view has its name as y title instead.
        views: curves by the name of what they measure; the page shows one view at a time.
        x_labels: names of the positions on the x axis; empty if the axis has numbers.
        limits: the values beyond which a run is drifting, and broken; empty if there are none.
        onsets: the step at which a run's mismatch rose, by index of the run.
        is_scatter: True if the points are not joined by lines.
    """

    key: str
    title: str
    definition: str
    section: str
    x_title: str
    y_title: str
    views: Mapping[str, Sequence[Curve]]
    x_labels: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()
    onsets: Mapping[int, int] = field(default_factory=dict)
    is_scatter: bool = False

    @property
    def first_view(self) -> Sequence[Curve]:
        """Curves that are shown first."""
        return next(iter(self.views.values()))


_PooledSteps = Sequence[tuple[float, StepSums]]
_Estimate = tuple[float, float, float]
"""A value and the ends of its confidence interval."""


def diagnosis_figures(runs: Sequence[RunDiagnosis]) -> list[Figure]:
    """Return the figures that compare runs; a figure whose data no run recorded is left out."""
    pooled = [_pool_steps(run.evidence.statistics) for run in runs]
    onsets = {index: run.since for index, run in enumerate(runs) if run.since is not None}

    def by_step(
        title: str,
        definition: str,
        section: str,
        estimates: Mapping[str, Callable[[StepSums], _Estimate]],
        *,
        key: str = "step",
        limits: tuple[float, ...] = (),
    ) -> Figure | None:
        curves = [
            _curve_by_step(index, name, steps, estimate, style)
            for index, steps in enumerate(pooled)
            for style, (name, estimate) in enumerate(estimates.items())
        ]
        curves = [curve for curve in curves if not all(math.isnan(y) for y in curve.y)]
        if not any(y for curve in curves for y in curve.y if math.isfinite(y)):
            return None  # nothing was recorded, or all values are zero
        return Figure(
            f"{key} {title}",
            title,
            definition=definition,
            section=section,
            x_title="step",
            y_title="",
            views={"": curves},
            limits=limits,
            onsets=onsets,
        )

    figures: list[Figure | None] = []
    for limit in HEALTH_LIMITS:
        limits = f"Drifting {limit.sign} {limit.drifting:g}, broken {limit.sign} {limit.broken:g}"
        figures.append(
            by_step(
                limit.name,
                f"{limit.definition}. {limits}: {limit.source}",
                "steps",
                {"": partial(_estimate_limited_number, limit)},
                limits=(limit.drifting, limit.broken),
            )
        )
    for quantity in QUANTITIES:
        section = "steps" if quantity.name in _MAIN_QUANTITIES else "more"
        estimates = {"": partial(_estimate_quantity, quantity)}
        figures.append(by_step(quantity.name, quantity.definition, section, estimates))
    masks = sorted({mask for steps in pooled for _, sums in steps for mask in sums.removed})
    for unit, definition in REMOVED_SHARES:
        title = "removed, of |Δ|" if unit == "capped_abs" else "removed, of the tokens"
        removed = {mask: partial(_estimate_removed, mask, unit) for mask in masks}
        figures.append(by_step(title, f"for each mask, the {definition}", "masks", removed, key="masks"))
    figures += [_dimension_figure(runs, dimension) for dimension in DIMENSIONS]
    figures.append(_group_figure(runs))
    return [figure for figure in figures if figure is not None]


def _estimate_limited_number(limit: HealthLimit, sums: StepSums) -> _Estimate:
    value, low, high, _ = limit.read(sums)
    return value, low, high


def _estimate_quantity(quantity: Quantity, sums: StepSums) -> _Estimate:
    return (float(quantity.value(sums)), *quantity.interval(sums))


def _estimate_removed(mask: str, unit: Literal["tokens", "capped_abs"], sums: StepSums) -> _Estimate:
    return sums.removed_share(mask, unit), math.nan, math.nan


def _chunks(steps: Sequence[int]) -> list[Sequence[int]]:
    """Divide steps into at most ``MAX_POINTS`` chunks of consecutive steps."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [steps[first : first + size] for first in range(0, len(steps), size)]


def _pool_steps(statistics: RunStatistics) -> _PooledSteps:
    """Return the mean step number and the sums of each chunk of steps."""
    return [(float(np.mean(chunk)), statistics.total(chunk)) for chunk in _chunks(sorted(statistics.steps))]


def _curve_by_step(
    run: int, name: str, steps: _PooledSteps, estimate: Callable[[StepSums], _Estimate], style: int
) -> Curve:
    y, low, high = zip(*(estimate(sums) if sums["tokens"] else (math.nan,) * 3 for _, sums in steps), strict=True)
    if all(math.isnan(end) for end in low):
        low = high = ()
    return Curve(run, name, tuple(x for x, _ in steps), y, low, high, style)


def _named_windows(run: RunDiagnosis) -> list[tuple[str, Window]]:
    """Return *before* and *after* with their names; only *after*, with an empty name, if there is no *before*."""
    evidence = run.evidence
    if evidence.before is None:
        return [("", evidence.after)]
    return list(zip(evidence.side_names, (evidence.before, evidence.after), strict=True))


def _dimension_figure(runs: Sequence[RunDiagnosis], dimension: Dimension) -> Figure | None:
    """Return the figure of a dimension, with a view for each measure; None if all tokens are in one bin."""
    sides = []
    for index, run in enumerate(runs):
        windows = _named_windows(run)
        for position, (name, window) in enumerate(windows):
            style = len(windows) - 1 - position  # the judged window's line is solid
            sides.append((index, name, style, measure_bins(window.bin_sums[dimension.name])))
    bins = sorted({index for *_, measures in sides for index in measures})
    if len(bins) < 2:
        return None
    names = [measure.name for measure in BIN_MEASURES]
    x = tuple(map(float, range(len(bins))))
    # The share of the tokens is the first measure but the last view, so that the page shows the mismatch first.
    views = {
        measure: [
            Curve(run, name, x, tuple(measures.get(index, {}).get(measure, math.nan) for index in bins), style=style)
            for run, name, style, measures in sides
            if measures
        ]
        for measure in [*names[1:], names[0]]
    }
    labels = tuple(dimension.label(index, index) for index in bins)
    return Figure(
        f"by {dimension.name}",
        f"By {dimension.name}",
        definition="",
        section="parts",
        x_title=dimension.unit,
        y_title="",
        views=views,
        x_labels=labels,
    )


def metric_figures(runs: Sequence[Mapping[str, Mapping[int, float]]]) -> Iterator[Figure]:
    """Yield the figure of logged metrics, with a view for each metric; nothing if no run logged any.

    Args:
        runs: for each run, its values by metric name and step.
    """
    names = {name for run in runs for name in run}
    first_names = [name for name in _FIRST_METRICS if name in names]
    views: dict[str, list[Curve]] = {}
    for name in [*first_names, *sorted(names.difference(first_names))]:
        for index, run in enumerate(runs):
            chunks = _chunks(sorted(run.get(name, ())))
            y = tuple(float(np.mean([run[name][step] for step in chunk])) for chunk in chunks)
            if any(map(math.isfinite, y)):
                x = tuple(float(np.mean(chunk)) for chunk in chunks)
                views.setdefault(name, []).append(Curve(index, "", x, y))
    if views:
        yield Figure("logged", "Metrics", definition="", section="logged", x_title="step", y_title="", views=views)


class GroupMismatch(NamedTuple):
    """Mismatch of a prompt group in one step.

    Attributes:
        group: number of the group.
        share: its share of the step's sum of capped |Δ|.
        ratio: its mean |Δ| over mean 1 − p, divided by the same of the step's other groups.
    """

    group: int
    share: float
    ratio: float


def group_mismatches(run: RunDiagnosis, step: int) -> Iterator[GroupMismatch]:
    """Yield the mismatch of each prompt group of a step, except where there is none to compare it with."""
    groups = run.evidence.statistics.steps[step].groups
    capped_abs = sum(group.capped_abs for group in groups.values())
    one_minus_p = sum(group.one_minus_p for group in groups.values())
    for number, group in groups.items():
        other_abs, other_expected = capped_abs - group.capped_abs, one_minus_p - group.one_minus_p
        if group.one_minus_p > 0 and other_abs > 0 and other_expected > 0:
            ratio = group.capped_abs / group.one_minus_p * other_expected / other_abs
            yield GroupMismatch(number, group.capped_abs / capped_abs, ratio)


def _group_figure(runs: Sequence[RunDiagnosis]) -> Figure | None:
    """Return the histogram of the prompt groups' mismatch ratios; None if no groups can be compared."""
    curves = []
    for index, run in enumerate(runs):
        mismatches = [group for step in run.evidence.steps_after for group in group_mismatches(run, step)]
        ratios = [group.ratio for group in mismatches if group.ratio > 0]
        if ratios:
            # Ratios beyond the outermost edges belong to the outermost bins.
            clipped = np.clip(np.log2(ratios), _LOG2_RATIO_EDGES[0], _LOG2_RATIO_EDGES[-1] - 1e-9)
            shares = np.histogram(clipped, _LOG2_RATIO_EDGES)[0] / len(ratios)
            curves.append(Curve(index, "", tuple(map(float, range(len(shares)))), tuple(shares.tolist())))
    if not curves:
        return None
    edges = [f"{2.0**edge:.2g}" for edge in _LOG2_RATIO_EDGES]
    ranges = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    return Figure(
        "by group",
        "By prompt group",
        definition="share of the prompt groups, over the judged steps, by their mismatch (mean |Δ| over mean 1 − p) "
        "divided by the "
        "mismatch of the step's other groups",
        section="parts",
        x_title="times the mismatch of the other groups",
        y_title="share",
        views={"": curves},
        x_labels=(f"below {edges[1]}", *ranges[1:-1], f"{edges[-2]} and more"),
    )
