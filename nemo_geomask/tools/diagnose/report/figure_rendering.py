"""Rendering of figures: as JSON for plotly in the page, and as PNG files by matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import Any

from nemo_geomask.errors import DataError
from nemo_geomask.optional import require
from nemo_geomask.tools.diagnose.report.figure_data import Curve, Figure
from nemo_geomask.tools.shared.palette import CONTRASTING_COLOURS, LINE_STYLES

RUN_SYMBOLS = ("circle", "diamond", "square", "x")
"""Plotly's symbols; runs of the same colour differ in them."""
POINT_SYMBOLS = ("star", "circle", "circle-open")
"""Plotly's symbols of scattered points, by :attr:`Curve.style`."""
PLOTLY_DASHES = ("solid", "dash", "dashdot", "dot")
"""Plotly's names of :data:`~nemo_geomask.tools.shared.palette.LINE_STYLES`."""
MAX_NAME_LENGTH = 48
"""Number of characters at which a name in a legend is cut."""


def run_colour(run: int) -> str:
    """Return the colour of a run, by its index."""
    return CONTRASTING_COLOURS[run % len(CONTRASTING_COLOURS)]


def _finite_values(curves: Sequence[Curve]) -> list[float]:
    return [y for curve in curves for y in curve.y if math.isfinite(y)]


def _spread(curves: Sequence[Curve], limits: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest value or limit; 1 if any of them is not positive."""
    values = [*limits, *_finite_values(curves)]
    return max(values) / min(values) if values and min(values) > 0 else 1.0


def _is_log(curves: Sequence[Curve], limits: Sequence[float]) -> bool:
    return _spread(curves, limits) > 20


def _drawn_limits(curves: Sequence[Curve], limits: Sequence[float], is_log: bool) -> list[tuple[float, str]]:
    """Return the value and name of each limit to draw.

    On a linear axis, a limit that is far from the curves is left out: it would squeeze them into a flat line.
    """
    values = _finite_values(curves)
    if not values:
        return []
    span = max(values) - min(values)
    named = zip(limits, ("drifting", "broken"), strict=False)
    return [(limit, name) for limit, name in named if is_log or min(values) - span <= limit <= max(values) + span]


def plotly_figure(figure: Figure, names: Sequence[str]) -> dict[str, Any]:
    """Return the data and layout of a figure's views, from which the page's script calls ``Plotly.react``.

    The names of the runs, like all labels, are escaped, because plotly renders some tags.
    """
    views = {}
    for name, curves in figure.views.items():
        is_log = _is_log(curves, figure.limits)
        traces = [trace for curve in curves for trace in _plotly_traces(figure, curve, names, is_log)]
        y_axis: dict[str, Any] = {"type": "log" if is_log else "linear", "exponentformat": "power"}
        y_axis["title"] = {"text": _escape(name or figure.y_title)}
        if is_log and _spread(curves, figure.limits) > 100:
            y_axis["dtick"] = 1  # ticks at powers of ten only
        limits = _drawn_limits(curves, figure.limits, is_log)
        views[name] = {"data": traces, "layout": {"yaxis": y_axis, "shapes": _plotly_lines(figure, limits)}}
    x_axis: dict[str, Any] = {"title": {"text": _escape(figure.x_title)}}
    if figure.x_labels:
        x_axis |= {
            "tickvals": list(range(len(figure.x_labels))),
            "ticktext": [_escape(label) for label in figure.x_labels],
        }
    return {
        "views": views,
        "xaxis": x_axis,
        "hovermode": "closest" if figure.is_scatter else "x unified",
        "showlegend": len(figure.first_view) > 1 or any(curve.name for curve in figure.first_view),
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


def _plotly_traces(figure: Figure, curve: Curve, names: Sequence[str], is_log: bool) -> Iterator[dict[str, Any]]:
    colour = run_colour(curve.run)
    name = _escape(_legend_name(figure, curve, names))
    x = list(map(_short_number, curve.x))
    if curve.low and not figure.is_scatter:
        for ends, fill in ((curve.low, {}), (curve.high, {"fill": "tonexty"})):
            # A logarithmic axis can't show an end that is not positive.
            y = [_short_number(max(end, y / 10) if is_log else end) for end, y in zip(ends, curve.y, strict=True)]
            style = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            yield {"x": x, "y": y, "fillcolor": f"{colour}26", "legendgroup": name, **style, **fill}
    trace: dict[str, Any] = {"x": x, "y": list(map(_short_number, curve.y)), "name": name, "legendgroup": name}
    if figure.is_scatter:
        trace |= {
            "mode": "markers",
            "marker": {"color": colour, "symbol": POINT_SYMBOLS[curve.style], "size": 9},
            "text": [_escape(label) for label in curve.labels],
            "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        }
    else:
        symbol = RUN_SYMBOLS[curve.run // len(CONTRASTING_COLOURS) % len(RUN_SYMBOLS)]
        trace |= {
            "mode": "lines+markers" if len(x) < 60 else "lines",
            "marker": {"color": colour, "symbol": symbol, "size": 5},
            "line": {"color": colour, "dash": PLOTLY_DASHES[curve.style % len(PLOTLY_DASHES)]},
        }
    yield trace


def _legend_name(figure: Figure, curve: Curve, names: Sequence[str]) -> str:
    """Return the curve's name, preceded by the run's name where the curve's name does not identify the curve."""
    has_run = not curve.name or (len(names) > 1 and not figure.is_scatter)
    parts = [names[curve.run] if has_run else "", curve.name]
    return ", ".join(
        part if len(part) <= MAX_NAME_LENGTH else f"{part[: MAX_NAME_LENGTH - 1]}…" for part in parts if part
    )


def _escape(text: str) -> str:
    """Escape what plotly would render as markup, and dollar signs, which it would render as mathematics."""
    return escape_html(text, quote=False).replace("$", "&#36;")


def _short_number(value: float) -> float | None:
    """Return the number rounded to six digits, to keep the page small; None if JSON can't represent it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_pngs(figures: Sequence[Figure], names: Sequence[str], directory: Path) -> list[Path]:
    """Draw the first view of each figure into a PNG file in a folder, and return the paths.

    Raises: MissingDependencyError: matplotlib is missing. DataError: the folder can't be written to.
    """
    require("matplotlib", "PNGs need", "demo").use("Agg")
    pyplot = require("matplotlib.pyplot", "PNGs need", "demo")
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            canvas, axes = pyplot.subplots(figsize=(7, 4))
            _draw(axes, figure, names)
            canvas.tight_layout()
            ascii_key = figure.key.replace("|Δ|", "abs delta").replace("Δ", "delta").replace(">", "above")
            path = directory / f"{'-'.join(re.findall('[A-Za-z0-9_.]+', ascii_key))}.png"
            canvas.savefig(path, dpi=120)
            pyplot.close(canvas)
            paths.append(path)
    except OSError as error:
        raise DataError(f"--png: {directory} can't be written to ({error.strerror or error})") from None
    return paths


def _draw(axes: Any, figure: Figure, names: Sequence[str]) -> None:
    curves = figure.first_view
    is_log = _is_log(curves, figure.limits)
    for curve in curves:
        colour = run_colour(curve.run)
        style = (
            {"linestyle": "", "marker": "o"}
            if figure.is_scatter
            else {"linestyle": LINE_STYLES[curve.style % len(LINE_STYLES)], "linewidth": 1.5}
        )
        label = _plain_text(_legend_name(figure, curve, names))
        axes.plot(curve.x, curve.y, color=colour, label=label, **style)
        if curve.low and not figure.is_scatter:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    for value, name in _drawn_limits(curves, figure.limits, is_log):
        axes.axhline(value, color="grey", linestyle="--", linewidth=0.8)
        axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom")
    for run, step in figure.onsets.items():
        axes.axvline(step, color=run_colour(run), linestyle=":", linewidth=0.8)
    if figure.x_labels:
        axes.set_xticks(range(len(figure.x_labels)), figure.x_labels, rotation=45, ha="right", fontsize="small")
    axes.set_yscale("log" if is_log else "linear")
    axes.set_title(_plain_text(figure.title), fontsize="medium")
    axes.set_xlabel(figure.x_title)
    axes.set_ylabel(next(iter(figure.views)) or figure.y_title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")


def _plain_text(text: str) -> str:
    """Escape dollar signs, which matplotlib renders as mathematics, and prepend a space.

    Without the space matplotlib leaves names that begin with an underscore out of the legend.
    """
    return f" {text}".replace("$", r"\$")
