"""The HTML report: one file that needs no network and no other file.

All that comes from a run (labels of masks, text of tokens, names of folders) enters the page through a Jinja template
that escapes it, or as JSON that cannot end its script element. The page's content security policy allows no script but
the page's own and plotly's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.errors import DataError
from nemo_geomask.optional import require
from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis, causes_by_need
from nemo_geomask.tools.diagnose.measure.dimensions import BIN_DEFINITIONS
from nemo_geomask.tools.diagnose.report.figures import Figure, diagnosis_figures, plotly_figure, run_colour
from nemo_geomask.tools.diagnose.report.report_tables import Decode, Table, diagnosis_tables
from nemo_geomask.tools.shared.atomic_write import write_atomically
from nemo_geomask.tools.shared.intervals import CONFIDENCE_LABEL
from nemo_geomask.tools.shared.terminal_tables import format_cell


def short_names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each run: the part of its path in which the runs differ."""
    paths = [path.resolve() for path in directories]
    if len(set(paths)) < 2:
        return [path.name for path in paths]
    common = os.path.commonpath(paths)
    names = [path.relative_to(common).parts for path in paths]
    while all(len(parts) > 1 for parts in names) and len({parts[-1] for parts in names}) == 1:
        names = [parts[:-1] for parts in names]
    return ["/".join(parts) or Path(common).name for parts in names]


@dataclass(frozen=True)
class _PageSection:
    """Section of the page: figures, and tables below them."""

    id: str
    title: str
    intro: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[tuple[int, Table]] = field(default_factory=list)  # index of the run, and its table


_SECTIONS = {
    "numbers": ("Numbers", ""),
    "causes": ("Causes that were tested", "Each cause, its measured value, and the threshold above which it is shown."),
    "steps": (
        "By step",
        f"Shaded: {CONFIDENCE_LABEL} interval over sequences. Vertical line: the step at which the mismatch rose. Drag "
        "to zoom, double-click to reset.",
    ),
    "more": ("More numbers by step", ""),
    "parts": ("By position, length, probability, …", "Which tokens have the mismatch."),
    "worst": ("Worst sequences and tokens", ""),
}
"""Title and introduction of each section, by its id, in the order of the page."""

_SECTION_OF_TABLE = {
    **{key: key for key in ("numbers", "causes", "steps")},
    **dict.fromkeys(("worst_sequences", "worst_tokens"), "worst"),
}
"""Section of each table, by the table's key; the tables by dimension, which are not listed, are in ``parts``."""

_TEXT_COLUMNS = ("definition", "which is")
"""Titles of columns that hold sentences."""


def _column_class(table: Table, index: int) -> str:
    """Return the CSS class of a column: ``text`` for sentences, ``short`` for names, ``number`` for numbers."""
    if table.columns[index] in _TEXT_COLUMNS:
        return "text"
    return "short" if any(isinstance(row[index], str) and row[index] for row in table.rows) else "number"


def _build_sections(runs: Sequence[RunDiagnosis], decode: Decode | None) -> list[_PageSection]:
    """Return the sections that have a figure or a table."""
    sections = {key: _PageSection(key, title, intro) for key, (title, intro) in _SECTIONS.items()}
    for figure in diagnosis_figures(runs):
        sections[figure.section].figures.append(figure)
    tables_by_key: dict[str, list[tuple[int, Table]]] = {}
    for index, run in enumerate(runs):
        for table in diagnosis_tables(run, decode):
            tables_by_key.setdefault(table.key, []).append((index, table))
    for key, tables in tables_by_key.items():
        # The definitions are the same for all runs and stand below the last table; those of dimensions, at the top.
        *first, (last_index, last) = tables
        section = sections[_SECTION_OF_TABLE.get(key, "parts")]
        shown = last if section.id != "parts" else replace(last, definitions={})
        section.tables.extend((index, replace(table, definitions={})) for index, table in first)
        section.tables.append((last_index, shown))
    return [section for section in sections.values() if section.figures or section.tables]


_REQUIREMENT = ("a report needs", "diagnose")


def write_report(
    path: Path,
    runs: Sequence[tuple[Path, RunDiagnosis]],
    *,
    fallbacks: Mapping[str, tuple[str, str]] | None = None,
    decode: Decode | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Write the report on one or more runs.

    Args:
        path: the HTML file; it appears complete or not at all.
        runs: folder and diagnosis of at least one run; several are shown side by side.
        fallbacks: health and verdict of each folder without records, by the folder.
        decode: function that decodes token ids; None: ids are shown.
        names: names of the runs; None: the parts of their paths that differ.

    Raises: MissingDependencyError: plotly or Jinja is missing. DataError: the file can't be written.
    """
    names = names or short_names([directory for directory, _ in runs])
    diagnoses = [diagnosis for _, diagnosis in runs]
    sections = _build_sections(diagnoses, decode)
    figures = [figure for section in sections for figure in section.figures]
    plotly_script = require("plotly.offline", *_REQUIREMENT).get_plotlyjs().replace("\r", "")
    page_script = _read_page_file("page.js")
    html = _load_template().render(
        version=nemo_geomask.__version__,
        written_at=time.strftime("%Y-%m-%d %H:%M"),
        script_hashes=" ".join(f"'sha256-{_sha256(script)}'" for script in (plotly_script, page_script)),
        style=_read_page_file("page.css"),
        plotly_script=plotly_script,
        page_script=page_script,
        bin_definitions=BIN_DEFINITIONS,
        runs=[_run_context(index, name, *run) for index, (name, run) in enumerate(zip(names, runs, strict=True))],
        fallbacks=dict(fallbacks or {}),
        sections=sections,
        format_cell=format_cell,
        column_class=_column_class,
        figures={figure.key: plotly_figure(figure, names) for figure in figures},
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, html)
    except OSError as error:
        raise DataError(f"--html: {path} can't be written ({error.strerror or error})") from None


def _run_context(index: int, name: str, directory: Path, diagnosis: RunDiagnosis) -> dict[str, Any]:
    """Return the template's variables of one run."""
    detections = diagnosis.detections
    total = diagnosis.evidence.statistics.total()
    steps = sorted(diagnosis.evidence.statistics.steps)
    verdict, _, reason = diagnosis.headline.partition(": ")
    causes = [] if diagnosis.unjudged_reason else CAUSES
    ruled_out = [cause for cause in causes if detections[cause.id].state == "ruled out"]
    return {
        "name": name,
        "letter": chr(ord("A") + index % 26),
        "directory": str(directory),
        "colour": run_colour(index),
        "health": "unknown" if diagnosis.unjudged_reason else diagnosis.health,
        "verdict": verdict,
        "reason": "; ".join([reason, *diagnosis.evidence.statistics.file_notes]),
        "advice": diagnosis.shown[0].advice if diagnosis.shown else (),
        "place": diagnosis.shown[0] if diagnosis.cause is not None and diagnosis.cause.is_place else None,
        "ruled_out": [cause.name for cause in ruled_out if not cause.is_place],
        "without_excess": [cause.name for cause in ruled_out if cause.is_place],
        "untested": {
            needs: [cause.name for cause in causes if cause.id in ids]
            for needs, ids in causes_by_need(detections if causes else {}).items()
        },
        "extent": f"{len(steps)} steps, {steps[0]} to {steps[-1]}; {total['sequences']:,.0f} sequences and "
        f"{total['tokens']:,.0f} trained tokens with log-probs of both engines",
    }


def _load_template() -> Any:
    jinja = require("jinja2", *_REQUIREMENT)
    loader = jinja.PackageLoader("nemo_geomask.tools.diagnose.report", "page")
    environment = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}
    return environment.get_template("page.html")


def _read_page_file(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    """Return the hash that identifies a script in the content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
