"""What the report plots, as plain numbers that are binned beforehand: a long run makes no larger file.

A figure is drawn twice from the same numbers: by plotly in the page, by matplotlib as a PNG.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path
from typing import Any

import numpy as np

from nemo_geomask.diagnosis.statistics import DIMENSIONS, Statistics, StepSums, Window
from nemo_geomask.diagnosis.text import MEASURES, NUMBERS, REMOVED_SHARES, measured
from nemo_geomask.diagnosis.verdict import LEVELS, RunDiagnosis
from nemo_geomask.errors import DataError, MissingDependencyError

__all__ = ["COLOURS", "Curve", "Figure", "figures_of", "group_lifts", "logged_figures", "plotly_figure", "write_pngs"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#C2679B")
"""Of the runs, after Okabe and Ito: told apart by colour-blind readers, at contrast 3:1 on a light and a dark page."""
SYMBOLS = ("circle", "diamond", "square", "x")
"""Of every fourth run, which have the same colour."""
POINT_SYMBOLS = ("star", "circle", "circle-open")
DASHES = ("solid", "dot", "dash", "dashdot")
POINTS = 240
"""Of a curve; a longer run's steps are taken together."""
LONGEST = 48
"""Of a name in a legend, in characters."""
GROUP_BINS = np.arange(-4.0, 4.5, 0.5)


@dataclass(frozen=True)
class Curve:
    """One line, or rows of bars.

    Attributes:
        run: number of the run, which has a colour.
        name: what it is within the run; "" where it is all that there is of the run.
        x: step numbers, or places among the figure's ``parts``.
        y: NaN where there is nothing.
        low, high: of the 95 % interval; empty where there is none.
        style: number of the dash.
        labels: of points that have a name.
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
        key: for programs, and the PNG's name.
        title, definition: what it shows.
        section: where it stands in the page.
        across, along: titles of the axes, y and x.
        curves: by the name of what is measured, of which one is shown at a time.
        parts: names of the places on the x axis, where it has no numbers.
        limits: of the values, drifting and broken.
        since: by run, the first changed step.
        points: whether the points are apart.
    """

    key: str
    title: str
    definition: str
    section: str
    across: str
    along: str
    curves: Mapping[str, Sequence[Curve]]
    parts: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()
    since: Mapping[int, int] = field(default_factory=dict)
    points: bool = False

    @property
    def shown(self) -> Sequence[Curve]:
        """What is seen first."""
        return next(iter(self.curves.values()))


def figures_of(runs: Sequence[RunDiagnosis]) -> list[Figure]:
    """All that there is to plot of runs, side by side; without those for which no record has what they need."""
    binned = [_bins(run.evidence.statistics) for run in runs]
    since = {place: run.since for place, run in enumerate(runs) if run.since is not None}

    def by_step(
        key: str,
        title: str,
        definition: str,
        section: str,
        values: Mapping[str, Callable[[StepSums], tuple[float, float, float]]],
        limits: tuple[float, ...] = (),
    ) -> Figure | None:
        curves = [
            _along_steps(place, name, steps, value, style)
            for place, steps in enumerate(binned)
            for style, (name, value) in enumerate(values.items())
        ]
        curves = [curve for curve in curves if not all(math.isnan(y) for y in curve.y)]
        if not any(y for curve in curves for y in curve.y if math.isfinite(y)):
            return None  # nothing but zeros
        return Figure(key, title, definition, section, "", "step", {"": curves}, limits=limits, since=since)

    found: list[Figure | None] = []
    for level in LEVELS:
        value = {"": lambda sums, level=level: level.of(sums)[:3]}
        limits = (level.drifting, level.broken)
        said = f"{level.definition}. Drifting {'<' if level.below else '>'} {limits[0]:g}, broken {limits[1]:g}"
        found.append(by_step(f"step {level.name}", level.name, f"{said}: {level.source}", "steps", value, limits))
    for number in NUMBERS:
        section = "steps" if number.name in _FIRST else "more"
        value = {"": lambda sums, number=number: (float(number.value(sums)), *number.interval(sums))}
        found.append(by_step(f"step {number.name}", number.name, number.definition, section, value))
    labels = sorted({label for steps in binned for _, sums in steps for label in sums.removed if label})
    for of, what in enumerate(REMOVED_SHARES):
        values = {
            label: lambda sums, label=label, of=of: (sums.removed_share(label, of), math.nan, math.nan)
            for label in labels
        }
        title = "removed, of |Δ|" if of else "removed, of the tokens"
        found.append(by_step(f"masks {title}", title, f"by each mask, the {what}", "masks", values))
    found += [_by_part(runs, one.name) for one in DIMENSIONS]
    found.append(_by_group(runs))
    return [figure for figure in found if figure is not None]


_FIRST = ("noise", "reward", "response length", "masked out", "staleness")


def _bins(statistics: Statistics) -> list[tuple[float, StepSums]]:
    """Steps, so many together that there are at most ``POINTS``, by the mean of their numbers."""
    steps = sorted(statistics.steps)
    size = -(-len(steps) // POINTS)
    return [
        (float(np.mean(steps[first : first + size])), statistics.total(steps[first : first + size]))
        for first in range(0, len(steps), size)
    ]


def _along_steps(
    run: int,
    name: str,
    steps: Sequence[tuple[float, StepSums]],
    value: Callable[[StepSums], tuple[float, float, float]],
    style: int,
) -> Curve:
    y, low, high = zip(*(value(sums) if sums["tokens"] else (math.nan,) * 3 for _, sums in steps), strict=True)
    if all(math.isnan(end) for end in low):
        low = high = ()
    return Curve(run, name, tuple(x for x, _ in steps), y, low, high, style % len(DASHES))


def _windows(run: RunDiagnosis) -> Iterator[tuple[str, Window]]:
    """Of the run before and after it changed, or of all of it."""
    evidence = run.evidence
    if evidence.before is None:
        yield "", evidence.after
        return
    yield evidence.names[0], evidence.before
    yield evidence.names[1], evidence.after


def _by_part(runs: Sequence[RunDiagnosis], name: str) -> Figure | None:
    one = next(one for one in DIMENSIONS if one.name == name)
    found = [
        (place, part, len(parts) - 1 - style, measured(window.cells[name]))
        for place, run in enumerate(runs)
        for parts in [list(_windows(run))]
        for style, (part, window) in enumerate(parts)
    ]
    there = sorted({bin_ for *_, cells in found for bin_ in cells})
    if len(there) < 2:
        return None
    order = [measure.name for measure in MEASURES]
    order = [*order[1:], order[0]]
    curves = {
        measure: [
            Curve(
                place,
                part,
                tuple(map(float, range(len(there)))),
                tuple(cells.get(bin_, {}).get(measure, math.nan) for bin_ in there),
                style=style,
            )
            for place, part, style, cells in found
            if cells
        ]
        for measure in order
    }
    return Figure(
        f"by {name}",
        f"By {name}",
        "",
        "parts",
        "",
        one.unit,
        curves,
        parts=tuple(one.label(bin_, bin_) for bin_ in there),
    )


def logged_figures(runs: Sequence[Mapping[str, Mapping[int, float]]]) -> Iterator[Figure]:
    """Of the runs' own metrics, one of which is seen at a time: by name, then step."""
    curves: dict[str, list[Curve]] = {}
    names = {name for run in runs for name in run}
    for name in [*filter(names.__contains__, _LOGGED_FIRST), *sorted(names.difference(_LOGGED_FIRST))]:
        for place, run in enumerate(runs):
            steps = sorted(run.get(name, ()))
            size = max(1, -(-len(steps) // POINTS))
            some = [steps[first : first + size] for first in range(0, len(steps), size)]
            y = tuple(float(np.mean([run[name][step] for step in part])) for part in some)
            if any(map(math.isfinite, y)):
                curves.setdefault(name, []).append(Curve(place, "", tuple(float(np.mean(part)) for part in some), y))
    if curves:
        yield Figure("logged", "Metrics", "", "logged", "", "step", curves)


_LOGGED_FIRST = ("reward", "token_mult_prob_error", "gen_kl_error", "loss", "grad_norm")


def _by_group(runs: Sequence[RunDiagnosis]) -> Figure | None:
    """How many prompt groups of a step have how many times the mismatch of the others."""
    curves = []
    for place, run in enumerate(runs):
        lifts = [lift for step in run.evidence.steps_after for *_, lift in group_lifts(run, step) if lift > 0]
        if lifts:
            inside = np.clip(np.log2(lifts), GROUP_BINS[0], GROUP_BINS[-1] - 1e-9)
            count = np.histogram(inside, GROUP_BINS)[0] / len(lifts)
            curves.append(Curve(place, "", tuple(map(float, range(len(count)))), tuple(count.tolist())))
    if not curves:
        return None
    parts = tuple(f"{2.0**low:.2g} to {2.0**high:.2g}" for low, high in itertools.pairwise(GROUP_BINS.tolist()))
    definition = "share of the prompt groups, of all steps that count, by their mismatch (mean |Δ| over mean 1 − p) in "
    definition += "units of that of their step's other groups"
    return Figure("by group", "By prompt group", definition, "parts", "share", "times the others", {"": curves}, parts)


def group_lifts(run: RunDiagnosis, step: int) -> Iterator[tuple[int, float, float]]:
    """Of each prompt group of a step its number, share of the mismatch, and mismatch in units of the others'."""
    groups = run.evidence.statistics.steps[step].groups
    size, model = (sum(found[place] for found in groups.values()) for place in (0, 1))
    for group, (own, expected, _) in groups.items():
        others = size - own
        if expected > 0 and others > 0 and model > expected:
            yield group, own / size, own / expected * (model - expected) / others


def _spread(curves: Sequence[Curve], limits: Sequence[float]) -> float:
    """The largest value over the smallest; 1 where some are not above 0."""
    known = [*limits, *(y for curve in curves for y in curve.y if math.isfinite(y))]
    return max(known) / min(known) if known and min(known) > 0 else 1.0


def _is_log(curves: Sequence[Curve], limits: Sequence[float]) -> bool:
    return _spread(curves, limits) > 20


def _near(curves: Sequence[Curve], limits: Sequence[float], log: bool) -> list[tuple[float, str]]:
    """Limits that don't press the curves together."""
    known = [y for curve in curves for y in curve.y if math.isfinite(y)]
    span = max(known) - min(known)
    named = zip(limits, ("drifting", "broken"), strict=False)
    return [one for one in named if log or min(known) - span <= one[0] <= max(known) + span]


def plotly_figure(figure: Figure, names: Sequence[str]) -> dict[str, Any]:
    """For ``Plotly.newPlot``; colours of text and lines are the page's.

    Args:
        figure: what to draw.
        names: of the runs. Like all labels they are escaped, since plotly takes them for markup.
    """
    views = {}
    for view, curves in figure.curves.items():
        log = _is_log(curves, figure.limits)
        traces = [trace for curve in curves for trace in _traces(figure, curve, names, log)]
        axis: dict[str, Any] = {"type": "log" if log else "linear", "exponentformat": "power"}
        axis["title"] = {"text": _escape(view or figure.across)}
        if log and _spread(curves, figure.limits) > 100:
            axis["dtick"] = 1
        marks = [
            {"line": {"color": "#888", "dash": "dash", "width": 1}, "y0": value, "y1": value, "x0": 0, "x1": 1}
            | {"xref": "paper", "label": {"text": said, "textposition": place, "font": {"size": 10}}}
            for (value, said), place in zip(_near(curves, figure.limits, log), ("start", "end"), strict=False)
        ]
        marks += [
            {"line": {"color": COLOURS[run % len(COLOURS)], "dash": "dot", "width": 1}, "x0": step, "x1": step}
            | {"y0": 0, "y1": 1, "yref": "paper"}
            for run, step in figure.since.items()
        ]
        shapes = [{"type": "line", "layer": "below", **mark} for mark in marks]
        views[view] = {"data": traces, "layout": {"yaxis": axis, "shapes": shapes}}
    across: dict[str, Any] = {"title": {"text": _escape(figure.along)}}
    if figure.parts:
        across |= {"tickvals": list(range(len(figure.parts))), "ticktext": [_escape(part) for part in figure.parts]}
    named = len(figure.shown) > 1 or any(curve.name for curve in figure.shown)
    hover = "closest" if figure.points else "x unified"
    return {"views": views, "xaxis": across, "hovermode": hover, "showlegend": named}


def _traces(figure: Figure, curve: Curve, names: Sequence[str], log: bool) -> Iterator[dict[str, Any]]:
    colour = COLOURS[curve.run % len(COLOURS)]
    name = _escape(_name(figure, curve, names))
    x = list(map(_short, curve.x))
    if curve.low and not figure.points:
        for ends, fill in ((curve.low, None), (curve.high, "tonexty")):
            # What is below 0 has no place on a logarithmic axis.
            low = [_short(max(end, y / 10) if log else end) for end, y in zip(ends, curve.y, strict=True)]
            style = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            yield {"x": x, "y": low, "fillcolor": f"{colour}26", "legendgroup": name, **style} | (
                {"fill": fill} if fill else {}
            )
    drawn: dict[str, Any] = {"x": x, "y": list(map(_short, curve.y)), "name": name, "legendgroup": name}
    marker = {"symbol": SYMBOLS[curve.run // len(COLOURS) % len(SYMBOLS)], "size": 5}
    if figure.points:
        marker = {"symbol": POINT_SYMBOLS[curve.style], "size": 9}
        drawn |= {"mode": "markers", "text": [_escape(text) for text in curve.labels]}
        drawn |= {"hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>"}
    else:
        drawn |= {"mode": "lines+markers" if len(x) < 60 else "lines"}
    yield {**drawn, "marker": {"color": colour, **marker}, "line": {"color": colour, "dash": DASHES[curve.style]}}


def _name(figure: Figure, curve: Curve, names: Sequence[str]) -> str:
    """In the legend: the run's, where there are several, and the curve's."""
    run = names[curve.run] if not curve.name or (len(names) > 1 and not figure.points) else ""
    return ", ".join(one if len(one) <= LONGEST else f"{one[: LONGEST - 1]}…" for one in (run, curve.name) if one)


def _escape(text: str) -> str:
    """Plotly takes some tags for markup, and dollars for mathematics."""
    return escape_html(text, quote=False).replace("$", "&#36;")


def _short(value: float) -> float | None:
    """JSON has no NaN; six digits are enough to see."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_pngs(figures: Sequence[Figure], names: Sequence[str], directory: Path) -> list[Path]:
    """Draw each into a file of its own.

    Raises: MissingDependencyError: there is no matplotlib. DataError: the folder can't be written to.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingDependencyError(
            f'PNGs need matplotlib, which could not be imported ({error}); pip install "nemo-geomask[demo]"'
        ) from error
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            drawn, axes = pyplot.subplots(figsize=(7, 4))
            _draw(axes, figure, names)
            drawn.tight_layout()
            written.append(directory / f"{''.join(ch if ch.isalnum() else '-' for ch in figure.key)}.png")
            drawn.savefig(written[-1], dpi=120)
            pyplot.close(drawn)
    except OSError as error:
        raise DataError(f"--png: {directory} can't be written to ({error.strerror or error})") from None
    return written


def _draw(axes: Any, figure: Figure, names: Sequence[str]) -> None:
    curves, dashes = figure.shown, ("-", ":", "--", "-.")
    log = _is_log(curves, figure.limits)
    for curve in curves:
        colour = COLOURS[curve.run % len(COLOURS)]
        look = (
            {"linestyle": "", "marker": "o"} if figure.points else {"linestyle": dashes[curve.style], "linewidth": 1.5}
        )
        axes.plot(curve.x, curve.y, color=colour, label=_plain_text(_name(figure, curve, names)), **look)
        if curve.low and not figure.points:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    for value, name in _near(curves, figure.limits, log):
        axes.axhline(value, color="grey", linestyle="--", linewidth=0.8)
        axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom")
    for run, step in figure.since.items():
        axes.axvline(step, color=COLOURS[run % len(COLOURS)], linestyle=":", linewidth=0.8)
    if figure.parts:
        axes.set_xticks(range(len(figure.parts)), figure.parts, rotation=45, ha="right", fontsize="small")
    axes.set_yscale("log" if log else "linear")
    axes.set_title(_plain_text(figure.title), fontsize="medium")
    axes.set_xlabel(figure.along)
    axes.set_ylabel(next(iter(figure.curves)) or figure.across)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")


def _plain_text(text: str) -> str:
    """Without matplotlib's mathematics; a name that begins with _ would not be in the legend."""
    return f" {text}".replace("$", r"\$")
