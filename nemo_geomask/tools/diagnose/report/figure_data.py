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

from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS, Dimension
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import (
    BIN_DEFINITIONS,
    HEALTH_LIMITS,
    QUANTITIES,
    REMOVED_SHARES,
    Estimate,
    HealthLimit,
    measure_bins,
)
from nemo_geomask.tools.diagnose.read.record_reader import Array

MAX_POINTS = 240
"""Largest number of points of a curve; the steps of a longer run are pooled."""

_LOG2_RATIO_EDGES = np.arange(-4.0, 4.5, 0.5)
_MAIN_QUANTITIES = ("noise", "reward", "response length", "masked out", "staleness")
"""Quantities whose figures are in the page's first section; the figures of the others are in a folded section."""
_FIRST_METRICS = ("reward", "token_mult_prob_error", "gen_kl_error", "loss", "grad_norm")
"""Logged metrics that are listed first."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure, or one set of points with ``labels``.

    The index of the run chooses the colour, ``style`` the style of the line, or the symbol of points. ``name`` is empty
    if the run has one curve, ``low`` and ``high`` are if there is no confidence interval.
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
    """One plot."""

    key: str  # unique name, from which the PNG's file name is derived
    title: str
    definition: str
    section: str
    x_title: str
    y_title: str  # title of the axis; a named view has its name as title instead
    views: Mapping[str, Sequence[Curve]]  # curves by the name of what they measure; the page shows one view at a time
    x_labels: tuple[str, ...] = ()  # names of the positions on the x axis; empty if the axis has numbers
    limits: tuple[float, ...] = ()  # the values beyond which a run is drifting, and broken; empty if there are none
    # the step at which a run's mismatch rose, by index of the run
    onsets: Mapping[int, int] = field(default_factory=dict)
    is_scatter: bool = False

    @property
    def first_view(self) -> Sequence[Curve]:
        """Curves that are shown first."""
        return next(iter(self.views.values()))


_Series = Sequence[tuple[str, Callable[[StepSums], Estimate]]]
"""Names of a figure's curves, and what they show of each step."""


def diagnosis_figures(runs: Sequence[RunDiagnosis]) -> list[Figure]:
    """Return the figures that compare runs; a figure whose data no run recorded is left out."""
    pooled = [_pool_steps(run.evidence.statistics) for run in runs]
    figure = partial(
        _step_figure, pooled, {index: run.since for index, run in enumerate(runs) if run.since is not None}
    )
    figures: list[Figure | None] = []
    for number in (*HEALTH_LIMITS, *QUANTITIES):
        definition, section = number.definition, "more"
        limits: tuple[float, ...] = ()
        if isinstance(number, HealthLimit):
            section, limits = "steps", (number.drifting, number.broken)
            drifting, broken = (f"{number.sign} {limit:g}" for limit in limits)
            definition += f". Drifting {drifting}, broken {broken}: {number.source}"
        elif number.name in _MAIN_QUANTITIES:
            section = "steps"
        figures.append(figure("step", number.name, definition, section, [("", number.estimate)], limits))
    masks = sorted({mask for steps in pooled for _, sums in steps for mask in sums.removed})
    for unit, definition in REMOVED_SHARES:
        title = "removed, of |Δ|" if unit == "capped_abs" else "removed, of the tokens"
        series = [(mask, partial(_removed_share, mask, unit)) for mask in masks]
        figures.append(figure("masks", title, f"for each mask, the {definition}", "masks", series))
    figures += [_dimension_figure(runs, dimension) for dimension in DIMENSIONS]
    figures.append(_group_figure(runs))
    return [figure for figure in figures if figure is not None]


def _step_figure(
    runs: Sequence[Sequence[tuple[float, StepSums]]],
    onsets: Mapping[int, int],
    key: str,
    title: str,
    definition: str,
    section: str,
    series: _Series,
    limits: tuple[float, ...] = (),
) -> Figure | None:
    """Return the figure of numbers by step; None if nothing was recorded, or all values are 0."""
    curves = []
    for run, steps in enumerate(runs):
        x = tuple(step for step, _ in steps)
        for style, (name, estimate) in enumerate(series):
            y, low, high = zip(*(estimate(sums) if sums["tokens"] else _UNKNOWN for _, sums in steps), strict=True)
            if not all(map(math.isnan, y)):
                has_interval = not all(map(math.isnan, low))
                curves.append(Curve(run, name, x, y, low if has_interval else (), high if has_interval else (), style))
    if not any(y for curve in curves for y in curve.y if math.isfinite(y)):
        return None
    views = {"": curves}
    return Figure(f"{key} {title}", title, definition, section, "step", "", views, limits=limits, onsets=onsets)


_UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def _removed_share(mask: str, unit: Literal["tokens", "capped_abs"], sums: StepSums) -> Estimate:
    return _UNKNOWN._replace(value=sums.removed_share(mask, unit))


def _chunks(steps: Sequence[int]) -> list[Sequence[int]]:
    """Divide steps into at most ``MAX_POINTS`` chunks of consecutive steps."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [steps[first : first + size] for first in range(0, len(steps), size)]


def _pool_steps(statistics: RunStatistics) -> list[tuple[float, StepSums]]:
    """Return the mean step number and the sums of each chunk of steps."""
    return [(float(np.mean(chunk)), statistics.total(chunk)) for chunk in _chunks(sorted(statistics.steps))]


def _dimension_figure(runs: Sequence[RunDiagnosis], dimension: Dimension) -> Figure | None:
    """Return the figure of a dimension, with a view for each measure; None if all tokens are in one bin."""
    sides: list[tuple[int, str, int, Array]] = []  # run, name, style, sums; the judged window's line is solid
    for index, run in enumerate(runs):
        before, after = run.evidence.before, run.evidence.after.bin_sums[dimension.name]
        before_name, after_name = run.evidence.side_names if before is not None else ("", "")
        if before is not None:
            sides.append((index, before_name, 1, before.bin_sums[dimension.name]))
        sides.append((index, after_name, 0, after))
    sides = [side for side in sides if side[-1][:, 0].any()]
    bins = np.flatnonzero(sum(sums[:, 0] for *_, sums in sides)).tolist() if sides else []
    if len(bins) < 2:
        return None
    measured = [(run, name, style, measure_bins(sums).measures) for run, name, style, sums in sides]
    x = tuple(map(float, range(len(bins))))
    names = list(BIN_DEFINITIONS)
    # The share of the tokens is the first measure but the last view, so that the page shows the mismatch first.
    views = {
        measure: [
            Curve(run, name, x, tuple(measures[measure][bins].tolist()), style=style)
            for run, name, style, measures in measured
        ]
        for measure in [*names[1:], names[0]]
    }
    labels = tuple(dimension.label(index, index) for index in bins)
    title = f"By {dimension.name}"
    return Figure(f"by {dimension.name}", title, "", "parts", dimension.unit, "", views, x_labels=labels)


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
    """Share that a prompt group has of a step's Σ min(|Δ|, 1), and how its mismatch compares with the other groups'.

    The ``ratio`` is its mean |Δ| over mean 1 − p, divided by the same of the step's other groups.
    """

    group: int
    share: float
    ratio: float


def group_mismatches(run: RunDiagnosis, step: int) -> Iterator[GroupMismatch]:
    """Yield the mismatch of each prompt group of a step, except where there is none to compare it with."""
    groups = {number: tuple(sums.tolist()) for number, sums in run.evidence.statistics.steps[step].groups.items()}
    capped_abs, one_minus_p = (sum(column) for column in zip(*groups.values(), strict=True))
    for number, (own_abs, own_expected) in groups.items():
        other_abs, other_expected = capped_abs - own_abs, one_minus_p - own_expected
        if own_expected > 0 and other_abs > 0 and other_expected > 0:
            ratio = own_abs / own_expected * other_expected / other_abs
            yield GroupMismatch(number, own_abs / capped_abs, ratio)


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
        "divided by the mismatch of the step's other groups",
        section="parts",
        x_title="times the mismatch of the other groups",
        y_title="share",
        views={"": curves},
        x_labels=(f"below {edges[1]}", *ranges[1:-1], f"{edges[-2]} and more"),
    )
