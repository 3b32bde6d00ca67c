"""A diagnosis as one HTML file that needs nothing beside it: no network, no other file.

What came out of a run (labels of masks, text of tokens, names of folders) reaches the page through a template that
escapes everything, and as JSON that can't end its script; the page's own policy forbids every script but its two.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.diagnosis.beside import SideBySide, side_by_side
from nemo_geomask.diagnosis.causes import CAUSES
from nemo_geomask.diagnosis.draw import COLOURS, plotly_figure
from nemo_geomask.diagnosis.excerpts import GRADES, Excerpt, excerpts
from nemo_geomask.diagnosis.figures import Curve, Figure, figures_of, group_lifts, logged_figures
from nemo_geomask.diagnosis.logged import Series, read_logged
from nemo_geomask.diagnosis.quantities import MEASURES
from nemo_geomask.diagnosis.sources import RunFiles
from nemo_geomask.diagnosis.text import STEP, Decode, Table, tables
from nemo_geomask.diagnosis.verdict import RunDiagnosis
from nemo_geomask.errors import DataError, GeomaskError
from nemo_geomask.optional import require

__all__ = ["ReportedRun", "read_sweep", "report", "short_names", "write_report"]


@dataclass(frozen=True)
class ReportedRun:
    """What a report says of one run.

    Attributes:
        name: short.
        directory: where its files are.
        diagnosis: of it.
        excerpts: of its worst sequences.
        logged: its own metrics.
    """

    name: str
    directory: str
    diagnosis: RunDiagnosis
    excerpts: Sequence[Excerpt] = ()
    logged: Series = field(default_factory=dict)


def short_names(directories: Sequence[Path]) -> list[str]:
    """Of runs: what differs in their paths."""
    whole = [path.resolve() for path in directories]
    if len(set(whole)) < 2:
        return [path.name for path in whole]
    common = os.path.commonpath(whole)
    found = [path.relative_to(common).parts for path in whole]
    while all(len(parts) > 1 for parts in found) and len({parts[-1] for parts in found}) == 1:
        found = [parts[:-1] for parts in found]
    return ["/".join(parts) or Path(common).name for parts in found]


def read_sweep(path: Path) -> dict[str, Any]:
    """What ``nemo-geomask sweep --json`` has printed.

    Raises: DataError: it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--sweep: {path} can't be read: {error}") from None
    if not isinstance(found, dict) or not {"run", "definitions", "candidates", "loss_fn", "recommended"} <= set(found):
        raise DataError(f"--sweep: {path} is not what `nemo-geomask sweep DIR --json` of this version prints")
    return found


@dataclass(frozen=True)
class _PageSection:
    """Of the page."""

    id: str
    title: str
    intro: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[SideBySide] = field(default_factory=list)
    definitions: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False

    @property
    def views(self) -> list[str]:
        """What may be measured in its figures."""
        return list(dict.fromkeys(view for figure in self.figures for view in figure.curves if view))


def _groups(run: RunDiagnosis) -> Table:
    found = [
        (step, group, share, lift) for step in run.evidence.steps_after for group, share, lift in group_lifts(run, step)
    ]
    definitions = {
        "share": "of the sum of |Δ| (each at most 1) in its step",
        "times the others": "mean |Δ| over mean 1 − p, in units of that of the step's other groups",
    }
    rows: list[tuple[Any, ...]] = sorted(found, key=lambda row: -row[-1])[:8]
    title = "Prompt groups with the largest mismatch"
    return Table("groups", title, ("step", "group", "share", "times the others"), rows, definitions)


_NEED = ("a report needs", "diagnose")
_SECTIONS = {
    "numbers": ("Numbers", ""),
    "causes": ("What was looked for", "Each cause, what was measured and from where on it counts."),
    "steps": (
        "By step",
        "Shaded: 95 % over sequences. Vertical: where the mismatch changed. Drag to zoom, double-click to go back.",
    ),
    "more": ("More numbers by step", ""),
    "parts": ("By position, length, probability, …", "Where the mismatch is."),
    "masks": ("What the masks removed", "As each judged the batch when it was recorded."),
    "logged": ("As the run logged it", "Its own metrics: from metrics.jsonl or TensorBoard's files."),
    "worst": ("Worst sequences and tokens", ""),
}
_HOME = {"changes": "steps", "steps": "steps", "circle": "steps", "numbers": "numbers", "causes": "causes"}


def _sections(
    runs: Sequence[ReportedRun], decode: Decode | None, pairs: Sequence[tuple[str, ...]]
) -> list[_PageSection]:
    found = {key: _PageSection(key, title, intro, folded=key == "more") for key, (title, intro) in _SECTIONS.items()}
    of_parts = {measure.name: measure.definition for measure in MEASURES}
    found["parts"] = replace(found["parts"], definitions=of_parts)
    for figure in [*figures_of([run.diagnosis for run in runs]), *logged_figures([run.logged for run in runs])]:
        found[figure.section].figures.append(figure)
    of_runs = []
    for run in runs:
        shown = [*tables(run.diagnosis, decode), _groups(run.diagnosis)]
        more = tables(run.diagnosis, None, [(STEP,), *pairs])
        of_runs.append([*shown, *(table for table in more if table.key not in {one.key for one in shown})])
    for key in dict.fromkeys(table.key for one in of_runs for table in one):
        same = [(place, table) for place, one in enumerate(of_runs) for table in one if table.key == key and table.rows]
        home = _HOME.get(key, "worst" if key.startswith("worst") else "parts")
        if same:
            found[home].tables.extend(side_by_side(same))
    return [section for section in found.values() if section.figures or section.tables]


def _of_sweep(number: int, sweep: Mapping[str, Any], runs: Sequence[ReportedRun]) -> dict[str, Any]:
    directories = [Path(run.directory).resolve() for run in runs]
    if Path(sweep["run"]).resolve() not in directories:
        listed = ", ".join(run.directory for run in runs)
        raise DataError(f"--sweep: what was swept is {sweep['run']}, which is none of the report's runs: {listed}")
    place = directories.index(Path(sweep["run"]).resolve())
    measures = list(sweep["definitions"])

    def point(one: Mapping[str, Any], name: str) -> float:
        value = one[name]["value"]
        return math.nan if value is None else float(value)

    curves = []
    kinds = {one["name"]: "on the front" if one["on_front"] else "others" for one in sweep["candidates"]}
    kinds[sweep["recommended"]] = "recommended"
    for style, name in enumerate(("recommended", "on the front", "others")):
        these = [one for one in sweep["candidates"] if kinds[one["name"]] == name]
        x, y = (tuple(point(one, measure) for one in these) for measure in ("bias", "variance"))
        curves.append(Curve(place, name, x, y, style=style, labels=tuple(one["name"] for one in these)))
    said = "Bias against variance of the gradient under each candidate; on the front, none has less of both"
    figure = Figure(
        f"sweep {number}", "Bias against variance", said, "sweep", "variance", "bias", {"": curves}, points=True
    )
    rows: list[tuple[Any, ...]] = []
    for one in sweep["candidates"]:
        mark = "" if kinds[one["name"]] == "others" else kinds[one["name"]]
        skipped = ", ".join(map(str, one["skipped"]))
        rows.append((one["name"], mark, *(point(one, name) for name in measures), skipped, one["source"]))
    columns = ("candidate", "", *measures, "steps skipped", "source")
    table = Table("candidates", f"Candidates on {sweep['run']}", columns, rows, sweep["definitions"])
    parts = list(next(iter(sweep["candidates"]))["removed_of"])
    rows = [
        (
            one["name"],
            *(math.nan if one["removed_of"][part] is None else float(one["removed_of"][part]) for part in parts),
        )
        for one in sweep["candidates"]
        if one["removed_of"][parts[0]]
    ]
    removed = Table("removed", "Share removed, of tokens that are", ("candidate", *parts), rows)
    return {
        "run": sweep["run"],
        "figure": figure,
        "tables": [shown for one in (table, removed) if one.rows for shown in side_by_side([(0, one)])],
        "recommended": sweep["recommended"],
        "block": sweep["loss_fn"],
    }


def report(
    path: Path,
    found: Sequence[tuple[RunFiles, RunDiagnosis]],
    *,
    others: Mapping[str, tuple[str, str]] | None = None,
    sweeps: Sequence[Mapping[str, Any]] = (),
    decode: Decode | None = None,
    pairs: Sequence[tuple[str, ...]] = (),
    cache: Path | None = None,
    names: Sequence[str] | None = None,
    logged: Sequence[Series] | None = None,
) -> None:
    """Write the report on runs, with excerpts of their worst sequences; see :func:`write_report`.

    Without ``names``, what differs in the runs' paths is taken, and without ``logged`` what is in their folders.
    """
    names = names or short_names([run.directory for run, _ in found])
    runs, others = [], dict(others or {})
    for place, (name, (run, diagnosis)) in enumerate(zip(names, found, strict=True)):
        series: Series = {}
        try:
            series = read_logged(run.directory) if logged is None else logged[place]
        except GeomaskError as error:
            others[str(run.directory)] = ("unknown", f"its own metrics are not shown: {error}")
        parts = excerpts(run, diagnosis, decode, cache)
        runs.append(ReportedRun(name, str(run.directory), diagnosis, parts, series))
    write_report(path, runs, others=others, sweeps=sweeps, decode=decode, pairs=pairs)


def write_report(
    path: Path,
    runs: Sequence[ReportedRun],
    *,
    others: Mapping[str, tuple[str, str]] | None = None,
    sweeps: Sequence[Mapping[str, Any]] = (),
    decode: Decode | None = None,
    pairs: Sequence[tuple[str, ...]] = (),
) -> None:
    """Write the page.

    Args:
        path: of the file; it appears whole or not at all.
        runs: at least one; more are shown side by side.
        others: by folder without records, its health and what is known of it.
        sweeps: from :func:`read_sweep`.
        decode: makes text of token ids.
        pairs: of dimensions that were surveyed together.

    Raises: MissingDependencyError: plotly or Jinja is missing. DataError: the file can't be written, or a sweep is of
    another run.
    """
    names = [run.name for run in runs]
    sections = _sections(runs, decode, pairs)
    swept = [_of_sweep(number, sweep, runs) for number, sweep in enumerate(sweeps)]
    figures = [figure for section in sections for figure in section.figures] + [one["figure"] for one in swept]
    plotly = require("plotly.offline", *_NEED).get_plotlyjs().replace("\r", "")
    script = _part("js")
    page = _template().render(
        version=nemo_geomask.__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        policy=" ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script)),
        style=_part("css"),
        plotly=plotly,
        script=script,
        runs=[_run(place, run) for place, run in enumerate(runs)],
        others=dict(others or {}),
        sections=sections,
        sweeps=swept,
        grades=GRADES,
        causes=CAUSES,
        figures={figure.key: plotly_figure(figure, names) for figure in figures},
    )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(page, encoding="utf-8", newline="\n")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"--html: {path} can't be written ({error.strerror or error})") from None


def _run(place: int, run: ReportedRun) -> dict[str, Any]:
    diagnosis = run.diagnosis
    total = diagnosis.evidence.statistics.total()
    steps = sorted(diagnosis.evidence.statistics.steps)
    when, _, why = diagnosis.headline.partition(": ")
    judged = [] if diagnosis.unknown else CAUSES
    absent = {cause.id for cause in CAUSES if math.isnan(diagnosis.found[cause.id].share)}
    return {
        "name": run.name,
        "letter": chr(ord("A") + place % 26),
        "directory": run.directory,
        "colour": COLOURS[place % len(COLOURS)],
        "health": "unknown" if diagnosis.unknown else diagnosis.health,
        "when": when,
        "why": why,
        "cause": diagnosis.cause,
        "shown": [cause for cause in judged if diagnosis.found[cause.id].shown and cause is not diagnosis.cause],
        "ruled_out": [cause for cause in judged if not diagnosis.found[cause.id].shown and cause.id not in absent],
        "absent": [cause for cause in judged if cause.id in absent],
        "extent": f"{len(steps)} steps, {steps[0]} to {steps[-1]}; {total['sequences']:,.0f} sequences and "
        f"{total['tokens']:,.0f} trained tokens with log-probs of both engines",
        "excerpts": run.excerpts,
    }


def _template() -> Any:
    jinja = require("jinja2", *_NEED)
    loader = jinja.PackageLoader("nemo_geomask.diagnosis", "page")
    environment = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}
    return environment.get_template("page.html")


def _part(ending: str) -> str:
    return (Path(__file__).parent / "page" / f"page.{ending}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
