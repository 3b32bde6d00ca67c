"""Section of the page that shows a sweep: bias against variance of each candidate, and the recommended loss_fn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_geomask.errors import DataError
from nemo_geomask.recipe.input_limits import current_limits
from nemo_geomask.tools.diagnose.read.json_lines import open_log, parse_json
from nemo_geomask.tools.diagnose.report.figure_data import Curve, Figure
from nemo_geomask.tools.diagnose.report.json_formats import SweepJson
from nemo_geomask.tools.diagnose.report.page_tables import PageTable, merge_tables
from nemo_geomask.tools.diagnose.report.report_tables import Table


def read_sweep(path: Path) -> dict[str, Any]:
    """Return the object that ``nemo-geomask sweep --json`` printed.

    Raises:
        DataError: the file can't be read, or holds something else.
    """
    limits = current_limits()
    with open_log(path) as file:
        sweep = parse_json(file.read(limits.line_bytes + 1), f"--sweep {path}", limits)
    try:
        return dict(TypeAdapter(SweepJson).validate_python(sweep))
    except (ValidationError, OverflowError) as error:
        reason = ""
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f": {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(
            f"--sweep: {path} is not what `nemo-geomask sweep DIR --json` of this version prints{reason}"
        ) from None


@dataclass(frozen=True)
class SweepSection:
    """A sweep in the page: its run, the recommended candidate and its loss_fn block, a figure and tables."""

    run: str
    recommended: str
    block: str
    figure: Figure
    tables: list[PageTable]


def build_sweep_section(number: int, sweep: Mapping[str, Any], directories: Sequence[str]) -> SweepSection:
    """Return the section of one sweep, see :func:`_build`.

    Raises:
        DataError: the sweep is of a run that the report does not show, or not what ``sweep --json`` prints.
    """
    try:
        return _build(number, sweep, directories)
    # RuntimeError and OSError: the run's path is a loop of links.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"--sweep: not what `nemo-geomask sweep DIR --json` of this version prints: {error!r}"
        ) from None


def _build(number: int, sweep: Mapping[str, Any], directories: Sequence[str]) -> SweepSection:
    """Return the section of one sweep.

    Args:
        number: index of the sweep in the page.
        sweep: object from :func:`read_sweep`.
        directories: folders of the page's runs, which choose the colour.

    Raises:
        DataError: the sweep is of a run that the report does not show.
    """
    run_paths = [Path(directory).resolve() for directory in directories]
    sweep_path = Path(sweep["run"]).resolve()
    if sweep_path not in run_paths:
        listed = ", ".join(directories)
        raise DataError(f"--sweep: the sweep is of {sweep['run']}, which is none of the report's runs: {listed}")
    candidates = sweep["candidates"]
    marks = {candidate["name"]: "on the front" if candidate["on_front"] else "" for candidate in candidates}
    marks[sweep["recommended"]] = "recommended"

    def value(candidate: Mapping[str, Any], measure: str) -> float:
        return _nan_for_null(candidate[measure]["value"])

    curves = []
    for style, mark in enumerate(("recommended", "on the front", "")):
        marked = [candidate for candidate in candidates if marks[candidate["name"]] == mark]
        bias, variance = (tuple(value(candidate, measure) for candidate in marked) for measure in ("bias", "variance"))
        labels = tuple(candidate["name"] for candidate in marked)
        curves.append(Curve(run_paths.index(sweep_path), mark or "others", bias, variance, style=style, labels=labels))
    figure = Figure(
        f"sweep {number}",
        "Bias against variance",
        definition=(
            "Bias and variance of the gradient under each candidate; none has less of both than one on the front"
        ),
        section="sweep",
        x_title="bias",
        y_title="variance",
        views={"": curves},
        is_scatter=True,
    )
    measures = list(sweep["definitions"])
    rows = [
        (
            candidate["name"],
            marks[candidate["name"]],
            *(value(candidate, measure) for measure in measures),
            ", ".join(map(str, candidate["skipped"])),
            candidate["source"],
        )
        for candidate in candidates
    ]
    columns = ("candidate", "", *measures, "steps skipped", "source")
    candidate_table = Table("candidates", f"Candidates on {sweep['run']}", columns, rows, sweep["definitions"])
    parts = list(candidates[0]["removed_of"])
    removed = [
        (candidate["name"], *(_nan_for_null(candidate["removed_of"][part]) for part in parts))
        for candidate in candidates
        if candidate["removed_of"][parts[0]]
    ]
    removed_table = Table("removed", "Share removed, of tokens that are", ("candidate", *parts), removed)
    tables = [
        merged for table in (candidate_table, removed_table) if table.rows for merged in merge_tables([(0, table)])
    ]
    recommended = sweep["recommended"] or f"none ({sweep.get('no_recommendation', '')})"
    return SweepSection(sweep["run"], recommended, sweep["loss_fn"] or "", figure, tables)


def _nan_for_null(value: float | None) -> float:
    return math.nan if value is None else float(value)
