"""Plots of a run's numbers by step, and their JSON, from which the page's script draws them with plotly.

A curve has at most :data:`MAX_POINTS` points, so that the report of a long run is not larger than that of a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from typing import Any

import numpy as np

from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.run_statistics import RunStatistics
from nemo_geomask.tools.diagnose.measure.step_sums import Estimate, StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS, QUANTITIES, HealthLimit, Quantity
from nemo_geomask.tools.shared.palette import CONTRASTING_COLOURS

MAX_POINTS = 240
"""Largest number of points of a curve; the steps of a longer run are pooled."""
_MAIN_QUANTITIES = ("noise", "reward", "response length", "masked out", "staleness")
"""Quantities whose figures are in the page's first section; the figures of the others are in a folded section."""


@dataclass(frozen=True)
class Curve:
    """Line of one run, by its index; ``low`` and ``high`` are empty if there is no confidence interval."""

    run: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One plot, over the steps."""

    key: str  # unique name
    title: str
    definition: str
    section: str
    curves: Sequence[Curve]
    limits: tuple[float, ...] = ()  # the values beyond which a run is drifting, and broken; empty if there are none
    # the step at which a run's mismatch rose, by index of the run
    onsets: Mapping[int, int] = field(default_factory=dict)


def run_colour(run: int) -> str:
    """Return the colour of a run, by its index."""
    return CONTRASTING_COLOURS[run % len(CONTRASTING_COLOURS)]


def diagnosis_figures(runs: Sequence[RunDiagnosis]) -> list[Figure]:
    """Return the figures that compare runs; a figure is left out if no run recorded its data, or all values are 0."""
    pooled = [_pool_steps(run.evidence.statistics) for run in runs]
    onsets = {index: run.since for index, run in enumerate(runs) if run.since is not None}
    figures = []
    for number in (*HEALTH_LIMITS, *QUANTITIES):
        curves = [curve for index, steps in enumerate(pooled) if (curve := _curve(index, steps, number)) is not None]
        if not any(_finite_values(curves)):
            continue
        definition, section = number.definition, "steps" if number.name in _MAIN_QUANTITIES else "more"
        limits: tuple[float, ...] = ()
        if isinstance(number, HealthLimit):
            section, limits = "steps", (number.drifting, number.broken)
            drifting, broken = (f"{number.sign} {limit:g}" for limit in limits)
            definition += f". Drifting {drifting}, broken {broken}: {number.source}"
        figures.append(Figure(f"step {number.name}", number.name, definition, section, curves, limits, onsets))
    return figures


def _curve(run: int, steps: Sequence[tuple[float, StepSums]], number: Quantity) -> Curve | None:
    """Return the curve of a number by step; None if it was not recorded."""
    unknown = Estimate(math.nan, math.nan, math.nan)
    y, low, high = zip(*(number.estimate(sums) if sums["tokens"] else unknown for _, sums in steps), strict=True)
    if all(map(math.isnan, y)):
        return None
    interval = () if all(map(math.isnan, low)) else (low, high)
    return Curve(run, tuple(step for step, _ in steps), y, *interval)


def _pool_steps(statistics: RunStatistics) -> list[tuple[float, StepSums]]:
    """Return the mean step number and the sums of each of at most ``MAX_POINTS`` chunks of consecutive steps."""
    steps = sorted(statistics.steps)
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    chunks = [steps[first : first + size] for first in range(0, len(steps), size)]
    return [(float(np.mean(chunk)), statistics.total(chunk)) for chunk in chunks]


def _finite_values(curves: Sequence[Curve]) -> list[float]:
    return [y for curve in curves for y in curve.y if math.isfinite(y)]


def plotly_figure(figure: Figure, names: Sequence[str]) -> dict[str, Any]:
    """Return a figure's data and the parts of its layout, from which the page's script calls ``Plotly.react``.

    The names of the runs, like all labels, are escaped, because plotly renders some tags.
    """
    values = _finite_values(figure.curves)
    extremes = [*figure.limits, *values]
    smallest, largest = min(extremes), max(extremes)
    spread = largest / smallest if smallest > 0 else 1.0
    is_log = spread > 20
    y_axis: dict[str, Any] = {"type": "log" if is_log else "linear", "exponentformat": "power"}
    if spread > 100:
        y_axis["dtick"] = 1  # ticks at powers of ten only
    # On a linear axis, a limit that is far from the curves is left out: it would squeeze them into a flat line.
    span = max(values) - min(values)
    low, high = (-math.inf, math.inf) if is_log else (min(values) - span, max(values) + span)
    named = zip(figure.limits, ("drifting", "broken"), strict=False)
    return {
        "data": [trace for curve in figure.curves for trace in _plotly_traces(curve, names, is_log)],
        "yaxis": y_axis,
        "shapes": _plotly_lines(figure, [(limit, name) for limit, name in named if low <= limit <= high]),
        "showlegend": len(figure.curves) > 1,
    }


def _plotly_lines(figure: Figure, limits: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
    """Return horizontal lines at the limits and vertical ones where a run's mismatch rose."""
    style = {"type": "line", "layer": "below"}
    lines: list[dict[str, Any]] = []
    for (value, name), position in zip(limits, ("start", "end"), strict=False):
        label = {"text": name, "textposition": position, "font": {"size": 10}}
        line = {"color": "#888", "dash": "dash", "width": 1}
        ends = {"x0": 0, "x1": 1, "y0": value, "y1": value, "xref": "paper"}
        lines.append({**style, **ends, "line": line, "label": label})
    for run, step in figure.onsets.items():
        line = {"color": run_colour(run), "dash": "dot", "width": 1}
        lines.append({**style, "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": line})
    return lines


def _plotly_traces(curve: Curve, names: Sequence[str], is_log: bool) -> Iterator[dict[str, Any]]:
    colour = run_colour(curve.run)
    # Plotly would render markup, and mathematics between dollar signs.
    name = escape_html(names[curve.run], quote=False).replace("$", "&#36;")
    x = list(map(_short_number, curve.x))
    if curve.low:
        for ends, fill in ((curve.low, {}), (curve.high, {"fill": "tonexty"})):
            # A logarithmic axis can't show an end that is not positive.
            y = [_short_number(max(end, y / 10) if is_log else end) for end, y in zip(ends, curve.y, strict=True)]
            style = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            yield {"x": x, "y": y, "fillcolor": f"{colour}26", "legendgroup": name, **style, **fill}
    yield {
        "x": x,
        "y": list(map(_short_number, curve.y)),
        "name": name,
        "legendgroup": name,
        "mode": "lines+markers" if len(x) < 60 else "lines",
        "marker": {"color": colour, "size": 5},
        "line": {"color": colour},
    }


def _short_number(value: float) -> float | None:
    """Return the number rounded to six digits, to keep the page small; None if JSON can't represent it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
