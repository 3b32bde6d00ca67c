"""A figure, drawn: by plotly in the page, by matplotlib as a PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import Any

from nemo_geomask.diagnosis.figures import Curve, Figure
from nemo_geomask.errors import DataError
from nemo_geomask.optional import require

__all__ = ["COLOURS", "plotly_figure", "write_pngs"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#C2679B")
"""Of the runs, after Okabe and Ito: told apart by colour-blind readers, at contrast 3:1 on a light and a dark page."""
SYMBOLS = ("circle", "diamond", "square", "x")
"""Of every fourth run, which have the same colour."""
POINT_SYMBOLS = ("star", "circle", "circle-open")
DASHES = ("solid", "dot", "dash", "dashdot")
LONGEST = 48
"""Of a name in a legend, in characters."""


def _spread(curves: Sequence[Curve], limits: Sequence[float]) -> float:
    """The largest value over the smallest; 1 where some are not above 0."""
    known = [*limits, *(y for curve in curves for y in curve.y if math.isfinite(y))]
    return max(known) / min(known) if known and min(known) > 0 else 1.0


def _is_log(curves: Sequence[Curve], limits: Sequence[float]) -> bool:
    return _spread(curves, limits) > 20


def _near(curves: Sequence[Curve], limits: Sequence[float], log: bool) -> list[tuple[float, str]]:
    """Limits that don't press the curves together."""
    known = [y for curve in curves for y in curve.y if math.isfinite(y)]
    if not known:
        return []
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
    yield {
        **drawn,
        "marker": {"color": colour, **marker},
        "line": {"color": colour, "dash": DASHES[curve.style % len(DASHES)]},
    }


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
    require("matplotlib", "PNGs need", "demo").use("Agg")
    pyplot = require("matplotlib.pyplot", "PNGs need", "demo")
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            drawn, axes = pyplot.subplots(figsize=(7, 4))
            _draw(axes, figure, names)
            drawn.tight_layout()
            ascii_key = figure.key.replace("|Δ|", "abs delta").replace("Δ", "delta").replace(">", "above")
            written.append(directory / f"{'-'.join(re.findall('[A-Za-z0-9_.]+', ascii_key))}.png")
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
            {"linestyle": "", "marker": "o"}
            if figure.points
            else {"linestyle": dashes[curve.style % len(dashes)], "linewidth": 1.5}
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
